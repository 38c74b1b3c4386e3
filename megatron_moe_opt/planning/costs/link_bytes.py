"""What a rank sends over links between nodes, and inside its node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, JOINT_GROUP, TP, experts_group, tokens_group
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Op
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.layouts import JOINT_ROLES


class LinkBytes:
    """Counts what the first rank sends over links between nodes, by which peers of its groups are on other nodes."""

    def __init__(self, cluster: Cluster, domains: ExpertDomains | None = None) -> None:
        """
        Args:
            domains: of the expert-parallel group, between which tokens hop; None: none does.
        """
        world = cluster.world
        layout = world.layout
        self._ranks = {role: layout.first_group(role) for role in (EP, EXPERT_TP, TP)}
        self._ranks[JOINT_GROUP] = layout.first_group(*JOINT_ROLES)
        for level in range(0 if domains is None else domains.levels):
            of_level = domains.all_to_all_groups(level)[0], domains.gather_groups(level)[0]
            for name, group in zip((tokens_group(level), experts_group(level)), of_level, strict=True):
                self._ranks[name] = tuple(self._ranks[EP][one] for one in group)
        self._nodes = world.nodes
        self._elsewhere = {role: self._on_other_nodes(group) for role, group in self._ranks.items()}

    def sent(self, op: Op) -> tuple[float, float]:
        """Returns the bytes of a collective that the first rank sends between nodes and inside its
        node, as many to each peer.
        """
        ranks, elsewhere = len(self._ranks[op.group]), self._elsewhere[op.group]
        each = op.size / ranks
        return each * elsewhere, each * (ranks - 1 - elsewhere)

    def sent_by_all(self, ops: Iterable[Op]) -> tuple[float, float]:
        """Returns what `sent` does, of all collectives among the ops together."""
        sent = [self.sent(op) for op in ops if op.kind in COLLECTIVES]
        return sum(inter for inter, _ in sent), sum(intra for _, intra in sent)

    def _on_other_nodes(self, group: Sequence[int]) -> int:
        """Returns how many ranks of a group are not on the node of its first."""
        return sum(self._nodes[rank] != self._nodes[group[0]] for rank in group)
