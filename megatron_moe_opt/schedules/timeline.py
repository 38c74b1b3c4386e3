"""When each op of a schedule ran: predicted by the simulator, or measured by the executor."""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Lane, Op, Schedule


@dataclass(frozen=True)
class Span:
    """One op's time in its lane, in seconds from the start of the schedule."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule and a span for each of its ops, in the order of `schedule.ops`."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the start of the schedule to the end of its last op; 0 for a schedule without ops."""
        return max((span.end for span in self.spans), default=0.0)

    def lane(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of one lane, in order."""
        return tuple(span for span in self.spans if span.op.lane is lane)
