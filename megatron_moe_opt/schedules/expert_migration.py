"""The hops of tokens between expert domains (HybridEP, section IV-A): the stages of hops.py, one schedule a direction.

Experts travel beside these, in a lane of their own, and so do their gradients and the mean of all experts; [ ] where
they travel compressed:

    gathered    [ encode -> ] all-gather for each level, outermost first
    decoded     decode, when a layer's turn comes
    restored    a copy from the host to the device, of decoded experts that were kept there
    returned    [ sum with those that waited -> ] ([ encode -> ] reduce-scatter -> [ decode and ] sum) for each level,
                innermost first
    renewed     reduce-scatter -> sum -> all-gather
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_moe_opt.schedules.hops import HopBytes, HopStages
from megatron_moe_opt.schedules.pipeline import Stage, one_by_one
from megatron_moe_opt.schedules.schedule import Kind, Lane, Schedule


def hop_out(size: HopBytes, way: HopStages) -> Schedule:
    """Rows to the domains of each level, and a row for each expert held there: rows -> sorted."""
    return one_by_one(_name("hop out", size.sent), "rows", way.out(size))


def hop_back(size: HopBytes, way: HopStages) -> Schedule:
    """Sums of the rows of experts back from the domains of each level, and their sums: sorted -> rows."""
    return one_by_one(_name("hop back", reversed(size.sent)), "sorted", way.back(size))


def gathered(sizes: Mapping[int, int], is_coded: bool = False) -> Schedule:
    """Experts to all ranks of a domain. Buffers: experts [-> message] -> held.LEVEL -> held.NEXT ...

    Args:
        sizes: bytes that a rank holds after each level's gather, its own included, in their order.
        is_coded: whether they travel compressed.
    """
    stages = [
        Stage(Kind.ALL_GATHER, Lane.EXPERTS, size, f"held.{level}", f"experts.{level}") for level, size in sizes.items()
    ]
    if is_coded and stages:
        stages.insert(0, Stage(Kind.ENCODE, Lane.EXPERTS, stages[0].size, "message"))
    return one_by_one("expert-migration, experts gathered", "experts", stages)


def decoded(size: int) -> Schedule:
    """Messages of all ranks of a domain to experts. Buffers: messages -> decoded

    Args:
        size: bytes of the experts.
    """
    stages = [Stage(Kind.DECODE, Lane.EXPERTS, size, "decoded")]
    return one_by_one("expert-migration, experts decoded", "messages", stages)


def restored(size: int) -> Schedule:
    """Decoded experts that were kept on the host to the device. Buffers: host_decoded -> decoded

    Args:
        size: bytes of the experts.
    """
    stages = [Stage(Kind.PREFETCH, Lane.H2D, size, "decoded")]
    return one_by_one("expert-migration, experts restored", "host_decoded", stages)


def deferred(size: int) -> Schedule:
    """Gradients to those that wait for the last pass of a step. Buffers: gradients -> deferred

    Args:
        size: bytes of the gradients.
    """
    stages = [Stage(Kind.SUM, Lane.EXPERTS, size, "deferred", also_reads=("deferred",))]
    return one_by_one("expert-migration, gradients deferred", "gradients", stages)


def returned(sizes: Mapping[int, int], is_coded: bool = False, deferred: int = 0) -> Schedule:
    """Gradients to the owners of experts. Buffers: gradients [-> whole] [-> messages.LEVEL] -> parts.LEVEL ->
    sums.LEVEL ...

    Args:
        sizes: bytes of what a rank has for the ranks of each level, itself included, in the levels' order.
        is_coded: whether they travel compressed.
        deferred: bytes of gradients that have waited for these; 0: none has.
    """
    stages, summed = [], "gradients"
    if deferred:
        stages.append(Stage(Kind.SUM, Lane.EXPERTS, deferred, "whole"))
        summed = "whole"
    for level, size in sizes.items():
        if is_coded:
            stages.append(Stage(Kind.ENCODE_GRADIENT, Lane.EXPERTS, size, f"messages.{level}"))
        stages.append(Stage(Kind.REDUCE_SCATTER, Lane.EXPERTS, size, f"parts.{level}", f"experts.{level}"))
        summing = Kind.DECODE_GRADIENT if is_coded else Kind.SUM
        stages.append(Stage(summing, Lane.EXPERTS, size, f"sums.{level}", also_reads=(summed,)))
        summed = f"sums.{level}"
    return one_by_one("expert-migration, gradients returned", "gradients", stages)


def renewed(size: int) -> Schedule:
    """The mean of all experts to all ranks. Buffers: shares -> parts -> mean -> shares

    Args:
        size: its bytes.
    """
    stages = [
        Stage(Kind.REDUCE_SCATTER, Lane.EXPERTS, size, "parts", "experts"),
        Stage(Kind.SUM, Lane.EXPERTS, size, "mean", also_reads=("shares",)),
        Stage(Kind.ALL_GATHER, Lane.EXPERTS, size, "shares", "experts"),
    ]
    return one_by_one("expert-migration, shared expert renewed", "shares", stages)


def _name(what: str, levels: Iterable[int]) -> str:
    return f"expert-migration {what}, level {', '.join(map(str, levels))}"
