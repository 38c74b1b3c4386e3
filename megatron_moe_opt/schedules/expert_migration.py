"""The hops of tokens between expert domains (HybridEP, section IV-A): one schedule a direction.

    hop_out     [ permute -> all-to-all ] for each level    a copy of a token for every domain with one of its experts
    hop_back    [ all-to-all -> permute ] for each level    the copies' partial outputs; their sum ends a hop

The outermost level, whose links are the slowest, is first on the way out and last on the way back. Experts travel
beside these, in a lane of their own, and so do their gradients:

    gathered    [ all-gather ] for each level, outermost first
    returned    [ reduce-scatter ] for each level, innermost first
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_moe_opt.schedules.pipeline import Stage, one_by_one
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule


def role(level: int) -> str:
    """What the process group of a level is called."""
    return f"tokens.{level}"


def hop_out(sent: Mapping[int, int], levels: int) -> Schedule:
    """Rows to the domains of each level. Buffers: rows -> copies.LEVEL -> arrived.LEVEL -> copies.NEXT ...

    Args:
        sent: for each level at which tokens hop, outermost first, bytes of the copies that this rank makes, its own
            domain's included.
        levels: number of levels.
    """
    stages = []
    for level, size in sent.items():
        stages.append(Stage(Kind.PERMUTE, Lane.COMPUTE, size, f"copies.{level}"))
        stages.append(Stage(Kind.ALL_TO_ALL, _lane(level, levels), size, f"arrived.{level}", role(level)))
    return one_by_one(_name("hop out", sent), "rows", stages)


def hop_back(received: Mapping[int, int], levels: int) -> Schedule:
    """Rows back from the domains of each level, and their sum. Buffers: arrived -> copies.LEVEL -> rows.LEVEL -> ...

    Args:
        received: for each level, innermost first, bytes of the copies of this rank's rows.
        levels: number of levels.
    """
    stages = []
    for level, size in received.items():
        stages.append(Stage(Kind.ALL_TO_ALL, _lane(level, levels), size, f"copies.{level}", role(level)))
        stages.append(Stage(Kind.PERMUTE, Lane.COMPUTE, size, f"rows.{level}"))
    return one_by_one(_name("hop back", received), "arrived", stages)


def gathered(sizes: Mapping[int, int]) -> Schedule:
    """Experts to all ranks of a domain.

    Args:
        sizes: bytes that a rank holds after each level's gather, its own included, in their order.
    """
    return _travel("experts gathered", Kind.ALL_GATHER, sizes)


def returned(sizes: Mapping[int, int]) -> Schedule:
    """Gradients to the owners of experts.

    Args:
        sizes: bytes of what a rank has for the ranks of each level, itself included, in the levels' order.
    """
    return _travel("gradients returned", Kind.REDUCE_SCATTER, sizes)


def _travel(name: str, kind: Kind, sizes: Mapping[int, int]) -> Schedule:
    ops, held = [], "0"
    for number, (level, size) in enumerate(sizes.items(), start=1):
        waits_for, reads, held = (number - 2,) * (number > 1), (held,), str(number)
        ops.append(Op(kind, Lane.EXPERTS, 0, size, waits_for, reads, (held,), f"experts.{level}"))
    return Schedule(f"expert-migration, {name}", tuple(ops), ("0",))


def _lane(level: int, levels: int) -> Lane:
    """The innermost of several levels is inside a node."""
    return Lane.INTRA if levels > 1 and level == levels - 1 else Lane.INTER


def _name(what: str, levels: Iterable[int]) -> str:
    return f"expert-migration {what}, level {', '.join(map(str, levels))}"
