"""What moving samples saved, layer by layer (NetMoE, appendix C, Table 5): counted from what all ranks know.

The bytes are those of the rows in a forward pass's dispatch and combine, of all ranks of the joint group together; the
backward pass sends as many rows again. `stock` is what samples would have sent from their home ranks, in rows without
our lane, `sent` what was sent. Links are those of the all-to-all over EP: what expert-TP adds inside nodes is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megatron_moe_opt.dispatchers.sample_placement import Decision
from megatron_moe_opt.planning.predicting.placement_volume import crossings, moved_shares
from megatron_moe_opt.planning.predicting.sample_costs import RowCosts, SampleCosts
from megatron_moe_opt.topology.sample_holders import SampleHolders


@dataclass(frozen=True)
class SampleRowBytes:
    """Bytes of a row in one direction."""

    stock_dispatch: int
    stock_combine: int
    dispatch: int
    combine: int
    alone: int = 0
    """Bytes that each part of a sample that moves takes in an all-to-all of its own."""


@dataclass
class SampleTraffic:
    """Sums over the passes of one MoE layer."""

    passes: int = 0
    stock_inter: int = 0
    """The bytes that cross nodes; those of `intra` stay between ranks of a node."""
    stock_intra: int = 0
    sent_inter: int = 0
    sent_intra: int = 0
    moved_nodes: float = 0.0
    """The shares of the samples that changed their node, and their device, summed over passes."""
    moved_devices: float = 0.0
    solve_seconds: float = 0.0
    """The seconds of deciding in the background; `exposed_seconds`: those that the combine waited for it."""
    exposed_seconds: float = 0.0

    def add(
        self,
        decision: Decision,
        holders: SampleHolders,
        costs: SampleCosts,
        rows_beside: int,
        row: SampleRowBytes,
        exposed: float,
    ) -> None:
        """Adds the traffic of one pass.

        Args:
            rows_beside: rows that each part of a sample that moves takes in combine by itself.
            exposed: seconds.
        """
        ranks, batch, _ = decision.counts.shape
        counts = decision.counts.reshape(ranks * batch, -1)
        here = np.repeat(np.arange(ranks), batch)
        there, home = (holders.items(move) // batch for move in (decision.move, decision.before))
        by_expert = costs.by_expert(counts)
        stock = RowCosts(holders, by_expert.shape[1]).of_ranks(by_expert, home)
        dispatched, combined = costs.volumes(counts, here, there, rows_beside)

        self.passes += 1
        stock_bytes = row.stock_dispatch + row.stock_combine
        self.stock_inter += stock.inter * stock_bytes
        self.stock_intra += stock.intra * stock_bytes
        self.sent_inter += dispatched.inter * row.dispatch + combined.inter * row.combine
        self.sent_intra += dispatched.intra * row.dispatch + combined.intra * row.combine
        if row.alone:
            inter, intra = crossings(here, there, holders.rank_node)
            self.sent_inter += inter * row.alone
            self.sent_intra += intra * row.alone
        position_device = np.repeat(holders.holder_device, batch)
        nodes, devices = moved_shares(position_device, position_device[decision.move], holders.device_node)
        self.moved_nodes += nodes
        self.moved_devices += devices
        self.solve_seconds += decision.seconds
        self.exposed_seconds += exposed

    def take(self) -> dict[str, float]:
        """Returns the means of a pass by name, in MB, % and ms; empty without passes. Counts from zero again."""
        means = self._means() if self.passes else {}
        for entry in fields(self):
            setattr(self, entry.name, entry.default)
        return means

    def _means(self) -> dict[str, float]:
        each = 1 / self.passes
        return {
            "stock inter-node MB": self.stock_inter * each / 1e6,
            "inter-node MB": self.sent_inter * each / 1e6,
            "stock intra-node MB": self.stock_intra * each / 1e6,
            "intra-node MB": self.sent_intra * each / 1e6,
            "moved across nodes %": 100 * self.moved_nodes * each,
            "moved across devices %": 100 * self.moved_devices * each,
            "solve ms": 1e3 * self.solve_seconds * each,
            "exposed ms": 1e3 * self.exposed_seconds * each,
        }
