"""What travels behind a token that several experts share: the probability of each, and which experts they are.

A row on the wire is [payload | K probabilities | K expert numbers (int32)], K experts of a token at most, the
lane behind the payload a multiple of LANE_BYTES. A token with fewer experts has the number E, "no expert", in
the other places. On the way back through the hops, the gradients of the K probabilities travel alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.row_format import WireFormat
from megatron_moe_opt.runtime.rows.row_layout import Layout, Payload


@dataclass(frozen=True)
class RowFacts:
    """The layouts of what travels behind the tokens of a layer: the facts."""

    payload: Payload
    topk: int
    prob_dtype: torch.dtype
    has_notes: bool = False
    """Whether an int64 is behind these on the way to the experts, whatever it says of the token."""

    @property
    def prob_bytes(self) -> int:
        """Returns the bytes that the K probabilities of a token take in its row."""
        return self.topk * self.prob_dtype.itemsize

    @property
    def first_note(self) -> int:
        """Returns the bytes of a lane before the note."""
        return self.prob_bytes + self.topk * torch.int32.itemsize

    def outbound(self, has_facts: bool = True) -> FactLayout:
        """Returns the layout of rows to the experts: tokens with their facts, or gradients of outputs without any."""
        lane = self.first_note + 8 * self.has_notes
        return FactLayout(self, self.payload.wire.dispatch, lane * has_facts)

    def homebound(self, has_probs: bool) -> FactLayout:
        """Returns the layout of rows back: sums of outputs, or of gradients with those of probabilities."""
        return FactLayout(self, self.payload.wire.combine, self.prob_bytes * has_probs)


class FactLayout(Layout):
    """A row with its facts, with a part of them or with none."""

    def __init__(self, facts: RowFacts, wire: WireFormat, num_bytes: int) -> None:
        """
        Args:
            num_bytes: of the facts that it has.
        """
        lane = -(-num_bytes // LANE_BYTES) * LANE_BYTES
        super().__init__(facts.payload, wire, lane, (facts.topk, facts.prob_dtype) if num_bytes else None)
        self.facts, self.num_bytes = facts, num_bytes

    @property
    def has_probs(self) -> bool:
        """Says whether the rows have any facts."""
        return self.num_bytes > 0

    @property
    def at_source(self) -> FactLayout:
        """Returns what Layout says: the last sum of a token has its dtype."""
        return FactLayout(self.facts, WireFormat.SAME, self.num_bytes)

    def pack(
        self, tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, notes: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Packs tokens [T, H], probs [T, K], experts int32 [T, K] and, if any, notes int64 [T] into rows [T, width]."""
        rows = self.empty_rows(tokens.size(0), tokens)
        self.write(tokens, rows)
        self.write_facts(rows, probs, experts, notes)
        return rows

    def write_facts(
        self,
        rows: torch.Tensor,
        probs: torch.Tensor,
        experts: torch.Tensor | None = None,
        notes: torch.Tensor | None = None,
    ) -> None:
        """Writes probs [R, K] and, if given, experts int32 [R, K] and notes int64 [R] to the lanes of rows."""
        facts = self.facts
        first = facts.prob_bytes
        self.of_lane(rows, 0, first).copy_(probs.contiguous().view(torch.uint8))
        self.of_lane(rows, first, self.row_bytes).zero_()
        if experts is not None:
            self.of_lane(rows, first, facts.first_note - first).copy_(experts.contiguous().view(torch.uint8))
        if notes is not None:
            self.of_lane(rows, facts.first_note, 8).copy_(notes.view(torch.uint8).view(-1, 8))

    def take(self, layout: FactLayout, rows: torch.Tensor, written: torch.Tensor) -> None:
        """Copies rows of another layout, which has the same facts, to `written` of this one."""
        self.write(layout.tokens(rows), written)
        if self.has_probs:
            self.write_facts(written, layout.probs(rows))

    def probs(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the probabilities of rows: [R, width] -> [R, K]."""
        return self.numbers_of_lane(rows, 0, self.facts.prob_bytes, self.facts.prob_dtype)

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Reads the experts, int64 [R, K], from rows [R, width] on the way to the experts."""
        first = self.facts.prob_bytes
        return self.numbers_of_lane(rows, first, self.facts.first_note - first, torch.int32).long()

    def notes(self, rows: torch.Tensor) -> torch.Tensor:
        """Reads the notes, int64 [R], from rows [R, width] on the way to the experts."""
        return self.numbers_of_lane(rows, self.facts.first_note, 8, torch.int64).view(-1)


def experts_of_tokens(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns the experts of each token, int64 [T, K], ascending, and E, "no expert", in the places that remain.

    Args:
        routing_map: bool [T, E]. Of a token with more experts it returns the first K: see overfull_tokens.
    """
    num_experts = routing_map.size(1)
    falling = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    return num_experts - (routing_map * falling).topk(topk).values.long()


def overfull_tokens(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """Returns how many tokens of a routing map, bool [T, E], have more than K experts: int64 [1]. All ranks are told
    beside the counts, so that the host, which waits for these anyway, can refuse them (`check_overfull`).
    """
    return (routing_map.sum(1) > topk).sum().view(1)


def check_overfull(of_ranks: torch.Tensor, topk: int) -> None:
    """Raises ConfigurationError, on all ranks, where a token of one of them has more experts than a row has room for.

    Args:
        of_ranks: what overfull_tokens returned on each rank, on the CPU.
    """
    if of_ranks.any():
        raise ConfigurationError(
            f"the routing gave {int(of_ranks.sum())} tokens more experts than --moe-router-topk {topk}, which a token "
            "that hops takes along: raise it to the most of any token, or use monta, which sends a row for each expert"
        )
