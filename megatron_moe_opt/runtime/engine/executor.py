"""Runs schedules: a thread (CPU) or a stream (CUDA) a lane, in C++ and without the GIL (csrc/pipeline)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.engine.collectives import CollectiveError, describe_failure, first_line, global_rank
from megatron_moe_opt.runtime.engine.profiler_ranges import is_profiling, shown_ops
from megatron_moe_opt.runtime.engine.recording import Beside, clock, is_recording, note
from megatron_moe_opt.runtime.engine.started import GivenUp, HostQueue, Running, started_queue
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.observed.layer_pass import Instant
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


_in_use: set[str] = set()
"""The lanes, queues and groups of what has run on streams: each has a stream, a group that of its communicator."""


def streams_in_use() -> int:
    """Returns how many streams the process's schedules have used, their caller's among them; 0: none ran on streams."""
    return len(_in_use)


class Executor:
    """Runs one schedule at a time, and beside it those that were started. After a failure it can be used again; the
    group of a failed collective cannot.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_streams = device, has_streams(device)
        if self._on_streams:
            self._runner = _C.StreamExecutor([_PRIORITY.get(lane, 0) for lane in _LANES])
        else:
            self._runner = _C.Executor(len(_LANES))
            failure_board.interrupted_by(self._runner.give_up)

    def run(
        self,
        schedule: Schedule,
        steps: Sequence[Steps],
        record: bool = False,
        sized: Callable[[], Schedule] | None = None,
    ) -> Timeline | None:
        """Runs every op; steps[i] is what schedule.ops[i] does.

        On a CPU it returns when all ops have finished; the calling thread works too, in the compute lane or, where
        there is none, in the lane of the last op. On CUDA it returns when all is issued, and what is queued on the
        current stream, which is the compute lane, afterwards waits for it. So memory that its ops use, of the caller's
        stream or a lane's, is held until it returns and may be let go then, without a word to the allocator.

        Args:
            record: measure start and end of every op, and return them; on CUDA this waits for the device.
            sized: returns the schedule with the sizes of its ops, where it has none: for those who record.

        Raises:
            LaneError: an op failed. No op runs any more, those that other ranks waited for included.
        """
        if self._on_streams:
            _note_streams(schedule, (Lane.COMPUTE.value, *(lane.value for lane in schedule.lanes)))
        ops = _ops(schedule, steps, _NUMBER)
        recorded = is_recording()
        began = clock().now() if recorded else None
        failure, times = self._runner.run(ops, self._caller_lane(schedule), record or recorded)
        if failure is not None:
            _fail(schedule, steps, *failure)
        if not (record or recorded):
            return None
        shown = schedule if sized is None else sized()
        if recorded:
            note(shown, times, began)
        return Timeline.of_times(shown, times) if record else None

    def start(
        self,
        schedule: Schedule,
        steps: Sequence[Steps],
        queue: str = Lane.EXPERTS.value,
        behind: Running | None = None,
    ) -> Running:
        """Begins to run a schedule of one lane beside everything else, behind those that were started in this queue.

        Args:
            steps: as in `run`. On CUDA they use memory that was made in `memory` of this queue, or that it was said to
                be used there (kernels.streams.used_here).
            behind: what was started in another queue and is waited for first.

        Raises:
            ValueError: ops in several lanes. What it returns raises LaneError where an op fails.
        """
        if len(schedule.lanes) > 1:
            raise ValueError(f"{schedule.name} is in {len(schedule.lanes)} lanes: a schedule that is started is in one")
        started = started_queue(queue, self._device)
        ops = _ops(schedule, steps, dict.fromkeys(Lane, 0))
        if isinstance(started, HostQueue):
            return started.start(_run_on_thread(started, schedule, steps, ops, Beside(), behind))
        _note_streams(schedule, (queue,))
        return started.start(_issue_on_stream(schedule, steps, ops, Beside(), behind), behind)

    @property
    def issue_meanwhile(self) -> Callable[[], None] | None:
        """Returns the function by which a step says, in whichever thread, that half of its kernels are issued, so that
        what is to be issued halfway through its op can be; None on a CPU, where lanes do not wait for that.
        """
        return self._issue_meanwhile if self._on_streams else None

    def _issue_meanwhile(self) -> None:
        with torch.no_grad():
            self._runner.issue_meanwhile()

    def memory(self, queue: str = Lane.EXPERTS.value) -> AbstractContextManager[None]:
        """Returns a context in which tensors are made for what is started in a queue."""
        return started_queue(queue, self._device).memory()

    def _caller_lane(self, schedule: Schedule) -> int:
        if Lane.COMPUTE in schedule.lanes:
            return _NUMBER[Lane.COMPUTE]
        if self._on_streams or not schedule.ops:
            return -1
        return _NUMBER[schedule.ops[-1].lane]


