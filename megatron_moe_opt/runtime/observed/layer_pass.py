"""When a pass of a MoE layer came to each of its stages, forward and backward: instants, and the times between them.

    forward    begin | dispatch: permute, exchange ... | experts | combine: ... exchange, unpermute | end
    backward   begin | combine:            exchange ... | experts | dispatch: ... exchange          | end

Both directions have the same instants. The experts may be called several times (partitions, or the experts of other
ranks), one call may begin before another ends (autograd runs calls' backward passes in its own order), and there may
be none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_moe_opt.runtime.observed.traffic import SentBytes

Instant = Any
"""A point in time: seconds of the host's clock, or an event on the CUDA stream that was current."""


class HostClock:
    """The clock for layers on a CPU, where work is done when the call that does it returns."""

    now = staticmethod(time.perf_counter)

    @staticmethod
    def seconds(start: float, end: float) -> float:
        """Returns the seconds from one instant to another."""
        return end - start

    @staticmethod
    def settle() -> None:
        """Does nothing: instants on the host are known at once."""


class DeviceClock:
    """The clock for layers on the current CUDA device. Nothing waits for the device before `settle`."""

    @staticmethod
    def now() -> torch.cuda.Event:
        """Returns the instant at which the current stream comes to this point."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the seconds from one instant to another; both must be past."""
        return start.elapsed_time(end) / 1e3

    @staticmethod
    def settle() -> None:
        """Waits until all instants are past."""
        torch.cuda.synchronize()  # host synchronisation: at the logging interval


class Times(NamedTuple):
    """The seconds of a pass in one direction. `dispatch`, `experts` and `combine` add up to at most `layer`."""

    dispatch: float
    """Seconds up to the first call of the experts (forward), or from the end of the last one on (backward)."""
    experts: float
    """Seconds in calls of the experts."""
    combine: float
    exposed: float
    """Seconds between permutation and sum of rows, but not in a call of the experts: communication that experts do not
    hide, with the sorting of rows that belongs to it.
    """
    layer: float


@dataclass
class Direction:
    """The instants of a pass in one direction, as far as it has come."""

    is_backward: bool = False
    begin: Instant = None
    exchange_begin: Instant = None
    calls: list[tuple[int, Instant]] = field(default_factory=list)
    """The instants at which calls of the experts begin (1) and end (-1)."""
    exchange_end: Instant = None
    end: Instant = None
    sent: SentBytes = field(default_factory=SentBytes)
    is_counted: bool = True
    """Whether `sent` is all that was sent."""

    @property
    def is_whole(self) -> bool:
        """Whether the pass came to its end."""
        return all(one is not None for one in (self.begin, self.exchange_begin, self.exchange_end, self.end))

    def merged_calls(self, seconds: Callable[[Instant], float]) -> list[tuple[float, float]]:
        """Returns when calls of the experts begin and end, in turn; calls that overlap are one.

        Args:
            seconds: tells when an instant was.
        """
        merged: list[tuple[float, float]] = []
        depth, since = 0, 0.0
        for step, instant in self.calls:
            since = seconds(instant) if depth == 0 else since
            depth += step
            if depth == 0:
                merged.append((since, seconds(instant)))
        return merged

    def times(self, clock: HostClock | DeviceClock) -> Times | None:
        """Returns the times of the pass; None for one that did not come to its end."""
        if not self.is_whole:
            return None

        def at(instant: Instant) -> float:
            return clock.seconds(self.begin, instant)

        exchange_begin, exchange_end, end = at(self.exchange_begin), at(self.exchange_end), at(self.end)
        calls = self.merged_calls(at) or [(exchange_end, exchange_end)]
        experts = sum(until - since for since, until in calls)
        before, after = calls[0][0], end - calls[-1][1]
        dispatch, combine = (after, before) if self.is_backward else (before, after)
        return Times(dispatch, experts, combine, exchange_end - exchange_begin - experts, end)


@dataclass
class LayerPass:
    """One pass of a layer that is observed."""

    tokens_of_experts: torch.Tensor
    """How many of this rank's tokens go to each expert, int64 [experts], on the layer's device."""
    recomputed: bool
    """Whether it repeats a forward pass, in the backward pass."""
    rows: int = 0
    """Number of rows that this rank's calls of the experts got."""
    rounding: list[torch.Tensor] = field(default_factory=list)
    """What rounding has lost of tokens, and of the experts' outputs, float64 [2] each, see rows.row_layout.rounding;
    empty: neither is narrowed.
    """
    forward: Direction = field(default_factory=Direction)
    backward: Direction = field(default_factory=lambda: Direction(is_backward=True))


STRIDE = 7
"""The number of passes of which one is observed. It shares no factor with usual numbers of micro-batches, so that every
one of a step's gets its turn.
"""
MOST = 24
"""The most passes that are kept between two reports; a multiple of 3."""


class Samples:
    """Keeps every `stride`-th pass of a layer, by default every STRIDE-th; where there are too many between two
    reports, every third of them, and so on.

    Ranks that run the same passes observe the same ones.
    """

    def __init__(self, stride: int | None = None) -> None:
        self.passes: list[LayerPass] = []
        self._usual = self._stride = stride or STRIDE
        self._wait = self._usual // 2  # not the first one, in which much happens for the first time

    def is_next(self) -> bool:
        """Whether the pass that begins is observed."""
        self._wait -= 1
        return self._wait < 0

    def add(self, observed: LayerPass) -> None:
        """Keeps the pass for which `is_next` was true."""
        self.passes.append(observed)
        self._wait = self._stride - 1
        if len(self.passes) == MOST:
            self.passes = self.passes[::3]
            self._stride *= 3  # stays without a factor of 2

    def take(self) -> list[LayerPass]:
        """Returns the passes kept since the last time."""
        taken, self.passes = self.passes, []
        self._stride, self._wait = self._usual, min(self._wait, self._usual - 1)
        return taken
