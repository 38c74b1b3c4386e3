"""The groups of expert domains, and what is measured in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed import ProcessGroup

from megatron_moe_opt.integration.measuring import loads
from megatron_moe_opt.integration.measuring.loads import Rows
from megatron_moe_opt.integration.measuring.meter import Load
from megatron_moe_opt.planning.costs.domain_curves import profile_name, realisable_groups
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.layouts import Groups
from megatron_moe_opt.topology.process_groups import refine, temporary_groups

_COLLECTIVES = {
    Kind.ALL_TO_ALL: loads.all_to_all,
    Kind.ALL_GATHER: loads.all_gather,
    Kind.REDUCE_SCATTER: loads.reduce_scatter,
}


def domain_moves(
    rows: Rows, groups: Mapping[str, ProcessGroup], workers: Sequence[int], experts_travel: bool
) -> list[Load]:
    """Returns what tokens and experts do in the groups of `domain_groups_of`; the innermost of several levels is in a
    node. Where experts do not travel, tokens alone.
    """
    moves = []
    for level, ranks in realisable_groups(workers):
        lane = Lane.INTRA if len(workers) > 1 and level == len(workers) - 1 else Lane.INTER
        for kind, collective in _COLLECTIVES.items():
            if kind is not Kind.ALL_TO_ALL and not experts_travel:
                continue
            name = profile_name(kind, workers, level, ranks)
            travels_whole = kind is not Kind.ALL_TO_ALL  # a layer's experts or their gradients, in one op
            moves.append(replace(collective(rows, groups[name], name, lane), is_whole=travels_whole))
    return moves


def num_domain_groups(workers: Sequence[int]) -> int:
    """Returns how many groups `domain_groups_of` makes on a rank."""
    return len({of_ep for _, of_ep in _domain_groups(workers)} - {_whole(workers)})


def _domain_groups(workers: Sequence[int]) -> Iterator[tuple[str, Groups]]:
    """Yields roles, and the groups of the expert-parallel ranks that have them."""
    for level, ranks in realisable_groups(workers):
        for kind, size in ((Kind.ALL_TO_ALL, workers[level] // ranks), (Kind.ALL_GATHER, ranks)):
            sizes = tuple(size if other == level else 1 for other in range(len(workers)))
            domains = ExpertDomains(tuple(workers), sizes)
            of_ep = domains.all_to_all_groups(level) if kind is Kind.ALL_TO_ALL else domains.gather_groups(level)
            yield profile_name(kind, workers, level, ranks), of_ep


def _whole(workers: Sequence[int]) -> Groups:
    return (tuple(range(math.prod(workers))),)


@contextmanager
def domain_groups_of(ep: ProcessGroup, workers: Sequence[int]) -> Iterator[dict[str, ProcessGroup]]:
    """Yields this rank's groups of expert domains of every size at every level of an expert-parallel group, which is
    itself the group of domains of all of its ranks. A collective call over the world.
    """
    groups: dict[str, ProcessGroup] = {}
    made: dict[Groups, ProcessGroup] = {_whole(workers): ep}
    for name, of_ep in _domain_groups(workers):
        if of_ep not in made:
            made[of_ep] = refine(ep, next(members for members in of_ep if ep.rank() in members), "profile")
        groups[name] = made[of_ep]
    with temporary_groups([group for group in made.values() if group is not ep]):
        yield groups
