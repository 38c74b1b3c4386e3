"""The levels and process groups of one layer's expert domains."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.layouts import Groups
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes


@dataclass(frozen=True)
class DomainGroups:
    """The groups of this rank at every level, the outermost first; None where it would be alone.

    Tokens and experts never share a group, so that experts can travel while tokens do.
    """

    ep: ProcessGroup
    """The expert-parallel group that is cut into domains."""
    domains: ExpertDomains
    rank: int
    """This rank in the expert-parallel group."""
    tokens: tuple[ProcessGroup | None, ...]
    """All-to-all: its rank i is in domain i of the level."""
    experts: tuple[ProcessGroup | None, ...]
    """All-gather, and reduce-scatter of gradients."""
    all_experts: ProcessGroup | None
    """All ranks of the expert-parallel group, for what concerns all experts. None where no expert travels."""

    @property
    def migrates(self) -> bool:
        """Whether any expert travels."""
        return any(size > 1 for size in self.domains.sizes)


def find_levels(nodes: Sequence[int]) -> tuple[int, ...]:
    """Workers of each level of a group of ranks, the slowest level first: (nodes, ranks of each), or (ranks,).

    One level where all ranks sit on one node, or each on its own.

    Args:
        nodes: the node of each rank.

    Raises:
        ConfigurationError: nodes with unequal numbers of these ranks, or ranks of one node that do not follow one
            another.
    """
    number = len(set(nodes))
    if number in (1, len(nodes)):
        return (len(nodes),)
    each = len(nodes) // number
    blocks = [set(nodes[first : first + each]) for first in range(0, len(nodes), each)]
    if len(nodes) % number or any(len(block) > 1 for block in blocks) or len(blocks) != len(set.union(*blocks)):
        raise ConfigurationError(
            f"--expert-model-parallel-size {len(nodes)}: its ranks lie on nodes {', '.join(map(str, nodes))}, which "
            "are not levels of equal workers: name the levels with --moe-opt-levels"
        )
    return number, each


def levels_of(ep: ProcessGroup, levels: tuple[int, ...] | None) -> tuple[int, ...]:
    """The levels the user named, or those that nodes make. The latter is a collective call over the group, once.

    Raises:
        ConfigurationError: named levels that do not make up the group, or see find_levels.
    """
    if levels is None:
        return find_levels(_nodes(ep).node_of)
    product = functools.reduce(int.__mul__, levels)
    if product != ep.size():
        raise ConfigurationError(
            f"--moe-opt-levels {','.join(map(str, levels))} makes {product} ranks, not the "
            f"{ep.size()} of --expert-model-parallel-size: name workers whose product is {ep.size()}"
        )
    return levels


@functools.cache
def _nodes(ep: ProcessGroup) -> NodeMap:
    return discover_nodes(ep)


@functools.cache
def domain_groups(ep: ProcessGroup, domains: ExpertDomains) -> DomainGroups:
    """Makes the groups; one set for all layers of a process. A collective call over `ep`, once."""
    levels = range(domains.levels)
    tokens = tuple(_group(ep, domains.all_to_all_groups(level), f"tokens, level {level}") for level in levels)
    experts = tuple(_group(ep, domains.gather_groups(level), f"experts, level {level}") for level in levels)
    everybody = (tuple(range(ep.size())),)
    all_experts = _group(ep, everybody, "all experts") if any(experts) else None
    return DomainGroups(ep, domains, ep.rank(), tokens, experts, all_experts)


def _group(ep: ProcessGroup, groups: Groups, what: str) -> ProcessGroup | None:
    """This rank's group of `groups`, which hold ranks of `ep`."""
    members = next(group for group in groups if ep.rank() in group)
    if len(members) == 1:
        return None
    ranks = dist.get_process_group_ranks(ep)
    ranks = tuple(ranks[member] for member in members)
    # Only the members of a group take part: other expert-parallel groups, and other pipeline stages, build their layers
    # at other times, or none. All ranks of `ep` go through the levels in the same order: nobody waits in a ring.
    with _named_alike(f"expert migration: {what}", ranks):
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"expert migration: {what}")


_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


@contextmanager
def _named_alike(what: str, ranks: tuple[int, ...]) -> Iterator[None]:
    """Gives the group that is made inside the block the same name on all its ranks.

    PyTorch puts the number of groups that a rank is in into the name of a group that only its members make. Ranks of
    different pipeline stages are in different numbers of groups, and would wait for each other under different names.
    """
    number = _made[what, ranks]
    _made[what, ranks] += 1
    name = hashlib.sha1(f"{what} {ranks} {number}".encode(), usedforsecurity=False).hexdigest()
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda _: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
