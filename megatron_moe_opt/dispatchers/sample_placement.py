"""Where the samples of a forward pass are, and where each MoE layer sends them: decided in a background thread.

The MoE layers of a pipeline stage (or of a virtual chunk of it) share a `SampleOrder`. It begins each pass with all
samples at home. Every layer but the last sends them where its combine and the next layer's dispatch are predicted to
cost least; the last one sends them home, so that nothing outside the layers notices.

All ranks of the joint group decide for themselves, from the counts that they all have. Where these have different
numbers of samples, or samples of different lengths, all stay at home: a sample would count otherwise in the means that
a rank takes over its own.

A layer that is recomputed finds the samples that it had, and must send them where it sent them: what a pass has decided
is kept with it, and taken again (`in_this_pass`).
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.predicting.next_layer import NextLayerPrediction, known_of_samples
from megatron_moe_opt.planning.predicting.placement_volume import settle
from megatron_moe_opt.planning.predicting.sample_costs import SampleCosts
from megatron_moe_opt.runtime.job.forks import Pending, cached_until_fork
from megatron_moe_opt.runtime.moving_samples.sample_counts import Room, SampleCounts
from megatron_moe_opt.topology.sample_holders import SampleHolders

Result = TypeVar("Result")


@dataclass(frozen=True)
class Decision:
    """What a layer does with the samples."""

    counts: np.ndarray
    """The counts of each part of a sample, int64 [joint size, B, columns]; see SampleCounts."""
    before: np.ndarray
    """The sample at each position on the way in, int64 [positions]."""
    move: np.ndarray
    """The new position of the sample at each position, int64 [positions]."""
    seconds: float
    """Seconds that it took to decide."""

    @property
    def after(self) -> np.ndarray:
        """Returns the sample at each position after the move, int64 [positions]."""
        after = np.empty_like(self.before)
        after[self.move] = self.before
        return after


@dataclass(frozen=True)
class Decided:
    """What a layer has learnt and decided in a forward pass."""

    counts: SampleCounts
    decision: Pending[Decision]


class SamplePass:
    """A forward pass through the layers of a pipeline stage."""

    def __init__(self, unlike: torch.Tensor | bool | None = None) -> None:
        """Begins a pass, in which all samples are at home."""
        self.at: np.ndarray | None = None
        """The sample at each position, int64 [positions]; None: all are at home."""
        self.seen: tuple[LayerPlacement, np.ndarray] | None = None
        """The last layer that was passed, and what was known of the samples there, see known_of_samples."""
        self.unlike = unlike
        """Whether this rank's samples are masked in another way than all others (SampleCounts); None: no."""
        self.decided: dict[LayerPlacement, Decided] = {}


class SampleOrder:
    """The samples of the forward pass that is under way in the layers of a pipeline stage."""

    def __init__(self, stays_home: bool = False) -> None:
        """Begins without a pass under way.

        Args:
            stays_home: samples stay at home in a pass where some are masked unlike others; False: it ends the run.
        """
        self.running = SamplePass()
        self.room = Room()
        self.stays_home = stays_home
        self._is_known = False
        """Whether `running` was set by a caller who keeps the pass to repeat it, so that its decisions are known."""
        _orders.add(self)

    def begin(self, unlike: torch.Tensor | bool | None = None) -> None:
        """Begins a pass, in which all samples are at home.

        Args:
            unlike: a bool, or bool [] on the device: whether this rank's samples are masked in another way than all
                others.
        """
        self.running = SamplePass(unlike)

    @contextmanager
    def repeating(self, samples: SamplePass) -> Iterator[None]:
        """Has the pass `samples` under way inside the block, for layers that repeat what they did in it."""
        before = self.running, self._is_known
        self.running, self._is_known = samples, True
        try:
            yield
        finally:
            self.running, self._is_known = before

    def decided(self, layer: LayerPlacement) -> Decided | None:
        """Returns what a layer decided when the pass that is repeated went through it; None: this is its first time."""
        return self.running.decided.get(layer) if self._is_known else None


_orders: weakref.WeakSet[SampleOrder] = weakref.WeakSet()


