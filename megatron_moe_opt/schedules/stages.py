"""The stages of a MoE layer as timelines: what a whole step looks like, whichever dispatcher runs in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_moe_opt.schedules.groups import EP
from megatron_moe_opt.schedules.schedule import OF_EXPERTS, Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Part, Timeline, as_they_ran

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class PassInstants:
    """When one pass of a layer came to its stages, in seconds since the recording began."""

    direction: str
    """The direction of the pass: FORWARD or BACKWARD."""
    begin: float
    exchange_begin: float
    calls: tuple[tuple[float, float], ...]
    """Begin and end of each call of the experts, in seconds."""
    exchange_end: float
    end: float

    def spans(self, with_experts: bool, with_exchange: bool) -> Iterable[tuple[Op, float, float]]:
        """Yields what is between the instants: rows handled on the rank, experts, and the ways there and back.

        Args:
            with_experts, with_exchange: whether nothing else shows these.
        """
        yield Op(Kind.PERMUTE, Lane.COMPUTE), self.begin, self.exchange_begin
        if with_experts:
            kind = Kind.COMPUTE if self.direction == FORWARD else Kind.GRADIENT
            yield from ((Op(kind, Lane.COMPUTE, number), *call) for number, call in enumerate(self.calls))
        if with_exchange:
            first = min((begin for begin, _ in self.calls), default=self.exchange_end)
            last = max((end for _, end in self.calls), default=self.exchange_end)
            yield Op(Kind.ALL_TO_ALL, Lane.INTER, group=EP), self.exchange_begin, first
            if last < self.exchange_end:
                yield Op(Kind.ALL_TO_ALL, Lane.INTER, group=EP), last, self.exchange_end
        yield Op(Kind.PERMUTE, Lane.COMPUTE), self.exchange_end, self.end


def whole_step(name: str, stages: Sequence[PassInstants], schedules: Sequence[Timeline]) -> Timeline:
    """Returns the step from its first stage to its last, with the schedules where they ran, and a part a direction.

    Experts that a schedule runs itself are shown there. A dispatcher without schedules is shown by its stages alone:
    the exchange with all collectives in it as one all-to-all.
    """
    with_experts = not any(op.kind in OF_EXPERTS for one in schedules for op in one.schedule.ops)
    spans = sorted(
        (span for one in stages for span in one.spans(with_experts, not schedules)), key=lambda span: span[1]
    )
    first = min(one.begin for one in stages)
    ops = tuple(op for op, _, _ in spans)
    of_stages = Timeline.of_times(
        Schedule("stages", ops), [(begin - first, end - first) for _, begin, end in spans], first
    )
    placed = as_they_ran(name, {str(number): one for number, one in enumerate((of_stages, *schedules))})
    earliest = min(one.began for one in (of_stages, *schedules))
    parts = tuple(Part(one.direction, one.begin - earliest, one.end - earliest) for one in stages)
    return replace(placed, parts=parts)
