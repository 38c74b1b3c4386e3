"""Expert domains: who sends experts and who sends tokens to whom, level by level (HybridEP, section IV-A).

A level is a set of workers joined by links of one kind: data centres, the nodes of a data centre, the GPUs of a node.
The outermost level is level 0. At each level, workers are cut into domains of equal size:

    inside a domain    experts travel: all-gather among the workers of the domain
    between domains    tokens travel: all-to-all among the workers at the same offset of their domains

A rank has one group of each kind at every level; its members differ in their place at that level alone. Composed over
the levels this reaches every expert: experts are gathered from the outermost level inwards, so that a rank ends with
those of all ranks whose domains are its own at every level, and a token takes one hop a level, from the outermost
inwards, to the domain of its expert. Domain size 1 everywhere is expert parallelism, hop by hop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.layouts import Groups, Layout, divisors


@dataclass(frozen=True)
class ExpertDomains:
    """The ranks 0 .. world - 1 of one expert-parallel group, on levels and in domains.

    Groups list ranks of the expert-parallel group, not of the world. Every rank is in one group of each kind at every
    level; those of one rank need no collective.

    Raises:
        ConfigurationError: no level, a number below 1, or a domain size that does not divide its level.
    """

    workers: tuple[int, ...]
    """The workers of each level in one worker of the level outside it: the paper's scaling factors SF."""
    sizes: tuple[int, ...]
    """The workers in a domain of each level (S_ED)."""

    def __post_init__(self) -> None:
        if not self.workers or len(self.workers) != len(self.sizes):
            raise ConfigurationError(
                f"{len(self.sizes)} expert domain size(s) {self.sizes} do not fit {len(self.workers)} level(s) "
                f"{self.workers}: give one for each level, and at least one level"
            )
        for level, (workers, size) in enumerate(zip(self.workers, self.sizes, strict=True)):
            if workers < 1 or size < 1 or workers % size:
                raise ConfigurationError(
                    f"expert domain size {size} does not divide the {workers} workers of level {level}: choose a "
                    "divisor"
                )

    @property
    def levels(self) -> int:
        """How many levels of the network have domains of their own."""
        return len(self.workers)

    @property
    def hops(self) -> tuple[int, ...]:
        """The levels at which tokens hop, outermost first."""
        return tuple(level for level in range(self.levels) if self.domains(level) > 1)

    @property
    def world(self) -> int:
        """How many ranks there are at all levels together: G."""
        return prod(self.workers)

    def stride(self, level: int) -> int:
        """Returns the distance in ranks between neighbours at a level."""
        return prod(self.workers[level + 1 :])

    def location(self, rank: int) -> tuple[int, ...]:
        """Returns the rank's place at every level (eq. 13)."""
        return tuple(rank // self.stride(level) % workers for level, workers in enumerate(self.workers))

    def proportion(self, level: int) -> float:
        """Returns p: of a worker's peers at a level, the share that are in other domains, to which tokens travel and no
        experts. That is (G - S) / (G - 1) of G workers in domains of S; 1 where a worker has no peers.
        """
        workers, size = self.workers[level], self.sizes[level]
        return (workers - size) / (workers - 1) if workers > 1 else 1.0

    def domains(self, level: int) -> int:
        """Returns the number of domains in one worker of the level outside: the ranks of an all-to-all group."""
        return self.workers[level] // self.sizes[level]

    @property
    def groups(self) -> int:
        """Returns how many groups of several ranks a rank is in: of tokens and of experts by level, and one of all
        ranks where experts travel.
        """
        travelling = sum(size > 1 for size in self.sizes)
        return sum(self.domains(level) > 1 for level in range(self.levels)) + travelling + (travelling > 0)

    def gather_groups(self, level: int) -> Groups:
        """Returns the groups of a level in which experts travel: each has its ranks ascending, and their first ranks
        ascend.
        """
        stride, size = self.stride(level), self.sizes[level]
        firsts = (rank for rank in range(self.world) if rank // stride % size == 0)
        return tuple(tuple(first + index * stride for index in range(size)) for first in firsts)

    def experts_cross_nodes(self, node_of: Sequence[int]) -> bool:
        """Whether some experts travel between nodes.

        Args:
            node_of: the node of each rank of the expert-parallel group.
        """
        groups = (group for level in range(self.levels) for group in self.gather_groups(level))
        return any(len({node_of[rank] for rank in group}) > 1 for group in groups)

    def all_to_all_groups(self, level: int) -> Groups:
        """Returns the groups of a level in which tokens travel: rank i of a group is in domain i. The groups are in the
        order of `gather_groups`.
        """
        stride, size, workers = self.stride(level), self.sizes[level], self.workers[level]
        firsts = (rank for rank in range(self.world) if rank // stride % workers < size)
        return tuple(tuple(first + place * stride for place in range(0, workers, size)) for first in firsts)


def stationary(workers: tuple[int, ...]) -> ExpertDomains:
    """Returns the domains in which no expert travels: of one worker at every level."""
    return ExpertDomains(workers, (1,) * len(workers))


def realisable(workers: tuple[int, ...]) -> Iterator[ExpertDomains]:
    """Yields every choice of domain sizes; the sizes of a level ascend, the innermost level's fastest."""
    for sizes in product(*map(divisors, workers)):
        yield ExpertDomains(workers, sizes)


def find_levels(nodes: Sequence[int]) -> tuple[int, ...]:
    """Returns the workers of each level of a group of ranks, the slowest level first: (nodes, ranks of each), or
    (ranks,).

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


def levels_of_layout(layout: Layout, node_of: Sequence[int]) -> tuple[int, ...]:
    """Returns the levels of the first expert-parallel group of a layout, see find_levels.

    Args:
        node_of: the node of each rank, [world size].
    """
    return find_levels([node_of[rank] for rank in layout.first_group("ep")])


def levels_if_even(layout: Layout, node_of: Sequence[int]) -> tuple[int, ...]:
    """Returns what levels_of_layout does, or nothing where the group's ranks lie on nodes unevenly."""
    try:
        return levels_of_layout(layout, node_of)
    except ConfigurationError:
        return ()
