"""Runs schedules: a thread (CPU) or a stream (CUDA) a lane, in C++ and without the GIL (csrc/pipeline)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_moe_opt.kernels.extension import load_extension
from megatron_moe_opt.runtime.collectives import CollectiveError, describe_failure, global_rank
from megatron_moe_opt.runtime.steps import Steps
from megatron_moe_opt.schedules.schedule import Lane, Schedule
from megatron_moe_opt.schedules.timeline import Span, Timeline

_C = load_extension()

_LANES = tuple(Lane)
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}

# Expert-parallel traffic first: it is what the layer waits for, and everything else hides behind it.
_PRIORITY = {Lane.INTER: -2, Lane.INTRA: -1}


class LaneError(CollectiveError):
    """An op of a schedule failed: names the lane, the op, its chunk, and the group and rank of a collective."""


class Executor:
    """Runs one schedule at a time. After a failure it can be used again."""

    def __init__(self, device: str) -> None:
        if device == "cuda":
            self._runner = _C.StreamExecutor([_PRIORITY.get(lane, 0) for lane in _LANES])
        else:
            self._runner = _C.Executor(len(_LANES))

    def run(self, schedule: Schedule, steps: Sequence[Steps], record: bool = False) -> Timeline | None:
        """Runs every op; steps[i] is what schedule.ops[i] does.

        On a CPU it returns when all ops have finished; the calling thread works too, in the compute lane or, where
        there is none, in the lane of the last op. On CUDA it returns when all is issued, and what is queued on the
        current stream afterwards waits for it.

        Args:
            record: measure start and end of every op, and return them; on CUDA this waits for the device.

        Raises:
            LaneError: an op failed. No op runs any more, those that other ranks waited for included.
        """
        ops = [
            (_NUMBER[op.lane], op.waits_for, step.actions) for op, step in zip(schedule.ops, steps, strict=True)
        ]  # fmt: skip
        record = record or bool(_recordings)
        if not ops:
            return Timeline(schedule, ()) if record else None
        caller = Lane.COMPUTE if Lane.COMPUTE in schedule.lanes else schedule.ops[-1].lane
        failure, times = self._runner.run(ops, _NUMBER[caller], record)
        if failure is not None:
            cause = next((errors[0] for errors in steps[failure[0]].raised if errors), None)
            raise _lane_error(schedule, steps, *failure) from cause
        if not record:
            return None
        timeline = Timeline(schedule, tuple(Span(op, *time) for op, time in zip(schedule.ops, times, strict=True)))
        for timelines in _recordings:
            timelines.append(timeline)
        return timeline


_recordings: list[list[Timeline]] = []


@contextmanager
def recording() -> Iterator[list[Timeline]]:
    """Yields a list that gets the timeline of every schedule that runs inside the context, in order."""
    timelines: list[Timeline] = []
    _recordings.append(timelines)
    try:
        yield timelines
    finally:
        _recordings.remove(timelines)


@functools.cache
def executor(device: str = "cpu") -> Executor:
    """The executor of this process for tensors on `device` ("cpu" or "cuda")."""
    return Executor(device)


def executor_of(tensor: torch.Tensor) -> Executor:
    """The executor for the device of `tensor`."""
    return executor(tensor.device.type)


def _lane_error(schedule: Schedule, steps: Sequence[Steps], index: int, peer: int, reason: str) -> LaneError:
    op, group = schedule.ops[index], steps[index].group
    what = f"{schedule.name}: lane {op.lane.value}: {op}"
    if group is None:
        return LaneError(f"{what} failed: {reason.splitlines()[0]}")
    if peer >= 0:
        reason = f"with rank {global_rank(group, peer)}: {reason}"
    return LaneError(describe_failure(what, group, reason))
