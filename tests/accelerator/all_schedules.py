"""Every schedule that the builders write, for the sizes at which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from megatron_moe_opt.schedules import hops, monta, mpmoe, parm
from megatron_moe_opt.schedules.hops import HopBytes, HopRows, HopStages
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES
from megatron_moe_opt.schedules.monta import ChunkBytes
from megatron_moe_opt.schedules.partition_rows import Partition, PartitionRows, RowBytes
from megatron_moe_opt.schedules.pipeline import Stages
from megatron_moe_opt.schedules.schedule import Schedule

COUNTS = (1, 2, 4, 8)
GROUPS = ((2, 2), (2, 1), (1, 2))
"""Sizes of the EP and expert-TP group."""
WITH_SHARED = (
    "EP 2, expert-TP 2",
    "hops over 2 level(s), expert-TP 1",
    "hops over 2 level(s), expert-TP 2, gathered over TP",
)
"""The ways beside which shared experts run, too."""
DIRECTIONS = ("dispatch", "combine")
HOP_DIRECTIONS = ("hop out", "hop back")
HOPS = ((1, 1), (2, 1), (1, 2), (2, 2))
"""Levels over which tokens hop, and the size of the expert-TP group."""


@cache
def all_schedules() -> Mapping[str, Schedule]:
    """Returns every schedule under a name of its own, made once."""
    return dict(_all())


def _all() -> Iterator[tuple[str, Schedule]]:
    for count in COUNTS:
        chunks, partitions = [ChunkBytes(1, 2)] * count, [PartitionRows(1, 2)] * count
        ways: dict[str, tuple[Stages, Sequence[Partition]]] = {}
        for sizes in GROUPS:
            of = of_groups(*sizes)
            for level in monta.LEVELS if count > 1 else ("O1",):
                if level != "O1" or count == 1:
                    for direction in DIRECTIONS:
                        schedule = monta.outline(direction, level, count, *sizes).sized(chunks)
                        yield f"monta {level} {direction}, {count} chunk(s), {of}", schedule
            ways[of] = mpmoe.by_rows(*sizes), partitions
        shared = [replace(size, of_tp=(1, 1)) for size in partitions]
        ways[f"{of_groups(2, 2)}, gathered over TP"] = mpmoe.by_rows(2, 2, 2), shared
        ways[f"{of_groups(2, 2)}, in 2 chunks"] = mpmoe.by_rows(2, 2, chunks=2), partitions
        ways["joint, expert-TP 2"] = mpmoe.jointly(2), partitions
        for levels, etp_size in HOPS:
            of = f"hops over {levels} level(s), expert-TP {etp_size}"
            tokens = [HopRows(1, dict.fromkeys(range(levels), 1), 2, 2)] * count
            ways[of] = HopStages(levels, tuple(range(levels)), True, etp_size), tokens
            gathered = [replace(size, tp_size=2) for size in tokens]
            ways[f"{of}, gathered over TP"] = HopStages(levels, tuple(range(levels)), True, etp_size, 2), gathered
            samples = [size.bytes(1) for size in tokens]
            for direction in HOP_DIRECTIONS:
                outline = hops.outline(direction, HopStages(levels, tuple(range(levels)), etp_size=etp_size), count)
                yield f"{direction}, {count} chunk(s), {of}", outline.sized(samples)
        for of, (way, parts) in ways.items():
            for strategy in STRATEGIES if way.chunks == 1 else (NONE,):
                for build in (mpmoe.forward, mpmoe.backward):
                    schedule = build(strategy, parts, RowBytes(2, 1, 3), way)
                    yield f"mpmoe {strategy} {build.__name__}, {count} partition(s), {of}", schedule
            if of in WITH_SHARED:
                for build in (mpmoe.forward, mpmoe.backward):
                    schedule = build(NONE, parts, RowBytes(2, 1, 3), way, shared=1)
                    yield f"mpmoe {build.__name__} with shared experts, {count} partition(s), {of}", schedule
        for etp_size in (1, 2):
            of = f"expert-TP {etp_size}"
            for direction in DIRECTIONS:
                schedule = parm.outline(direction, count, etp_size).sized(chunks)
                yield f"parm {direction}, {count} chunk(s), {of}", schedule
            phases = parm.combine_and_gather(2 * count, chunks, etp_size)
            yield f"parm combine and gather, {count} phase(s), {of}", phases
    for level in (0, 1):
        size, way = HopBytes({level: 1}, 1), HopStages(2, (level,))
        for direction in HOP_DIRECTIONS:
            yield f"{direction} over level {level} of 2 alone", hops.outline(direction, way).sized([size])


def of_groups(ep_size: int, etp_size: int) -> str:
    """Returns groups of these sizes in words."""
    return f"EP {ep_size}, expert-TP {etp_size}"
