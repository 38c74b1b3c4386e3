"""Runs schedules: a thread (CPU) or a stream (CUDA) a lane, in C++ and without the GIL (csrc/pipeline)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megatron_moe_opt.kernels.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.engine.collectives import CollectiveError, describe_failure, first_line, global_rank
from megatron_moe_opt.runtime.engine.profiler_ranges import is_profiling, shown_ops
from megatron_moe_opt.runtime.engine.recording import clock, is_recording, note
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.observed.layer_place import place
from megatron_moe_opt.schedules.schedule import Lane, Schedule
from megatron_moe_opt.schedules.timeline import Timeline

_C = load_extension()

_LANES = tuple(lane for lane in Lane if lane is not Lane.EXPERTS)  # which is nobody's schedule
_NUMBER = {lane: number for number, lane in enumerate(_LANES)}

# Expert-parallel traffic first: it is what the layer waits for, and everything else hides behind it. NCCL's kernels run
# on streams of its own, whose priority is their group's (integration/priorities.py); these are for copies and sums.
_PRIORITY = {Lane.INTER: -2, Lane.INTRA: -1}


class LaneError(CollectiveError):
    """An op of a schedule failed: names the lane, the op, its chunk, and the group and rank of a collective."""


class Executor:
    """Runs one schedule at a time. After a failure it can be used again; the group of a failed collective cannot."""

    def __init__(self, device: str) -> None:
        self._on_streams = has_streams(torch.device(device))
        if self._on_streams:
            self._runner = _C.StreamExecutor([_PRIORITY.get(lane, 0) for lane in _LANES])
        else:
            self._runner = _C.Executor(len(_LANES))
            failure_board.interrupted_by(self._runner.give_up)

    def run(self, schedule: Schedule, steps: Sequence[Steps], record: bool = False) -> Timeline | None:
        """Runs every op; steps[i] is what schedule.ops[i] does.

        On a CPU it returns when all ops have finished; the calling thread works too, in the compute lane or, where
        there is none, in the lane of the last op. On CUDA it returns when all is issued, and what is queued on the
        current stream, which is the compute lane, afterwards waits for it.

        Args:
            record: measure start and end of every op, and return them; on CUDA this waits for the device.

        Raises:
            LaneError: an op failed. No op runs any more, those that other ranks waited for included.
        """
        actions = [step.actions for step in steps]
        if is_profiling():
            actions = shown_ops(schedule, actions)
        ops = [
            (_NUMBER[op.lane], op.waits_for, of_op) for op, of_op in zip(schedule.ops, actions, strict=True)
        ]  # fmt: skip
        recorded = is_recording()
        began = clock().now() if recorded else None
        failure, times = self._runner.run(ops, self._caller_lane(schedule), record or recorded)
        if failure is not None:
            cause = next((errors[0] for errors in steps[failure[0]].raised if errors), None)
            if cause is not None and not isinstance(cause, Exception):
                raise cause  # KeyboardInterrupt and the like
            raise _lane_error(schedule, steps, *failure, cause) from cause
        if recorded:
            note(schedule, times, began)
        return Timeline.of_times(schedule, times) if record else None

    def _caller_lane(self, schedule: Schedule) -> int:
        if Lane.COMPUTE in schedule.lanes:
            return _NUMBER[Lane.COMPUTE]
        if self._on_streams or not schedule.ops:
            return -1
        return _NUMBER[schedule.ops[-1].lane]


def executor(device: torch.device | str = "cpu") -> Executor:
    """The executor of this process for tensors on `device`; "cuda" is the current device."""
    device = torch.device(device)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _executor(device.type, index)


@functools.cache
def _executor(device_type: str, index: int | None) -> Executor:
    with torch.cuda.device(index) if device_type == "cuda" else nullcontext():
        return Executor(device_type)


def _lane_error(
    schedule: Schedule, steps: Sequence[Steps], index: int, peer: int, reason: str, cause: Exception | None
) -> LaneError:
    op, group, lost = schedule.ops[index], steps[index].group, None
    what = f"lane {op.lane.value}: {op}"
    if group is None:
        what = f"{what} failed: {first_line(reason)}"
    else:
        if peer >= 0:
            lost = global_rank(group, peer)
            reason = f"with rank {lost}: {first_line(reason)}"
        what = describe_failure(what, group, reason)
    if place() is None:
        what = f"{schedule.name}: {what}"
    is_own = group is None and not (cause and failure_board.is_of_communication(cause))
    return LaneError(failure_board.explain(what, is_own, lost if isinstance(lost, int) else None))
