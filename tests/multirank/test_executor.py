"""The executor on real process groups: random schedules, delays, failures, reuse."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from itertools import takewhile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import LaneError, executor
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Op, Schedule
from tests.ranks.devices import rank_device
from tests.ranks.pool import RankFailure
from tests.schedule_checks import validate, validate_ranks

ROWS, WIDTH = 12, 3
BUFFERS = 6
COLLECTIVE_LANES = {"world": Lane.INTER, "pairs": Lane.INTRA}
COPY_LANES = (Lane.COPY, Lane.COMPUTE, Lane.D2H, Lane.H2D)


def random_schedule(seed: int) -> Schedule:
    """Copies and collectives between a few buffers. An op waits for all that touched its buffers, unless its lane has
    seen to that, and for nothing else. Some leave room halfway for what can begin without them."""
    chooser = random.Random(seed)
    ops: list[Op] = []
    touched: dict[str, list[int]] = {}
    for chunk in range(chooser.randint(1, 14)):
        source, target = chooser.sample([f"buffer {i}" for i in range(BUFFERS)], 2)
        if chooser.random() < 0.5:
            group = chooser.choice(list(COLLECTIVE_LANES))
            kind, lane = chooser.choice(sorted(COLLECTIVES, key=str)), COLLECTIVE_LANES[group]
        else:
            group, kind, lane = None, Kind.COPY, chooser.choice(COPY_LANES)
        earlier = {other for name in (source, target) for other in touched.get(name, ())}
        waits_for = tuple(other for other in sorted(earlier) if ops[other].lane is not lane)
        for name in (source, target):
            touched.setdefault(name, []).append(len(ops))
        ops.append(Op(kind, lane, chunk, 0, waits_for, (source,), (target,), group))
    end = 0  # of what is issued halfway through an op
    for index, op in enumerate(ops):
        free = takewhile(lambda other: other.lane is not op.lane and index not in other.waits_for, ops[index + 1 :])  # noqa: B023
        meanwhile = chooser.randint(0, len(list(free))) if index >= end else 0
        if meanwhile:
            ops[index], end = replace(op, meanwhile=meanwhile), index + meanwhile + 1
    return Schedule(f"random {seed}", tuple(ops), tuple(f"buffer {i}" for i in range(BUFFERS)))


def bind(schedule: Schedule, buffers: dict[str, torch.Tensor], groups: dict[str, Any]) -> list[Steps]:
    """Binds a schedule to collectives of uneven counts that depend on the chunk; what they do
    not write stays as it was.
    """
    from megatron_moe_opt.kernels import ChunkList

    bound = []
    for op in schedule.ops:
        source, target = buffers[op.reads[0]], buffers[op.writes[0]]
        if op.group is None:
            order = torch.randperm(4, generator=torch.Generator().manual_seed(op.chunk))
            bound.append(steps.copy_rows(source, target, ChunkList.from_counts([5, 0, 4, 3], order, source.device)))
            continue
        group = groups[op.group]
        size, rank = group.size(), group.rank()
        if op.kind is Kind.ALL_TO_ALL:  # rank r sends (r + p + chunk) % 4 rows to p, at most 12 / 4 for each
            sent = [min((rank + peer + op.chunk) % 4, ROWS // size) for peer in range(size)]
            step = steps.all_to_all(source[: sum(sent)], sent, target[: sum(sent)], sent, group)
        elif op.kind is Kind.SEND_RECEIVE:  # to the next rank, from the one before
            to = [(0, 5) if peer == (rank + 1) % size else (0, 0) for peer in range(size)]
            from_ = [(2, 5) if peer == (rank - 1) % size else (0, 0) for peer in range(size)]
            step = steps.exchange(source, to, target, from_, group, "send")
        else:
            counts = [(op.chunk + 2 * peer) % 4 for peer in range(size)]
            if op.kind is Kind.ALL_GATHER:
                step = steps.all_gather(source[: counts[rank]], target[: sum(counts)], counts, group)
            else:
                parts = torch.empty((size - 1) * counts[rank], WIDTH)
                rows = source[: sum(counts)]
                step = steps.scatter(rows, parts, counts, group)
                step += steps.sum_scattered(rows, parts, target[: counts[rank]], counts, group)
        bound.append(step)
    return bound


def run_here(schedule: Schedule, bound: list[Steps]) -> None:
    executor(rank_device()).run(schedule, bound)


def one_after_another(schedule: Schedule, bound: list[Steps]) -> None:
    """Runs the ops in the schedule's order, each in a run of its own."""
    for op, step in zip(schedule.ops, bound, strict=True):
        alone = Op(op.kind, op.lane, op.chunk, op.size, (), op.reads, op.writes, op.group)
        run_here(Schedule("one op", (alone,), op.reads), [step])


def with_delays(bound: list[Steps], seed: int) -> list[Steps]:
    """A random pause, different on every rank, before and after what an op does."""
    chooser = random.Random(seed * 8 + dist.get_rank())

    def pause() -> Steps:
        return steps.call(lambda: time.sleep(chooser.choice((0, 0, 0.0005, 0.003))))

    return [pause() + step + pause() for step in bound]


