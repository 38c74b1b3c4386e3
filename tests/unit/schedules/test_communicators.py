"""No rank waits for another one in two communicators, whatever the queues and whatever the ranks' rows."""

from __future__ import annotations

import random
from functools import partial

import pytest

from megatron_moe_opt.schedules import monta, mpmoe, parm
from megatron_moe_opt.schedules.groups import tokens_group
from megatron_moe_opt.schedules.hops import HopBytes, HopRows, HopStages, outline
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from megatron_moe_opt.schedules.monta import ChunkBytes
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.schedules.schedule import Op, Schedule
from tests.accelerator.collectives import Issued, disagreements
from tests.accelerator.communicators import Mismatch, meet
from tests.accelerator.executor_library import SoftwareExecutor, Work
from tests.accelerator.makespans import LANES, caller_lane
from tests.accelerator.software import CALLER, Device, Queues, Stuck

MEMBERS = {
    "ep": [(0, 2), (1, 3)],
    "expert-tp": [(0, 1), (2, 3)],
    parm.JOINT_GROUP: [(0, 1, 2, 3)],
    parm.TP: [(0, 1), (2, 3)],
    tokens_group(0): [(0, 2), (1, 3)],
    tokens_group(1): [(0, 1), (2, 3)],
}


def issue(executor: SoftwareExecutor, device: Device, schedule: Schedule) -> None:
    def begin(op: Op) -> Work:
        if op.meanwhile:
            executor.issue_meanwhile()
        return Work(group=op.group, label=str(op))

    ops = [(LANES.index(op.lane), op.waits_for, [partial(begin, op)], op.meanwhile) for op in schedule.ops]
    executor.issue(device, ops, caller_lane(schedule))


def layer_passes(rank: int, count: int) -> list[list[Schedule]]:
    """Forward and backward of a layer under each system, with this rank's own numbers of rows."""
    chooser = random.Random(rank)
    chunks = [ChunkBytes(chooser.randrange(9), chooser.randrange(9)) for _ in range(count)]
    partitions = [PartitionRows(chooser.randrange(9), chooser.randrange(9)) for _ in range(count)]
    tokens = [HopRows(9, {0: chooser.randrange(9), 1: chooser.randrange(9)}, 9) for _ in range(count)]
    samples = [HopBytes({0: chooser.randrange(9), 1: chooser.randrange(9)}, 9) for _ in range(count)]
    row, ways, hops = RowBytes(2, 1, 3), ("dispatch", "combine"), ("hop out", "hop back")
    return [
        *([outline(way, HopStages(2, (0, 1), etp_size=n), count).sized(samples) for way in hops] * 2 for n in (1, 2)),
        *([monta.outline(way, level, count, 2, 2).sized(chunks) for way in ways] * 2 for level in ("O2", "O3")),
        [parm.outline(way, count, 2).sized(chunks) for way in ways] * 2,
        [parm.outline("dispatch", count, 2).sized(chunks), parm.combine_and_gather(9, chunks, 2)] * 2,
        *(
            [build(strategy, parts, row, way) for build in (mpmoe.forward, mpmoe.backward)]
            for parts, way in (
                *((partitions, mpmoe.by_rows(2, 2, tp, chunks)) for tp, chunks in ((1, 1), (2, 1), (1, 3))),
                *((tokens, HopStages(2, (0, 1), True, etp, tp)) for etp, tp in ((1, 1), (2, 1), (1, 2), (2, 2))),
            )
            for strategy in STRATEGIES
        ),
    ]


@pytest.mark.parametrize("queues", Queues)
@pytest.mark.parametrize("count", [1, 4])
def test_ranks_with_other_rows_meet(software_executor, count, queues):
    for system in range(len(layer_passes(0, 1))):
        devices = {rank: Device(queues) for rank in range(4)}
        for rank, device in devices.items():
            for schedule in layer_passes(rank, count)[system]:
                issue(software_executor, device, schedule)
        meet(devices, MEMBERS)


def call(device: Device, group: str, label: str) -> None:
    """A collective that the caller's stream waits for."""
    issued = device.launch(("group", group), [device.last.get(CALLER)], label=label)
    device.launch(CALLER, [issued])


def test_ranks_that_wait_for_each_other_are_named():
    """Whoever issues in another order: as if the order were that of a rank's own bytes."""
    for queues, orders, hangs in (
        (Queues.ONE, (("ep", "expert-tp"), ("ep", "expert-tp")), False),
        (Queues.ONE, (("ep", "expert-tp"), ("expert-tp", "ep")), True),
    ):
        devices = {rank: Device(queues) for rank in range(2)}
        for device, order in zip(devices.values(), orders, strict=True):
            for group in order:
                call(device, group, f"all_gather of {group}")
        members = {"ep": [(0, 1)], "expert-tp": [(0, 1)]}
        if not hangs:
            meet(devices, members)
            continue
        with pytest.raises(Stuck, match="rank 0: all_gather of ep .*; rank 1: all_gather of expert-tp"):
            meet(devices, members)


def test_ranks_that_call_different_collectives_are_named():
    devices = {rank: Device(Queues.MANY) for rank in range(2)}
    for rank, device in devices.items():
        call(device, "ep", ("all_gather", "all_to_all")[rank])
    with pytest.raises(Mismatch, match=r"ep of ranks \(0, 1\): rank 1 calls all_to_all, rank 0 all_gather"):
        meet(devices, {"ep": [(0, 1)]})


def message(of: int, to: int, alone: bool = True) -> Issued:
    call = f"message of rank {of} to rank {to}"
    return Issued(((f"pipeline, {'ranks 0 and 1' if alone else call}", call),), beside=alone)


def test_messages_between_stages_meet():
    """Alone they run beside all else, in the order of their pair; a batch stands in the order of its rank."""
    reduced = Issued((("dp", "all_reduce"),))
    out, back = message(0, 1), message(1, 0)
    both = Issued((*message(0, 1, alone=False).calls, *message(1, 0, alone=False).calls))
    members = {name: [0, 1] for one in (out, both, reduced) for name, _ in one.calls}
    for of_ranks, problem in (
        (([out, reduced], [reduced, out]), ""),
        (([out, back], [back, out]), "rank 1 calls message of rank 1 to rank 0, rank 0 message of rank 0 to rank 1"),
        (([both, reduced], [Issued(both.calls[::-1]), reduced]), ""),
        (([both, reduced], [reduced, both]), "rank 1: all_reduce"),
    ):
        found = "".join(disagreements(of_ranks, members))
        assert problem in found and bool(problem) == bool(found)
