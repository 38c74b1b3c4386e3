"""How fast the links are, and the least time that given bytes need on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.runtime.engine.collectives import all_to_all_rows
from megatron_moe_opt.runtime.observed.traffic import INTER_NODE, INTRA_NODE
from megatron_moe_opt.topology.nodes import NodeMap

# The probe doubles its messages until one exchange takes this long, or sends this much to each peer.
PROBE_SECONDS = 0.5
PROBE_MAX_BYTES = 32 * 2**20
PROBE_REPEATS = 3


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second; None where the job has no such link."""

    inter_node: float | None
    """Out of one node, all its ranks together, while as much enters it: both directions at once."""
    intra_node: float | None
    """Between the ranks of one node, all together and both directions at once."""
    inter_node_one_way: float | None = None
    """Out of one node while nothing enters it; not less than `inter_node`. None: as much."""

    def inter_node_seconds(self, leaving: int, entering: int) -> float | None:
        """Returns the least time in which so many bytes can leave and enter a node; None without such links.

        Neither direction is faster than one alone, and both together not than both at once: on a link that is full
        duplex the larger one counts, where the directions share one the sum.
        """
        if not self.inter_node:
            return None
        one_way = max(self.inter_node_one_way or 0.0, self.inter_node)
        return max(max(leaving, entering) / one_way, (leaving + entering) / (2 * self.inter_node))


@dataclass(frozen=True)
class WireLimit:
    """The least time in which the bytes of a step can cross the links, were nothing else to be done."""

    seconds: float
    link: str
    """The link that needs this long: INTER_NODE or INTRA_NODE."""


_Pairs = Callable[[int, int], bool]
"""Whether a rank sends to another."""


def measure_links(nodes: NodeMap, device: torch.device) -> LinkRates:
    """Returns the rates of both links, measured one after the other with exchanges that use that link alone.

    A collective call over the world. The exchange is the one that dispatchers run, all of whose sends and receives are
    under way at once: an all-to-all in which one direction follows the other would find half the rate. The rate is the
    best of PROBE_REPEATS exchanges on the busiest node, so that a limit computed from it is one that can be reached.
    """

    def between(a: int, b: int) -> bool:
        return not nodes.same_node(a, b)

    both = _measure(nodes, device, between)
    one_way = _measure(nodes, device, lambda a, b: a < b and between(a, b))
    return LinkRates(
        inter_node=both,
        intra_node=_measure(nodes, device, lambda a, b: a != b and nodes.same_node(a, b)),
        inter_node_one_way=None if both is None else max(both, one_way or 0.0),
    )


def _measure(nodes: NodeMap, device: torch.device, sends: _Pairs) -> float | None:
    """Returns the bytes a second out of, or into, the node that sends, or gets, most."""
    world = range(len(nodes.node_of))
    busiest = 0
    for node in range(nodes.num_nodes):
        inside = nodes.ranks_of(node)
        leaving = sum(sends(a, b) for a in inside for b in world)
        entering = sum(sends(a, b) for a in world for b in inside)
        busiest = max(busiest, leaving, entering)
    if not busiest:
        return None
    message = 2**16
    while _exchange(message, sends, len(world), device) < PROBE_SECONDS and message < PROBE_MAX_BYTES:
        message *= 2
    best = min(_exchange(message, sends, len(world), device) for _ in range(PROBE_REPEATS))
    return message * busiest / best


def _exchange(message: int, sends: _Pairs, world: int, device: torch.device) -> float:
    """Returns the seconds of one exchange with `message` bytes over every link in use, the slowest rank's."""
    rank = dist.get_rank()
    to = [message * sends(rank, peer) for peer in range(world)]
    from_ = [message * sends(peer, rank) for peer in range(world)]
    rows = torch.zeros(sum(to), 1, dtype=torch.uint8, device=device)
    dist.barrier()
    return slowest([timed(lambda: all_to_all_rows(rows, from_, to, dist.group.WORLD), device)], device)[0]


def wire_limit(sent: list[list[int]], nodes: NodeMap, rates: LinkRates) -> WireLimit | None:
    """Returns the least time in which the bytes of a step can cross the links.

    Args:
        sent: [world size, world size] bytes from rank to rank.
        nodes: where the ranks are.
        rates: measured rates.

    Returns:
        For every node, the time of the bytes that leave it and enter it (LinkRates.inter_node_seconds), and of the
        bytes between its ranks at the intra-node rate; the largest of all of these. None where nothing is sent between
        ranks.
    """
    limits = []
    for node in range(nodes.num_nodes):
        inside = nodes.ranks_of(node)
        outside = [rank for rank in range(len(sent)) if rank not in inside]
        leaving = sum(sent[a][b] for a in inside for b in outside)
        entering = sum(sent[a][b] for a in outside for b in inside)
        between = sum(sent[a][b] for a in inside for b in inside)
        seconds = rates.inter_node_seconds(leaving, entering)
        if seconds:
            limits.append(WireLimit(seconds, INTER_NODE))
        if rates.intra_node and between:
            limits.append(WireLimit(between / rates.intra_node, INTRA_NODE))
    return max(limits, key=lambda limit: limit.seconds, default=None)
