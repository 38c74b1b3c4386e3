"""When each op of a schedule ran: predicted by the simulator, or measured by the executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_moe_opt.schedules.schedule import COLLECTIVES, OF_EXPERTS, OF_SHARED_EXPERTS, Kind, Lane, Op, Schedule

_COMPUTING = OF_EXPERTS | OF_SHARED_EXPERTS | {Kind.ACTIVATE}


@dataclass(frozen=True)
class Span:
    """One op's time in its lane, in seconds from the start of the schedule."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Part:
    """Where one of several timelines begins and ends among the others, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule and a span for each of its ops, in the order of `schedule.ops`."""

    schedule: Schedule
    spans: tuple[Span, ...]
    parts: tuple[Part, ...] = ()
    """The parts of a timeline that was made of several."""
    began: float = 0.0
    """When the schedule began, in seconds since the recording did; 0 where that is not known."""

    @classmethod
    def of_times(cls, schedule: Schedule, times: Iterable[tuple[float, float]], began: float = 0.0) -> Timeline:
        """Returns the timeline of a schedule whose ops had these (start, end), in seconds since it began."""
        return cls(schedule, tuple(Span(op, *time) for op, time in zip(schedule.ops, times, strict=True)), began=began)

    @classmethod
    def in_turn(cls, name: str, ops: Iterable[tuple[Op, float]]) -> Timeline:
        """Returns a timeline of (op, seconds) one after another: of what is known without being played.

        Each op waits for the one before it, and has no buffers.
        """
        spans: list[Span] = []
        for op, seconds in ops:
            begin, waits_for = (spans[-1].end, (len(spans) - 1,)) if spans else (0.0, ())
            spans.append(Span(replace(op, waits_for=waits_for, reads=(), writes=()), begin, begin + seconds))
        return cls(Schedule(name, tuple(span.op for span in spans)), tuple(spans))

    @property
    def seconds(self) -> float:
        """Returns the seconds from the schedule's start to the end of its last op; 0 for a schedule without ops."""
        return max((span.end for span in self.spans), default=0.0)

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """Returns the spans of one lane, in order."""
        return tuple(span for span in self.spans if span.op.lane is lane)

    def titled(self, name: str) -> str:
        """Returns the title of a picture of it: `name`, and its schedule's name where that is another one."""
        return name if name == self.schedule.name else f"{name}: {self.schedule.name}"

    def busy(self, lane: Lane) -> float:
        """Returns the seconds that ops of a lane take; a collective's wait for its peers counts."""
        return sum(span.end - span.start for span in self.lane(lane))

    @property
    def is_beside(self) -> bool:
        """Whether it ran beside all schedules: experts that travel."""
        return Lane.EXPERTS in self.schedule.lanes

    @property
    def hidden(self) -> float:
        """Returns the seconds saved, against all ops one after another. Below 0 where no lane is busy for a while."""
        return sum(self.busy(lane) for lane in self.schedule.lanes) - self.seconds

    @property
    def exposed(self) -> float:
        """Returns the seconds in which a collective runs and nothing is computed: the layer waits for communication."""
        computing = _covered(span for span in self.spans if span.op.kind in _COMPUTING)
        return _covered(span for span in self.spans if span.op.kind in COLLECTIVES | _COMPUTING) - computing

    @property
    def hideable(self) -> float:
        """Returns what `hidden` would be if all lanes were hidden behind the one that is busy longest."""
        busy = [self.busy(lane) for lane in self.schedule.lanes]
        return sum(busy) - max(busy, default=0.0)


def _covered(spans: Iterable[Span]) -> float:
    """Returns the seconds in which at least one of the spans runs."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(span.end - max(span.start, until), 0.0)
        until = max(until, span.end)
    return covered


def overlap(timelines: Iterable[Timeline]) -> float | None:
    """Returns the part of what lanes could hide behind each other that they hid; None where there was nothing."""
    timelines = list(timelines)
    hideable = sum(timeline.hideable for timeline in timelines)
    return max(sum(timeline.hidden for timeline in timelines), 0.0) / hideable if hideable else None


def numbered(timelines: Iterable[Timeline]) -> dict[str, Timeline]:
    """Returns the timelines by name: their number, from 1 on, and their schedule's name."""
    return {f"{number}. {one.schedule.name}": one for number, one in enumerate(timelines, start=1)}


def one_after_another(name: str, timelines: Mapping[str, Timeline]) -> Timeline:
    """Joins timelines into one, with a part for each: each begins when the one before it has ended.

    Its schedule runs them so: the first ops of a part wait for the last ones of the part before. Buffers of different
    parts are different ones.
    """
    ops: list[Op] = []
    spans: list[Span] = []
    parts: list[Part] = []
    inputs: list[str] = []
    last: dict[Lane, int] = {}  # the last op of each lane in the part before
    for part, timeline in timelines.items():
        begin = parts[-1].end if parts else 0.0
        seen: dict[Lane, int] = {}
        for span in _placed(part, timeline, begin, len(ops)):
            op = span.op
            if op.lane not in seen:
                op = replace(op, waits_for=(*last.values(), *op.waits_for))
            seen[op.lane] = len(ops)
            ops.append(op)
            spans.append(replace(span, op=op))
        last = seen or last
        parts.append(Part(part, begin, begin + timeline.seconds))
        inputs += _inputs(part, timeline)
    return Timeline(Schedule(name, tuple(ops), tuple(inputs)), tuple(spans), tuple(parts))


def as_they_ran(name: str, timelines: Mapping[str, Timeline]) -> Timeline:
    """Joins timelines into one in which each begins when it began, the first at 0.

    It has a part for each but those that ran beside the others.
    """
    first = min((timeline.began for timeline in timelines.values()), default=0.0)
    spans: list[Span] = []
    parts: list[Part] = []
    inputs: list[str] = []
    for part, timeline in sorted(timelines.items(), key=lambda item: item[1].began):
        begin = timeline.began - first
        spans += _placed(part, timeline, begin, len(spans))
        if not timeline.is_beside:
            parts.append(Part(part, begin, begin + timeline.seconds))
        inputs += _inputs(part, timeline)
    return Timeline(Schedule(name, tuple(span.op for span in spans), tuple(inputs)), tuple(spans), tuple(parts))


def _placed(part: str, timeline: Timeline, begin: float, first_op: int) -> Iterator[Span]:
    """Yields the spans from `begin` on, of ops of which `first_op` is the first in their schedule, with own buffers."""
    for span in timeline.spans:
        reads, writes = (tuple(f"{part}: {buffer}" for buffer in used) for used in (span.op.reads, span.op.writes))
        waits_for = tuple(first_op + other for other in span.op.waits_for)
        op = replace(span.op, waits_for=waits_for, reads=reads, writes=writes)
        yield Span(op, begin + span.start, begin + span.end)


def _inputs(part: str, timeline: Timeline) -> list[str]:
    return [f"{part}: {buffer}" for buffer in timeline.schedule.inputs]
