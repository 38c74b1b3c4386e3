"""Experts that travel inside expert domains, and their gradients (HybridEP, section IV-B), beside tokens that hop
between these (hops.py), in a lane of their own; and the mean of all experts. [ ] where they travel compressed:

    gathered    [ encode -> ] all-gather for each level, outermost first
    decoded     decode, when a layer's turn comes
    restored    a copy from the host to the device, of decoded experts that were kept there
    returned    [ sum with those that waited -> ] ([ encode -> ] reduce-scatter -> [ decode and ] sum) for each level,
                innermost first
    renewed     reduce-scatter -> sum -> all-gather
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from operator import itemgetter

from megatron_moe_opt.schedules.groups import experts_group
from megatron_moe_opt.schedules.pipeline import Stage, one_by_one
from megatron_moe_opt.schedules.schedule import Kind, Lane, Outline, Schedule


def gathered(sizes: Mapping[int, int], is_coded: bool = False) -> Schedule:
    """Returns the schedule that gathers experts at all ranks of a domain. Buffers: experts [-> message] -> held.LEVEL
    -> held.NEXT ...

    Args:
        sizes: bytes that a rank holds after each level's gather, its own included, in their order.
        is_coded: whether they travel compressed.
    """
    return _gathered(tuple(sizes), is_coded).sized([sizes])


@cache
def _gathered(levels: tuple[int, ...], is_coded: bool) -> Outline:
    stages = [
        Stage(Kind.ALL_GATHER, Lane.EXPERTS, itemgetter(level), f"held.{level}", experts_group(level))
        for level in levels
    ]
    if is_coded and stages:
        stages.insert(0, Stage(Kind.ENCODE, Lane.EXPERTS, stages[0].size, "message"))
    return one_by_one("expert-migration, experts gathered", "experts", stages)


def _all(size: int) -> int:
    return size


DECODED = one_by_one(
    "expert-migration, experts decoded", "messages", [Stage(Kind.DECODE, Lane.EXPERTS, _all, "decoded")]
)
"""Decodes messages of all ranks of a domain to experts. Sized by the bytes of these. Buffers: messages -> decoded"""
RESTORED = one_by_one(
    "expert-migration, experts restored", "host_decoded", [Stage(Kind.PREFETCH, Lane.H2D, _all, "decoded")]
)
"""Copies decoded experts, which were kept on the host, to the device. Sized by their bytes. Buffers: host_decoded ->
decoded
"""
DEFERRED = one_by_one(
    "expert-migration, gradients deferred",
    "gradients",
    [Stage(Kind.SUM, Lane.EXPERTS, _all, "deferred", also_reads=("deferred",))],
)
"""Adds gradients to those that wait for a step's last pass. Sized by their bytes. Buffers: gradients -> deferred"""
RENEWED = one_by_one(
    "expert-migration, shared expert renewed",
    "shares",
    [
        Stage(Kind.REDUCE_SCATTER, Lane.EXPERTS, _all, "parts", "experts"),
        Stage(Kind.SUM, Lane.EXPERTS, _all, "mean", also_reads=("shares",)),
        Stage(Kind.ALL_GATHER, Lane.EXPERTS, _all, "shares", "experts"),
    ],
)
"""Gives all ranks the mean of all experts. Sized by its bytes. Buffers: shares -> parts -> mean -> shares"""


def returned(sizes: Mapping[int, int], is_coded: bool = False, deferred: int = 0) -> Schedule:
    """Returns the schedule that brings gradients back to the owners of experts. Buffers: gradients [-> whole] [->
    messages.LEVEL] -> parts.LEVEL -> sums.LEVEL ...

    Args:
        sizes: bytes of what a rank has for the ranks of each level, itself included, in the levels' order.
        is_coded: whether they travel compressed.
        deferred: bytes of gradients that have waited for these; 0: none has.
    """
    return _returned(tuple(sizes), is_coded, deferred > 0).sized([{**sizes, "whole": deferred}])


@cache
def _returned(levels: tuple[int, ...], is_coded: bool, adds_deferred: bool) -> Outline:
    stages, summed = [], "gradients"
    if adds_deferred:
        stages.append(Stage(Kind.SUM, Lane.EXPERTS, itemgetter("whole"), "whole"))
        summed = "whole"
    for level in levels:
        size = itemgetter(level)
        if is_coded:
            stages.append(Stage(Kind.ENCODE_GRADIENT, Lane.EXPERTS, size, f"messages.{level}"))
        stages.append(Stage(Kind.REDUCE_SCATTER, Lane.EXPERTS, size, f"parts.{level}", experts_group(level)))
        summing = Kind.DECODE_GRADIENT if is_coded else Kind.SUM
        stages.append(Stage(summing, Lane.EXPERTS, size, f"sums.{level}", also_reads=(summed,)))
        summed = f"sums.{level}"
    return one_by_one("expert-migration, gradients returned", "gradients", stages)
