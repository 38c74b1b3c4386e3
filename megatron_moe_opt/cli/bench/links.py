"""Measures how fast the links between the ranks of this run are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_moe_opt.cli.bench.link_rates import LinkRates
from megatron_moe_opt.integration.measuring.timing import slowest, timed
from megatron_moe_opt.runtime.engine.collectives import all_to_all_rows
from megatron_moe_opt.topology.nodes import NodeMap

# The probe doubles its messages until one exchange takes this long, or sends this much to each peer.
PROBE_SECONDS = 0.5
PROBE_MAX_BYTES = 32 * 2**20
PROBE_REPEATS = 3

_Pairs = Callable[[int, int], bool]
"""Says whether the first rank sends to the second one."""


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
    _exchange(message, sends, len(world), device)  # ranks connect in their first one, which takes seconds over NCCL
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
