"""Tokens of samples that move, once over every link: hops to their experts, and back to the samples' new ranks.

    to_experts     copies -> all-to-all for each level, from where the samples are (hop_way.py)
    to_new_homes   all-to-all -> sums for each level, as if tokens had come from where the samples go

Where experts are cut, what has arrived is gathered over expert-TP; all shards then have the rows of the same tokens,
and each gets the sums of those whose samples go to ranks of its own all-to-alls.

A chunk is a stretch of the sequence of all samples: wherever a sample goes, its tokens stay in their chunks
(runtime/hops/hops_in_chunks.py).

A sample's counts are those of DomainTables.plan, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_moe_opt.runtime.hops.hop_way import Hops
from megatron_moe_opt.runtime.hops.hops_in_chunks import HopPlans, HopsInChunks
from megatron_moe_opt.runtime.hops.row_facts import RowFacts, experts_of_tokens, overfull_tokens
from megatron_moe_opt.runtime.hops.token_hops import TokenHops, TokensWithFacts
from megatron_moe_opt.runtime.moving_samples.back_to_new_homes import RANK_BITS, ChunkBack, KeyLayout
from megatron_moe_opt.runtime.moving_samples.new_homes import NewHomes
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts
from megatron_moe_opt.runtime.moving_samples.sample_rows import MovingRows, check_tokens_have_rows
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange, run_to_experts, run_to_sources, to_experts
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.own_rows import OwnRows
from megatron_moe_opt.runtime.rows.row_layout import Payload
from megatron_moe_opt.schedules.pipeline import even_parts


class HoppingSamples(MovingRows):
    """Moves one row a token over the levels of the network."""

    def __init__(
        self, hops: TokenHops, routing_map: torch.Tensor, shape: tuple[int, int], num_chunks: int, apart: bool = False
    ) -> None:
        """
        Args:
            routing_map: bool [S * B, E].
            shape: tokens of a sample on this rank, and its samples.
            apart: the residual is not in the rows.
        """
        self._hops, self._shape, self._num_chunks, self._apart = hops, shape, num_chunks, apart
        self._experts = experts_of_tokens(routing_map, hops.topk)
        self.overfull = overfull_tokens(routing_map, hops.topk)
        self._stretches = even_parts(shape[0], num_chunks)
        self.counts = hops.on_device(routing_map.device).count_samples(
            self._experts, routing_map, self._stretches, shape[1]
        )
        check_tokens_have_rows(self._experts[:, 0] < hops.num_experts)
        self._facts: RowFacts | None = None
        self._own: OwnRows | None = None
        self._chunks: Sequence[Hops] = []
        self._residual: torch.Tensor | None = None

    def pack(self, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Packs this rank's tokens [T, H] and their probabilities into rows."""
        self._facts = RowFacts(Payload.of(tokens, self._hops.wire), self._hops.topk, probs.dtype, has_notes=True)
        numbers = torch.arange(len(tokens), device=tokens.device)
        notes = numbers + (self._hops.experts.joint.rank() << RANK_BITS)
        self._own = OwnRows(TokensWithFacts(self._facts, self._experts, notes))
        return self._own.pack(tokens, self._hops.probs_of(probs, self._experts))

    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes of a packed row in dispatch, and in combine."""
        return self._facts.outbound().row_bytes, KeyLayout(self._facts.payload).row_bytes

    def to_experts(
        self, packed: torch.Tensor, counts: SampleCounts, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens at their experts [N, H], rows per local expert (CPU) and probabilities [N]."""
        plans = self._hops.plan(counts.rows.unflatten(3, (self._num_chunks, -1)))
        chunks = [stretch * self._shape[1] for stretch in self._stretches]
        exchange = self._hops.in_chunks(self._facts, chunks, plans, packed.device)
        self._chunks = exchange.way.chunks
        tokens, probs = to_experts(packed, self._own.wire, exchange, prob_dtype)
        self._residual = None if self._apart else tokens
        return tokens, exchange.plan.tokens_per_expert, probs

    def to_new_homes(
        self, rows: torch.Tensor, counts: SampleCounts, items: torch.Tensor, beside: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the sums of each token's outputs, at the new home of its sample."""
        number = len(rows)
        if self._residual is not None and self._hops.experts.etp_rank == 0:  # in the sum over all shards once
            first = torch.zeros(number, dtype=torch.bool, device=rows.device)
            for chunk in self._chunks:
                first[slice(None) if chunk.places is None else chunk.places] = chunk.pairs % self._hops.topk == 0
            rows = torch.addcmul(rows, self._residual, first.to(rows.dtype).unsqueeze(1))
        self._residual = None
        if beside is not None:
            rows = torch.cat([rows, beside.reshape(-1, rows.size(1))])
        homes = NewHomes(self._hops, counts, items, rows.device)
        plans = homes.plans(self._num_chunks, beside is not None)
        chunks, begin = [], 0
        for chunk, (out, plan) in enumerate(zip(self._chunks, plans, strict=True)):
            along = None if beside is None else homes.along(chunk, self._num_chunks)
            chunks.append(ChunkBack.of(out, plan, homes, begin, along, number))
            begin += out.num_tokens
        exchange, source = Exchange(HopsInChunks(chunks), HopPlans(plans, len(rows))), self._own.source
        return linear(
            rows,
            lambda rows: run_to_sources(rows.contiguous(), None, exchange),
            lambda grad: run_to_experts(source.spread(grad.contiguous()), exchange, None)[0],
        )
