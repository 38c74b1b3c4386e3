"""What a MoE layer has to do on one rank, as all models of the planner take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megatron_moe_opt.planning.predicting.expert_migration import MigrationLayer
from megatron_moe_opt.planning.predicting.skew import Skew
from megatron_moe_opt.row_format import SAME, Wire, WireFormat
from megatron_moe_opt.schedules.schedule import Kind


def resident_part(layers: int, limit: int | None) -> float:
    """Returns the LayerWorkload.resident_part of a rank that has so many MoE layers.

    Args:
        limit: layers whose gathered experts stay; None: all.
    """
    return 1.0 if limit is None or limit >= layers else limit / layers


@dataclass(frozen=True)
class LayerWorkload:
    """A MoE layer on one rank: what it has to move and compute, and the sizes of its groups."""

    tokens: int
    """Tokens that a rank enters the layer with: with sequence parallelism its part of them. 0: not known yet."""
    hidden: int
    """Hidden size of a token as it travels."""
    ffn: int
    """Middle size of this rank's shard of an expert."""
    gated: bool
    """Whether the first matrix of an expert is twice as wide, for a gate."""
    experts: int
    """Number of the layer's experts, on all ranks."""
    topk: int
    element_bytes: int
    """Bytes of an element of tokens and weights."""
    lane_bytes: int
    """Bytes behind a row of dispatch, for its probability."""
    ep: int
    etp: int = 1
    tp: int = 1
    """Ranks that hold the same tokens: 1 with sequence parallelism."""
    sample_ranks: int = 1
    """Ranks that hold a part of each sample, TP x CP. 1 where that is not known."""
    routes_all: bool = True
    """Whether each of these ranks may route all of its tokens, as under Parm's S2, and the model stays the same."""
    capacity_factor: float | None = None
    """The capacity factor, with which every expert gets its capacity of rows. None: dropless."""
    imbalance: float = 1.0
    """Rows that the busiest rank computes, over the mean."""
    rank_rows: tuple[float, ...] = ()
    """Rows that each rank of the world computes, in any unit, to tell what shared links carry. Empty: not known."""
    workers: tuple[int, ...] = ()
    """Workers of each network level of the EP group, the slowest first. Empty: not known, no expert migrates."""
    placement_saving: float | None = None
    """The part of its bytes between nodes that placing samples saves (a replayed routing trace). None: not known."""
    fused: bool = False
    """The experts' activation and probabilities are one kernel, which keeps nothing between."""
    compression: float = 1.0
    """Bytes of experts that travel, over bytes sent."""
    gradient_compression: float = 1.0
    """Bytes of gradients of experts that travel, over bytes sent."""
    wire: Wire = SAME
    """The formats in which rows travel (--moe-opt-wire)."""
    resident_part: float = 1.0
    """The part of a rank's MoE layers whose experts of other ranks stay in memory; 1: none is brought there again."""
    prob_bytes: int | None = None
    """Bytes of a probability as the router computes it (--moe-router-dtype). None: those of an element."""

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a row as its experts have it."""
        return self.hidden * self.element_bytes

    @property
    def outbound_bytes(self) -> int:
        """Returns the bytes of a row on its way to the experts, without what is behind it."""
        return self._on_the_wire(self.wire.dispatch)

    @property
    def homebound_bytes(self) -> int:
        """Returns the bytes of a row on its way back."""
        return self._on_the_wire(self.wire.combine)

    def _on_the_wire(self, wire: WireFormat) -> int:
        return self.row_bytes if wire is WireFormat.SAME else wire.payload_bytes(self.hidden, None)

    @property
    def packed_row_bytes(self) -> int:
        """Returns the bytes of a row of dispatch, which carries its probability."""
        return self.outbound_bytes + self.lane_bytes

    @property
    def sharers(self) -> int:
        """Returns over how many TP ranks tokens that hop are divided; they are gathered again part by part. 1: ranks
        have tokens of their own, or these are split before the layer.
        """
        return self.tp if self.routes_all and self.capacity_factor is None else 1

    @property
    def local_experts(self) -> int:
        """How many of the layer's experts each EP rank holds."""
        return self.experts // self.ep

    def routed_rows(self, tokens: int) -> int:
        """Returns the (token, expert) pairs that so many tokens make: E T (Parm, section IV-B)."""
        if self.capacity_factor is None:
            return tokens * self.topk
        return self.experts * ceil(tokens * self.topk / self.experts * self.capacity_factor)

    @cached_property
    def rows(self) -> int:
        """Returns the (token, expert) pairs that the busiest rank computes."""
        return self.rows_of(self.imbalance)

    def rows_of(self, imbalance: float) -> int:
        """Returns the (token, expert) pairs of a rank that has so many times the mean."""
        return ceil(self.routed_rows(-(-self.tokens // self.tp)) * imbalance)

    @property
    def expert_bytes(self) -> int:
        """Returns the bytes of the weights of all experts of a rank."""
        return self.local_experts * self.hidden * self.ffn * (3 if self.gated else 2) * self.element_bytes

    def held_bytes_of_others(self, crosses_nodes: bool) -> float:
        """Returns the bytes on the device of another rank's experts and of the float32 sums of their gradients over a
        step's micro-batches, in the mean of all layers.

        Args:
            crosses_nodes: experts travel between nodes; where not all layers' stay, sums then wait on the host.
        """
        on_host = crosses_nodes and self.resident_part < 1
        sums = 0.0 if on_host else self.expert_bytes / self.element_bytes * 4
        return self.resident_part * (self.expert_bytes + sums)

    def migration(self, skew: Skew) -> MigrationLayer:
        """Returns the layer for the stream model. A row has its probabilities and the numbers
        of its experts behind it.
        """
        on_the_wire = (self.outbound_bytes + self.homebound_bytes) // 2  # as many rows go each way
        row, whole = on_the_wire + self.topk * self.lane_bytes // 2, self.expert_bytes
        in_float32 = 4 / self.element_bytes  # what is kept of gradients, and their sums
        ratios = (
            (Kind.ALL_GATHER, self.compression, 1.0),
            (Kind.REDUCE_SCATTER, self.gradient_compression, in_float32),
        )
        # Of a token those experts count that have room for it; what fills a capacity up does not travel.
        tokens = -(-self.tokens // self.tp)
        kept = min(1.0, self.rows_of(1.0) / max(tokens * self.topk, 1))
        return MigrationLayer.alone(
            tokens, row, self.topk, self.local_experts, int(whole / self.compression),
            int(whole / self.gradient_compression), skew.of_regions, self.resident_part < 1 and self.compression == 1,
            {kind: ratio * widened for kind, ratio, widened in ratios if ratio != 1}, kept,
        )  # fmt: skip
