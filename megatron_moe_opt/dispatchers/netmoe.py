"""NetMoE: the combine brings whole samples to the ranks where they cost least, not back to where they came from.

    dispatch   permute -> A2A(EP) -> AllGather(expert-TP) -> reorder by local expert -> norm
    combine    + residual -> reorder by receiving rank -> ReduceScatter(expert-TP) -> A2A(EP) -> sum by token

(NetMoE, Fig. 3 and Algorithm 1.) Where samples go is decided in a background thread during dispatch and experts.

Residual. The layer's residual must move with its sample. Megatron normalises what the experts get, and adds what they
return to what was there before. Here rows are dispatched before normalisation, the experts' ranks normalise them, and
one of a token's rows, that of its first expert, returns with the residual added. So it moves without a byte of its own
(the paper's inlining, appendix A). What shared experts make of a token cannot move that way: it is a row of its own in
the same all-to-all, for the samples that move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, map_rows
from megatron_moe_opt.dispatchers.sample_placement import Decision, LayerPlacement, background
from megatron_moe_opt.dispatchers.sample_traffic import SampleRowBytes, SampleTraffic
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import (
    LANE_BYTES,
    build_row_map_by_sample,
    count_routing_map,
    empty,
    permute_packed,
    write_notes,
)
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.engine.collectives import global_rank
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.job.forks import Pending
from megatron_moe_opt.runtime.rows.exchange_plan import plan_exchange
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, to_experts
from megatron_moe_opt.runtime.rows.sample_counts import SampleCounts, SampleCountsGather
from megatron_moe_opt.runtime.rows.sample_exchange import SampleReturn, to_new_homes
from megatron_moe_opt.runtime.rows.ways import way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass
class MovingSamples:
    """What dispatch learnt and combine needs; one object a forward pass."""

    groups: ExpertGroups
    shape: tuple[int, int]
    """Tokens of a sample on this rank, and its samples."""
    counts: SampleCounts
    decision: Pending[Decision]
    learn: bool
    row_bytes: SampleRowBytes
    device: torch.device
    beside: torch.Tensor | None
    """[S, B, H] what shared experts made of this rank's tokens."""
    residual: torch.Tensor | None = None
    """[N, H] the experts' inputs before normalisation."""
    notes: torch.Tensor | None = None
    """int32 [N], twice the token's number in its part of a sample, and 1 more where it returns with the residual."""

    @cached_property
    def exchange(self) -> Exchange:
        """Returns who sends which rows to whom on the way to the experts; combine goes by its own plan."""
        counts, groups = self.counts.rows.sum(2), self.groups
        plan = plan_exchange(counts, groups.ep_rank, groups.etp_rank, 1, self.device)
        return Exchange(way_of(groups, "O1"), plan)