def executor(device: torch.device | str = "cpu") -> Executor:
    """Returns the executor of this process for tensors on `device`; "cuda" is the current device."""
    device = torch.device(device)
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return _executor(device.type, index)


@functools.cache
def _executor(device_type: str, index: int | None) -> Executor:
    with torch.cuda.device(index) if device_type == "cuda" else nullcontext():
        return Executor(torch.device(device_type, index))


def _note_streams(schedule: Schedule, of_work: tuple[str, ...]) -> None:
    _in_use.update(of_work, (f"group {op.group}" for op in schedule.ops if op.group is not None))


_Ops = list[tuple[int, tuple[int, ...], Sequence[Any], int]]
"""The ops as the extension takes them: of each, its lane, the ops that are waited for, its actions, and the number of
ops that are issued halfway through it."""


def _ops(schedule: Schedule, steps: Sequence[Steps], numbers: Mapping[Lane, int]) -> _Ops:
    actions = [step.actions for step in steps]
    if is_profiling():
        actions = shown_ops(schedule, actions)
    return [
        (numbers[op.lane], op.waits_for, of_op, op.meanwhile) for op, of_op in zip(schedule.ops, actions, strict=True)
    ]


def _run_on_thread(
    queue: HostQueue, schedule: Schedule, steps: Sequence[Steps], ops: _Ops, beside: Beside, behind: Running | None
) -> Iterator[None]:
    """Runs what was started, in the queue's thread."""
    if behind is not None:
        behind.wait()
    began = clock().now() if beside else None
    failure, times = queue.runner.run(ops, 0, bool(beside))
    if failure is not None:
        if queue.is_ending:
            raise GivenUp
        _fail(schedule, steps, *failure)
    beside.note(schedule, began, lambda: times)
    yield


def _issue_on_stream(
    schedule: Schedule, steps: Sequence[Steps], ops: _Ops, beside: Beside, behind: Running | None
) -> Iterator[None]:
    """Issues a started schedule on the current stream, in parts that end with a collective under way."""
    if behind is not None:
        behind.wait()
    instants: list[Instant] = []
    left_running: tuple[int, Any] | None = None

    def attempt(index: int, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            _fail(schedule, steps, index, -1, str(error))

    for index, (_, _, actions, _) in enumerate(ops):
        for number, action in enumerate(actions):
            if left_running is not None:
                attempt(left_running[0], left_running[1].join)
            if beside and number == 0:
                instants.append(clock().now())
            attempt(index, action.run)
            left_running = index, action
        if schedule.ops[index].group is not None:
            yield
    if left_running is not None:
        attempt(left_running[0], left_running[1].join)
    if beside:
        beside.note_instants(schedule, [*instants, clock().now()])


def _fail(schedule: Schedule, steps: Sequence[Steps], index: int, peer: int, reason: str) -> NoReturn:
    """Raises what an op has raised, named by its lane, op and group."""
    cause = next((errors[0] for errors in steps[index].raised if errors), None)
    for errors in (errors for step in steps for errors in step.raised):
        errors.clear()  # each holds a traceback, whose frames hold the steps: a cycle through the extension
    if isinstance(cause, ConfigurationError) or (cause is not None and not isinstance(cause, Exception)):
        raise cause  # it says what to change; or KeyboardInterrupt and the like
    raise _lane_error(schedule, steps, index, peer, reason, cause) from cause


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
