"""How fast links are, and the least time that given bytes need on them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe_opt.runtime.observed.traffic_rows import INTER_NODE, INTRA_NODE
from megatron_moe_opt.topology.nodes import NodeMap


@dataclass(frozen=True)
class LinkRates:
    """How fast a job's links are, in bytes per second; None where the job has no such link."""

    inter_node: float | None
    """The rate out of one node, all its ranks together, while as much enters it: both directions are in use at once."""
    intra_node: float | None
    """The rate between the ranks of one node, all together and in both directions at once."""
    inter_node_one_way: float | None = None
    """The rate out of one node while nothing enters it; not less than `inter_node`. None: the same as `inter_node`."""

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
