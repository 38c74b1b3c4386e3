"""Rows of samples that move, one for each of a token's experts: to the experts, and to the samples' new ranks.

The residual is in the rows: these are tokens before normalisation, and that of a token's first expert returns with it.
Where it is apart, as on a wire that rounds rows, these are normalised tokens, as under all dispatchers; the residual
moves by itself, in its dtype (sample_exchange.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_moe_opt.kernels import (
    build_row_map_by_sample,
    count_routing_map,
    empty,
    write_notes,
)
from megatron_moe_opt.kernels.streams import require
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts
from megatron_moe_opt.runtime.moving_samples.sample_exchange import SampleReturn, to_new_homes
from megatron_moe_opt.runtime.rows.exchange_plan import ExchangePlan, plan_exchange
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, to_experts
from megatron_moe_opt.runtime.rows.own_rows import OwnRows, permuted
from megatron_moe_opt.runtime.rows.ways import Way, way_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class MovingRows(Protocol):
    """What travels of this rank's samples in one forward pass. Its steps are taken in turn."""

    counts: torch.Tensor
    """What all ranks have to know of each sample, int64 [B, columns]."""
    overfull: torch.Tensor | None
    """How many tokens have more experts than one that hops takes along, int64 [1]; None: none does hop."""

    def pack(self, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Makes of this rank's tokens [T, H], before normalisation where rows have the residual in them, and
        probabilities [T, E] what is sent.
        """

    def row_bytes(self) -> tuple[int, int]:
        """Returns what a row is on its way in dispatch, and in combine, once it is packed."""

    def to_experts(
        self, packed: torch.Tensor, counts: SampleCounts, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens at their experts [N, H], rows per local expert (CPU) and probabilities [N]."""

    def to_new_homes(
        self, rows: torch.Tensor, counts: SampleCounts, items: torch.Tensor, beside: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the sums of the outputs of each token's experts, of its residual where rows have it in them, and of
        `beside`, [S * B, H].

        Args:
            rows: [N, H] expert outputs, partial where experts are cut over expert-TP.
            items: see SampleHolders.items; where samples go.
            beside: [S, B, H] of the samples that were here, to go along.
        """


class RowsByExpert(MovingRows):
    """Moves a row for each expert of a token, in the ways of MoNTA's levels."""

    def __init__(
        self, routing_map: torch.Tensor, shape: tuple[int, int], num_rows: int | None, groups: ExpertGroups,
        pipeline: tuple[str, int], wire: Wire = SAME, apart: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            routing_map: bool [S * B, E].
            shape: tokens of a sample on this rank, and its samples.
            num_rows: number of routed pairs where it is known without asking the device.
            pipeline: level and number of chunks.
            wire: how rows travel.
            apart: the residual is not in them.
        """
        self._groups, self._shape, (self._level, self._num_chunks) = groups, shape, pipeline
        self._wire, self._apart = wire, apart
        self.row_map = build_row_map_by_sample(routing_map, shape[1], num_rows)
        self.counts, self.overfull = count_routing_map(routing_map, shape[1]), None
        self._residual = self._notes = None
        self._own: OwnRows | None = None

    def pack(self, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """See MovingRows. A note is twice the token's number in its sample, and 1 more on the residual's way back."""
        by_expert, rows = self.row_map, self.row_map.cut(self._num_chunks)
        check_tokens_have_rows(rows.offsets.diff() > 0)
        packed, self._own = permuted(tokens, probs, rows, self._wire)
        notes = torch.empty_like(by_expert.sources, dtype=torch.int32)
        notes[rows.rows] = (by_expert.sources[by_expert.rows] // self._shape[1] * 2).int()
        notes[rows.rows[rows.offsets[:-1]]] += 1
        write_notes(self._own.wire.rows, notes)
        return packed

    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes of a packed row in dispatch, and in combine."""
        way, prob_dtype = self._way(), self._own.source.prob_dtype
        return way.outbound(prob_dtype).row_bytes, way.homebound(torch.float32).row_bytes

    def to_experts(
        self, packed: torch.Tensor, counts: SampleCounts, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens at their experts [N, H], rows per local expert (CPU) and probabilities [N]."""
        groups = self._groups
        of_ranks = counts.rows.sum(2)
        plan = plan_exchange(of_ranks, groups.ep_rank, groups.etp_rank, self._num_chunks, packed.device)
        self._notes = empty((plan.num_gathered,), torch.int32, packed.device)
        tokens, probs = to_experts(packed, self._own.wire, Exchange(self._way(), plan), prob_dtype, self._notes)
        self._residual = None if self._apart else tokens
        return tokens, plan.tokens_per_expert, probs

    def to_new_homes(
        self, rows: torch.Tensor, counts: SampleCounts, items: torch.Tensor, beside: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the sums of each token's outputs, at the new home of its sample."""
        notes, tokens, groups = self._notes, self._notes.new_zeros(self._notes.shape, dtype=torch.float32), self._groups
        if groups.etp_rank == 0:  # what all shards have must be in the sum over them once
            if self._residual is not None:
                rows = torch.addcmul(rows, self._residual, (notes & 1).to(rows.dtype).unsqueeze(1))
            tokens = (notes >> 1).float()
        self._residual = None
        carried = None if beside is None else counts.parts
        if carried is not None:
            lengths = carried[groups.ep_rank].sum(1).tolist()
            rows, tokens = _append(rows, tokens, beside, lengths, groups.etp_rank)
        back = SampleReturn(counts.rows, items, self._way(), self._num_chunks, self._shape, carried, rows.device)
        return to_new_homes(rows, tokens, back)

    def _way(self) -> Way[ExchangePlan]:
        return way_of(self._groups, self._level, self._own.source.payload)


def check_tokens_have_rows(has: torch.Tensor) -> None:
    """Refuses tokens without an expert, which would lose their residual: raises ValueError; on CUDA an assertion on the
    device.

    Args:
        has: bool [T].
    """
    require(has.all(), "the router gives a token no expert, and its residual no way: use monta")


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
