"""What a rank sends over links between nodes, and inside its node."""

from __future__ import annotations

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.schedules.parm import JOINT, TP
from megatron_moe_opt.schedules.schedule import Op


class LinkBytes:
    """Which peers of the first rank's groups are on other nodes."""

    def __init__(self, cluster: Cluster) -> None:
        world = cluster.world
        layout = world.layout
        self._ranks = {role: layout.groups(role)[0] for role in ("ep", "expert-tp", TP)}
        self._ranks[JOINT] = layout.joint_groups[0]
        self._nodes = world.nodes

    @property
    def spans_nodes(self) -> bool:
        """Whether the expert-parallel group does."""
        return len({self._nodes[rank] for rank in self._ranks["ep"]}) > 1

    def sent(self, op: Op) -> tuple[float, float]:
        """Bytes of a collective that the first rank sends between nodes, and inside its node: as much to each peer."""
        first, *peers = self._ranks[op.group]
        elsewhere = sum(self._nodes[peer] != self._nodes[first] for peer in peers)
        each = op.size / (len(peers) + 1)
        return each * elsewhere, each * (len(peers) - elsewhere)