class NetmoeDispatcher(Dispatcher):
    """Moves samples with the combine, to the ranks where they cost least.

    Until `join` is called, and in passes that no residual was handed over for, rows come back to where they came from.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self.placement: LayerPlacement | None = None
        """None: samples do not move."""
        self._norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._residual: torch.Tensor | None = None
        self._beside: torch.Tensor | None = None
        self._learn = False
        self._traffic = SampleTraffic()
        self._counted: Pending[None] | None = None

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        if self.placement is None:
            return "moves no samples: it is the only MoE layer of its transformer block, or outside of one"
        return "moves samples with the combine, and home after the last layer of a pipeline stage"

    def join(self, placement: LayerPlacement, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Lets samples move from now on.

        Args:
            placement: where to.
            norm: of the layer, row by row: [N, H] -> [N, H].
        """
        self.placement, self._norm = placement, norm

    def hand_over(self, residual: torch.Tensor, learn: bool) -> None:
        """Takes what the layer's norm gets in the pass that begins.

        Args:
            residual: [S, B, H].
            learn: whether predictions learn from the pass.
        """
        self._residual, self._learn = residual, learn

    def hand_over_beside(self, output: torch.Tensor) -> None:
        """Takes what is to be added to the layer's output and moves with its sample: [S, B, H]."""
        self._beside = output

    def take_traffic(self) -> dict[str, float]:
        """Means of what the passes in training sent since this was asked last, see SampleTraffic.take."""
        return background(self._traffic.take).result()

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Dispatched | MovingSamples]:
        """See Dispatcher; but of the residual handed over, where there is one, and by expert and sample."""
        residual, self._residual = self._residual, None
        if self.placement is not None and is_recomputing():
            raise ConfigurationError(
                "--moe-token-dispatcher-type netmoe moves samples between ranks, and a MoE layer that is recomputed "
                "would not find them where they were: take torch.utils.checkpoint off it, or use monta"
            )
        if residual is None:
            row_map, counts = map_rows(routing_map_TE, self.groups, capacity=capacity, num_rows=num_rows)
            return permute_packed(tokens_TH, probs_TE, row_map), Dispatched(row_map, counts, self.groups)
        groups, (sequence, batch, hidden) = self.groups, residual.shape
        routing_map_TE = routing_map_TE.bool()
        row_map = build_row_map_by_sample(routing_map_TE, batch, num_rows)
        order, beside, self._beside = self.placement.order, self._beside, None
        own = count_routing_map(routing_map_TE, batch)
        gather = SampleCountsGather(own, sequence, order.unlike, groups, order.room)
        packed_RP = permute_packed(residual.reshape(-1, hidden).contiguous(), probs_TE, row_map)
        _check_tokens_have_rows(row_map.offsets)
        first_rows = row_map.rows[row_map.offsets[:-1]]
        notes = (row_map.sources // batch * 2).to(torch.int32)
        notes[first_rows] += 1
        write_notes(packed_RP, notes)
        hidden_bytes = hidden * packed_RP.element_size()
        row = SampleRowBytes(hidden_bytes + probs_TE.element_size(), hidden_bytes, hidden_bytes + LANE_BYTES)
        counts = gather.wait()  # host synchronisation: for the counts, the only one of a pass; packing is queued
        _check_masked_alike(counts, groups)
        learn = self._learn and counts.equal
        decision = self.placement.decide(counts, sequence if beside is not None else 0, learn)
        return packed_RP, MovingSamples(
            groups, (sequence, batch), counts, decision, learn, row, packed_RP.device, beside
        )

    def dispatch(
        self, packed_RP: torch.Tensor, dispatched: Dispatched | MovingSamples, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Dispatcher; rows are normalised here, and by source, sample and token inside an expert."""
        if isinstance(dispatched, Dispatched):
            return super().dispatch(packed_RP, dispatched, prob_dtype)
        exchange = dispatched.exchange
        dispatched.notes = empty((exchange.plan.num_gathered,), torch.int32, packed_RP.device)
        dispatched.residual, probs_N = to_experts(packed_RP, exchange, prob_dtype, dispatched.notes)
        return self._norm(dispatched.residual), exchange.plan.tokens_per_expert, probs_N

    def combine(self, rows_NH: torch.Tensor, dispatched: Dispatched | MovingSamples) -> torch.Tensor:
        """The sums of the outputs of each token's experts and its residual, on the rank where its sample goes.

        Args:
            rows_NH: [N, H], partial where experts are cut over expert-TP.

        Returns:
            [S * B, H]; without a residual handed over, each row back where it came from.
        """
        if isinstance(dispatched, Dispatched):
            return super().combine(rows_NH, dispatched)
        moving, groups = dispatched, self.groups
        notes, tokens = moving.notes, moving.notes.new_zeros(moving.notes.shape, dtype=torch.float32)
        if groups.etp_rank == 0:  # what all shards have must be in the sum over them once
            rows_NH = torch.addcmul(rows_NH, moving.residual, (notes & 1).to(rows_NH.dtype).unsqueeze(1))
            tokens = (notes >> 1).float()
        carried = None if moving.beside is None else moving.counts.parts
        if carried is not None:
            lengths = carried[groups.ep_rank].sum(1).tolist()
            rows_NH, tokens = _append(rows_NH, tokens, moving.beside, lengths, groups.etp_rank)
        moving.residual = moving.beside = None
        start = time.perf_counter()
        decision = moving.decision.result()
        exposed = time.perf_counter() - start
        holders = self.placement.holders
        if moving.learn:
            beside = 0 if carried is None else moving.shape[0]
            if self._counted is not None:
                self._counted.result()  # raises what the last count raised
            self._counted = background(self._traffic.add, decision, holders, beside, moving.row_bytes, exposed)
        items = torch.from_numpy(holders.items(decision.move))
        way = SampleReturn(moving.counts.rows, items, groups, moving.shape, carried, rows_NH.device)
        return to_new_homes(rows_NH, tokens, way)

    def unpermute(self, rows_RH: torch.Tensor, dispatched: Dispatched | MovingSamples) -> torch.Tensor:
        """[S * B, H], of samples that were moved as it is."""
        return super().unpermute(rows_RH, dispatched) if isinstance(dispatched, Dispatched) else rows_RH


def _check_tokens_have_rows(offsets: torch.Tensor) -> None:
    """A token without an expert would lose its residual. Raises ValueError; on CUDA an assertion on the device."""
    all_have = (offsets.diff() > 0).all()
    if has_streams(offsets.device):
        torch._assert_async(all_have, "netmoe: a token without an expert")
    elif not all_have:
        raise ValueError("the router gives a token no expert, and its residual no way: use monta")


def _check_masked_alike(counts: SampleCounts, groups: ExpertGroups) -> None:
    """Raises ConfigurationError, on all ranks, where the attention mask of one of them must not change its samples."""
    if counts.unlike.any():
        rank = global_rank(groups.joint, int(counts.unlike.flatten().nonzero()[0]))
        raise ConfigurationError(
            "--moe-token-dispatcher-type netmoe moves samples between ranks, so that all must have the same causal "
            f"attention mask, but rank {rank} has another: drop --reset-attention-mask, or use monta"
        )


def _append(
    rows: torch.Tensor, tokens: torch.Tensor, beside: torch.Tensor, lengths: list[int], etp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the rows of the identity expert: of all expert-TP ranks, sample by sample; zeros but for this rank's own.

    Args:
        beside: [S, B, H].
        lengths: [etp_size] rows of each expert-TP rank.
    """
    sequence, batch, hidden = beside.shape
    own = beside.transpose(0, 1).reshape(-1, hidden)
    numbers = torch.arange(sequence, dtype=torch.float32, device=rows.device).repeat(batch)
    before, after = sum(lengths[:etp_rank]), sum(lengths[etp_rank + 1 :])
    zeros = [own.new_zeros(count, hidden) for count in (before, after)]
    no_tokens = [numbers.new_zeros(count) for count in (before, after)]
    return torch.cat([rows, zeros[0], own, zeros[1]]), torch.cat([tokens, no_tokens[0], numbers, no_tokens[1]])
