"""The hops of tokens between expert domains (HybridEP, section IV-A): one schedule a direction.

    hop_out     [ permute -> all-to-all ] for each level    a copy of a token for every domain with one of its experts
    hop_back    [ all-to-all -> permute ] for each level    the copies' partial outputs; their sum ends a hop

The outermost level, whose links are the slowest, is first on the way out and last on the way back. Experts travel
beside these, in a lane of their own, and so do their gradients and the mean of all experts; [ ] where they travel
compressed:

    gathered    [ encode -> ] all-gather for each level, outermost first
    decoded     decode, when a layer's turn comes
    restored    a copy from the host to the device, of decoded experts that were kept there
    returned    ([ encode -> ] reduce-scatter -> sum) for each level, innermost first
    renewed     reduce-scatter -> sum -> all-gather
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_moe_opt.schedules.pipeline import Stage, one_by_one
from megatron_moe_opt.schedules.schedule import Kind, Lane, Schedule


def role(level: int) -> str:
    """What the process group of a level is called."""
    return f"tokens.{level}"


def hop_out(sent: Mapping[int, int], levels: int) -> Schedule:
    """Rows to the domains of each level. Buffers: rows -> copies_LEVEL -> arrived_LEVEL -> copies_NEXT ...

    Args:
        sent: for each level at which tokens hop, outermost first, bytes of the copies that this rank makes, its own
            domain's included.
        levels: number of levels.
    """
    stages = []
    for level, size in sent.items():
        stages.append(Stage(Kind.PERMUTE, Lane.COMPUTE, size, f"copies_{level}"))
        stages.append(Stage(Kind.ALL_TO_ALL, _lane(level, levels), size, f"arrived_{level}", role(level)))
    return one_by_one(_name("hop out", sent), "rows", stages)


def hop_back(received: Mapping[int, int], levels: int) -> Schedule:
    """Rows back from the domains of each level, and their sum. Buffers: arrived -> copies_LEVEL -> rows_LEVEL -> ...

    Args:
        received: for each level, innermost first, bytes of the copies of this rank's rows.
        levels: number of levels.
    """
    stages = []
    for level, size in received.items():
        stages.append(Stage(Kind.ALL_TO_ALL, _lane(level, levels), size, f"copies_{level}", role(level)))
        stages.append(Stage(Kind.PERMUTE, Lane.COMPUTE, size, f"rows_{level}"))
    return one_by_one(_name("hop back", received), "arrived", stages)


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


def returned(sizes: Mapping[int, int], is_coded: bool = False) -> Schedule:
    """Gradients to the owners of experts. Buffers: gradients [-> messages.LEVEL] -> parts.LEVEL -> sums.LEVEL ...

    Args:
        sizes: bytes of what a rank has for the ranks of each level, itself included, in the levels' order.
        is_coded: whether they travel compressed.
    """
    stages, summed = [], "gradients"
    for level, size in sizes.items():
        if is_coded:
            stages.append(Stage(Kind.ENCODE, Lane.EXPERTS, size, f"messages.{level}"))
        stages.append(Stage(Kind.REDUCE_SCATTER, Lane.EXPERTS, size, f"parts.{level}", f"experts.{level}"))
        stages.append(Stage(Kind.SUM, Lane.EXPERTS, size, f"sums.{level}", also_reads=(summed,)))
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


def _lane(level: int, levels: int) -> Lane:
    """The innermost of several levels is inside a node."""
    return Lane.INTRA if levels > 1 and level == levels - 1 else Lane.INTER


def _name(what: str, levels: Iterable[int]) -> str:
    return f"expert-migration {what}, level {', '.join(map(str, levels))}"
