"""How fast the links are, and the least time that given bytes need on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.runtime.observed.traffic import INTER_NODE, INTRA_NODE
from megatron_moe_opt.topology.nodes import NodeMap

# The probe doubles its messages until one exchange takes this long, or sends this much to each peer.
PROBE_SECONDS = 0.5
PROBE_MAX_BYTES = 32 * 2**20
PROBE_REPEATS = 5


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second; None where the job has no such link."""

    inter_node: float | None
    """Out of (and at the same time into) one node, all its ranks together."""
    intra_node: float | None
    """Between the ranks of one node, all together."""


@dataclass(frozen=True)
class WireLimit:
    """The least time in which the bytes of a step can cross the links, were nothing else to be done."""

    seconds: float
    link: str
    """The link that needs this long: INTER_NODE or INTRA_NODE."""


def measure_links(nodes: NodeMap, device: torch.device) -> LinkRates:
    """Returns the rates of both links, measured one after the other with an all_to_all that carries traffic over that
    link alone.

    A collective call over the world. The rate is the best of PROBE_REPEATS exchanges on the busiest node, so that a
    limit computed from it is one that can be reached.
    """
    return LinkRates(
        inter_node=_measure(nodes, device, lambda a, b: not nodes.same_node(a, b)),
        intra_node=_measure(nodes, device, lambda a, b: a != b and nodes.same_node(a, b)),
    )


def _measure(nodes: NodeMap, device: torch.device, uses: Callable[[int, int], bool]) -> float | None:
    world, rank = dist.get_world_size(), dist.get_rank()
    pairs_of_node = [
        sum(uses(a, b) for a in nodes.ranks_of(node) for b in range(world)) for node in range(nodes.num_nodes)
    ]
    if not any(pairs_of_node):
        return None
    message = 2**16
    while _exchange(message, uses, rank, world, device) < PROBE_SECONDS and message < PROBE_MAX_BYTES:
        message *= 2
    best = min(_exchange(message, uses, rank, world, device) for _ in range(PROBE_REPEATS))
    return message * max(pairs_of_node) / best


def _exchange(message: int, uses: Callable[[int, int], bool], rank: int, world: int, device: torch.device) -> float:
    """Returns the seconds of one all_to_all with `message` bytes over every link in use, the slowest rank's."""
    splits = [message * uses(rank, peer) for peer in range(world)]
    send = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    dist.barrier()
    seconds = timed(lambda: dist.all_to_all_single(receive, send, splits, splits), device)
    return slowest([seconds], device)[0]


def wire_limit(sent: list[list[int]], nodes: NodeMap, rates: LinkRates) -> WireLimit | None:
    """Returns the least time in which the bytes of a step can cross the links.

    Args:
        sent: [world size, world size] bytes from rank to rank.
        nodes: where the ranks are.
        rates: measured rates.

    Returns:
        For every node, the larger of the bytes that leave it and the bytes that enter it, over the inter-node rate, and
        the bytes between its ranks over the intra-node rate; the largest of all of these. None where nothing is sent
        between ranks.
    """
    limits = []
    for node in range(nodes.num_nodes):
        inside = nodes.ranks_of(node)
        outside = [rank for rank in range(len(sent)) if rank not in inside]
        leaving = sum(sent[a][b] for a in inside for b in outside)
        entering = sum(sent[a][b] for a in outside for b in inside)
        between = sum(sent[a][b] for a in inside for b in inside)
        if rates.inter_node and (leaving or entering):
            limits.append(WireLimit(max(leaving, entering) / rates.inter_node, INTER_NODE))
        if rates.intra_node and between:
            limits.append(WireLimit(between / rates.intra_node, INTRA_NODE))
    return max(limits, key=lambda limit: limit.seconds, default=None)