def run_random_schedules(seeds: list[int], delays: bool) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {"world": dist.group.WORLD, "pairs": pairs[dist.get_rank() // 2]}
    for seed in seeds:
        schedule = random_schedule(seed)
        validate(schedule)
        validate_ranks(dict.fromkeys(range(4), schedule), {"world": [range(4)], "pairs": [(0, 1), (2, 3)]})
        results = []
        for run in (one_after_another, run_here):
            generator = torch.Generator().manual_seed(seed * 4 + dist.get_rank())
            buffers = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in schedule.inputs}
            bound = bind(schedule, buffers, groups)
            if delays and run is not one_after_another:
                bound = with_delays(bound, seed)
            run(schedule, bound)
            results.append(buffers)
        for name in schedule.inputs:
            assert torch.equal(results[0][name], results[1][name]), (seed, name)


def test_random_schedules_give_the_result_of_their_sequential_order(ranks):
    ranks.run(run_random_schedules, seeds=list(range(120)), delays=False)


def test_delays_in_any_lane_change_nothing(ranks):
    ranks.run(run_random_schedules, seeds=list(range(500, 530)), delays=True)


def record_lanes() -> None:
    """Ops of one lane do not overlap, those of different lanes do, and nobody starts before what it waits for.

    The first of a lane meets the one beside it, and its second one the op that waited: each would wait for ever for an
    op that does not run at the same time.
    """
    pause = 0.05
    meetings = [threading.Barrier(2, timeout=300) for _ in range(2)]

    def meet(number: int) -> Steps:
        return steps.call(lambda: (meetings[number].wait(), time.sleep(pause), meetings[number].wait()))

    ops = (
        Op(Kind.COPY, Lane.INTER, 0),
        Op(Kind.COPY, Lane.INTER, 1),
        Op(Kind.COPY, Lane.COPY, 0),
        Op(Kind.COMPUTE, Lane.COMPUTE, 0, waits_for=(0,)),
    )
    timeline = executor().run(Schedule("lanes", ops), [meet(0), meet(1), meet(0), meet(1)], record=True)
    first, second, beside, after = timeline.spans
    assert first.end <= second.start and first.end <= after.start
    assert beside.start < first.end and first.start < beside.end
    assert after.start < second.end
    assert all(span.end - span.start >= pause for span in timeline.spans)


ON_THREADS = pytest.mark.host_only(reason="is about the threads of the executor, which has streams on a GPU")


@ON_THREADS
def test_lanes_run_side_by_side_and_are_recorded(ranks):
    ranks.run(record_lanes)


def fail_in(lane: Lane) -> str:
    """Every rank fails in one lane while another lane waits for a message that never comes. Then all is well again, but
    for the group of that message.
    """
    world = dist.group.WORLD
    group, dropping = (dist.new_group(timeout=timedelta(hours=1)) for _ in range(2))  # longer than a case may take
    rows = torch.full((2, 3), float(dist.get_rank()))
    waiting = Op(Kind.SEND_RECEIVE, Lane.INTER if lane is not Lane.INTER else Lane.INTRA, 1, group="ep")
    never_sent = [(0, 2) if peer == (dist.get_rank() + 1) % 4 else (0, 0) for peer in range(4)]
    receive = steps.exchange(rows, [(0, 0)] * 4, torch.empty(2, 3), never_sent, group, "send")
    failing = steps.call(lambda: time.sleep(0.1)) + steps.call(lambda: [][7])
    later_ran = []
    later = steps.call(lambda: later_ran.append(1))
    schedule = Schedule("test", (waiting, Op(Kind.COPY, lane, 5), Op(Kind.COPY, lane, 6)))
    try:
        executor().run(schedule, [receive, failing, later])
        message = "no error"
    except LaneError as error:
        message = str(error)
        assert isinstance(error.__cause__, IndexError)
    assert not later_ran
    gathered = torch.empty(8, 3)
    again = Schedule("again", (Op(Kind.ALL_GATHER, Lane.INTER, group="world"),))
    with pytest.raises(LaneError, match="messages of an exchange that failed may still be under way in it"):
        executor().run(again, [steps.all_gather(rows, gathered, [2] * 4, group)])
    executor().run(again, [steps.all_gather(rows, gathered, [2] * 4, world)])
    assert gathered[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    dropped = load_extension().exchange(dropping, rows, [(0, 1)] * 4, gathered, [(0, 1)] * 4)
    dropped.begin()  # and not waited for, as where something raises in between
    del dropped
    with pytest.raises(LaneError, match="messages of an exchange that failed may still be under way in it"):
        executor().run(again, [steps.all_gather(rows, gathered, [2] * 4, dropping)])
    dist.barrier()
    dist.destroy_process_group(dropping)  # in its thread Gloo asks all the time for what nobody receives
    return message


@ON_THREADS
@pytest.mark.parametrize("lane", [Lane.COPY, Lane.COMPUTE, Lane.INTER, Lane.INTRA])
def test_a_failing_lane_stops_the_others_and_the_executor_lives_on(ranks, lane):
    for message in ranks.run(fail_in, lane=lane):
        assert message == f"test: lane {lane.value}: copy of chunk 5 failed: IndexError: list index out of range"


def stall(rank_that_stalls: int) -> None:
    dist.barrier()  # the group's time is for the stall, not for a rank that is late
    group = dist.new_group(timeout=timedelta(seconds=3), group_desc="EXPERT_GROUP")
    dist.barrier()
    if dist.get_rank() == rank_that_stalls:
        return
    rows, gathered = torch.zeros(1, 3), torch.zeros(4, 3)
    op = Op(Kind.ALL_GATHER, Lane.INTRA, 2, group="expert-tp")
    copy = Op(Kind.COPY, Lane.COPY, 2, waits_for=(0,))
    executor().run(Schedule("test", (op, copy)), [steps.all_gather(rows, gathered, [1] * 4, group), Steps()])


@ON_THREADS
def test_a_stalled_rank_is_named_within_the_timeout(doomed_ranks):
    with pytest.raises(RankFailure) as caught:
        doomed_ranks.run(stall, rank_that_stalls=1)
    assert [(rank, kind) for rank, kind, _ in caught.value.errors] == [(rank, "LaneError") for rank in (0, 2, 3)]
    for rank, _, message in caught.value.errors:
        assert message.startswith(
            "test: lane intra: all_gather of chunk 2 on group EXPERT_GROUP (ranks 0, 1, 2, 3) failed on rank "
            f"{rank}: with rank 1: "
        )
        assert "Timed out waiting 3000ms" in message


def leave(rank_that_dies: int) -> None:
    import os

    group = dist.new_group(timeout=timedelta(hours=1))  # longer than the others may take
    dist.barrier()  # all are connected
    store = dist.distributed_c10d._get_default_store()
    store.set(f"behind the barrier: {dist.get_rank()}", "")
    if dist.get_rank() == rank_that_dies:  # not before, for others would find it gone in the barrier
        store.wait([f"behind the barrier: {rank}" for rank in range(dist.get_world_size())])
        os._exit(3)
    rows, gathered = torch.zeros(1, 3), torch.zeros(4, 3)
    op = Op(Kind.ALL_TO_ALL, Lane.INTER, 0, group="ep")
    program = [steps.all_gather(rows, gathered, [1] * 4, group)]
    try:
        executor().run(Schedule("test", (op,)), program)
    finally:  # the program's messages to the living are under way until those have failed, too
        store.set(f"failed: {dist.get_rank()}", "")
        store.wait([f"failed: {rank}" for rank in range(dist.get_world_size()) if rank != rank_that_dies])


@ON_THREADS
def test_a_dead_rank_ends_the_others_at_once(doomed_ranks):
    with pytest.raises(RankFailure) as caught:
        doomed_ranks.run(leave, rank_that_dies=2)
    named = [message for rank, kind, message in caught.value.errors if rank != 2 and kind == "LaneError"]
    assert len(named) == 3, caught.value.errors
    for message in named:
        assert "lane inter: all_to_all of chunk 0 on group" in message
        assert ": with rank 2: " in message  # and not a living one that has failed first


def bad_programs() -> None:
    rows = torch.zeros(4, 3)
    world = dist.group.WORLD
    for make, sentence in (
        (lambda: steps.exchange(rows, [(0, 1)] * 3, rows, [(0, 1)] * 3, world, "send"), "each of the 4 ranks"),
        (
            lambda: steps.exchange(rows, [(3, 2)] * 4, rows, [(0, 2)] * 4, world, "send"),
            r"\[3, 5\) are outside \[0, 4\)",
        ),
        (lambda: executor().run(Schedule("s", (Op(Kind.COPY, Lane.COPY, waits_for=(0,)),)), [Steps()]), "op 0 waits"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()


def test_wrong_programs_are_refused_before_they_run(ranks):
    ranks.run(bad_programs)


def ranges() -> list[tuple[str, float, float]]:
    """Returns what torch.profiler shows of a pass of a layer, forward and backward: names, and
    when they begin and end.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.options import Options
    from tests.ranks.megatron import moe_config, parallel

    megatron_moe_opt.register(Options(monta_level="O3", chunks=2))
    with parallel(tp=2, ep=2, etp=2):
        layer = build_layer(moe_config(moe_token_dispatcher_type="monta"))
        layer.layer_number = 3
        hidden = torch.randn(8, 2, layer.config.hidden_size, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            layer(hidden)[0].sum().backward()
    megatron_moe_opt.register()
    return [(event.name, event.time_range.start, event.time_range.end) for event in profiled.events()]


def test_a_profiler_sees_layers_ops_and_chunks(ranks):
    ops = {
        f"monta O3 {way}, 2 chunk(s): all_to_all of chunk {chunk}"
        for way in ("dispatch", "combine")
        for chunk in range(2)
    }
    for events in ranks.run(ranges):
        for direction in ("forward", "backward"):
            ((begin, end),) = [times for name, *times in events if name == f"MoE layer 3 (monta, {direction})"]
            assert ops <= {name for name, first, last in events if begin <= first and last <= end}, direction