def in_this_pass(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps a function so that, whenever it is called, layers find the samples of the passes that are under way now."""
    passes = [(order, order.running) for order in _orders]
    if not passes:
        return function

    @functools.wraps(function)
    def again(*arguments: Any, **named: Any) -> Result:
        with ExitStack() as repeated:
            for order, samples in passes:
                repeated.enter_context(order.repeating(samples))
            return function(*arguments, **named)

    return again


class LayerPlacement:
    """Decides where the samples go behind one MoE layer."""

    def __init__(self, order: SampleOrder, holders: SampleHolders, costs: SampleCosts, last: bool) -> None:
        self.order = order
        self.holders = holders
        self.costs = costs
        self.last = last
        self.prediction: NextLayerPrediction | None = None
        """The prediction of the rows that the next layer's experts on each device will want; set in the first pass."""
        self._learnt: Pending[None] | None = None
        """The last fit of `prediction`, which must not be asked before that is done."""

    def decide(self, counts: SampleCounts, rows_beside: int, learn: bool) -> Decided:
        """Starts to decide, for the pass that is under way.

        Args:
            rows_beside: rows that the move of each part of a sample costs by itself (shared experts' outputs).
            learn: predictions learn from the counts; all ranks alike.
        """
        samples = self.order.running
        decided = Decided(counts, background(self._decide, samples, counts, rows_beside, learn))
        samples.decided[self] = decided
        return decided

    def _decide(self, samples: SamplePass, counts: SampleCounts, rows_beside: int, learn: bool) -> Decision:
        if self._learnt is not None:
            self._learnt.result()  # begun in the pass before; raises what it raised
        parts = counts.rows.flatten(0, 1).numpy()
        start = time.perf_counter()
        if not counts.equal:
            home = np.arange(len(self.holders.ranks) * parts.shape[1])
            return Decision(parts, home, home, time.perf_counter() - start)
        num = self.holders.by_position(self.costs.by_expert(parts))  # [positions, E]
        on_device = self.costs.on_device(parts)
        at = np.arange(len(num)) if samples.at is None else samples.at
        if learn and samples.seen is not None:
            layer, previous = samples.seen
            observing = _learner().submit(layer.prediction.observe, previous[at], on_device.copy())
            layer._learnt = Pending(observing)
        known = known_of_samples(num, None if samples.seen is None else samples.seen[1][at, : num.shape[1]])
        if self.prediction is None:
            self.prediction = NextLayerPrediction(known.shape[1], self.holders.num_devices)
        by_sample = np.empty_like(known)
        by_sample[at] = known
        samples.seen = self, by_sample
        move = at
        if not self.last:
            now = self.costs.on_device(parts, rows_beside) if rows_beside else on_device
            move = self._solve(now + self.prediction.predict(known))
        decision = Decision(parts, at, move, time.perf_counter() - start)
        samples.at = decision.after
        return decision

    def _solve(self, on_device: np.ndarray) -> np.ndarray:
        """Returns the new position of the sample at each position, given what each transfers in combine and the next
        dispatch: on_device, int64 [positions, J].
        """
        holders = self.holders
        position_device = np.repeat(holders.holder_device, len(on_device) // len(holders.ranks))
        capacity = np.bincount(position_device, minlength=holders.num_devices)
        devices = np.arange(holders.num_devices)
        return settle(place_samples(on_device, devices, self.costs.device_node, capacity), position_device)


def background(function: Callable[..., Result], *arguments: Any) -> Pending[Result]:
    """Calls a function in the one thread in which decisions are made, in the order in which they were asked for."""
    return Pending(_worker().submit(function, *arguments))


@cached_until_fork
def _worker() -> ThreadPoolExecutor:
    """Returns the one thread that decides. It waits for counts that the device sends, so it uses the caller's device
    and not the node's first.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    return ThreadPoolExecutor(1, "moe-opt-placement", _use_device, (device,))


def _use_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


@cached_until_fork
def _learner() -> ThreadPoolExecutor:
    """Returns a second thread, for fits: they take longer than decisions, and the next
    layer's need not wait for them.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="moe-opt-prediction")
