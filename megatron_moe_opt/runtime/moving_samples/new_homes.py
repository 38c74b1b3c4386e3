"""Where the tokens of samples that move arrive, and the keys by which ranks on the way there know whose a row is.

A key is a token's place among those of all ranks, in the order in which rows of a dispatch from its new rank would
arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels.streams import to_device
from megatron_moe_opt.runtime.hops.hop_plan import HopPlan
from megatron_moe_opt.runtime.hops.token_hops import TokenHops
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts


@dataclass(frozen=True)
class Along:
    """Rows that go along with a chunk from where its tokens are now."""

    own: torch.Tensor
    """The numbers of this rank's tokens that go along, int64."""
    keys: torch.Tensor
    """The keys of these tokens, int64."""
    others: torch.Tensor
    """The keys of the tokens of the other ranks of expert-TP, int64: in the sums over it, all have the same rows."""


class NewHomes:
    """The new rank of each token of each rank, and the order in which tokens arrive there: by the rank of expert-TP
    first.

    Ranks are those of the joint group.
    """

    def __init__(self, hops: TokenHops, counts: SampleCounts, items: torch.Tensor, device: torch.device) -> None:
        """
        Args:
            items: see SampleHolders.items.
        """
        self._hops, self._counts, self._items, self._device = hops, counts, items, device
        ep_size, etp_size, batch = counts.parts.shape
        self._room = max(int(counts.parts.sum(2).max()), 1)
        self._space = ep_size * etp_size * self._room
        place = (hops.tables.arrival_order.unsqueeze(1) + torch.arange(etp_size) * ep_size).flatten()
        move = torch.stack([place[items // batch], items % batch]).view(2, -1, batch)
        self._place, self._move = to_device(place, device), to_device(move, device)

    def plans(self, num_chunks: int, with_beside: bool) -> tuple[HopPlan, ...]:
        """Returns the plans of a dispatch from there, chunk by chunk.

        Args:
            with_beside: each token has a row on its rank, too.
        """
        tables, parts = self._hops.tables, self._counts.parts
        counts = self._counts.rows.unflatten(3, (num_chunks, -1))  # [ep, etp, B, chunk, count]
        if with_beside:
            counts = counts.clone()
            ends = parts.unsqueeze(3) * torch.arange(num_chunks + 1) // num_chunks
            for level, first in zip(tables.levels, tables.columns, strict=False):
                counts[torch.arange(len(counts)), ..., first + tables.region(level)] = ends.diff(dim=3)
        moved = torch.empty_like(counts.flatten(0, 2))
        moved[self._items] = counts.flatten(0, 2)
        return self._hops.plan(moved.view_as(counts))

    def along(self, chunk: int, num_chunks: int) -> Along:
        """Returns the tokens of a chunk of this rank, and of the others of expert-TP."""
        experts, keys = self._hops.experts, []
        for shard, parts in enumerate(self._counts.parts[experts.ep_rank]):
            samples, sequence = int((parts > 0).sum()), int(parts.max())
            bounds = (sequence * end // num_chunks * samples for end in (chunk, chunk + 1))
            numbers = torch.arange(*bounds, device=self._device)
            if shard == experts.etp_rank:
                own = numbers
            keys.append(self.keys(torch.full_like(numbers, experts.ep_rank * experts.etp_size + shard), numbers))
        of_own = keys.pop(experts.etp_rank)
        return Along(own, of_own, torch.cat([of_own[:0], *keys]))

    def keys(self, ranks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the keys of tokens, int64 [R], by the rank on which they were, and their number there."""
        if not self._counts.equal:  # all stay
            return self._place[ranks] * self._room + numbers
        batch = self._move.size(2)
        place, slot = self._move[:, ranks, numbers % batch]
        return place * self._room + numbers // batch * batch + slot

    def tokens(self, keys: torch.Tensor) -> torch.Tensor:
        """Returns the number that each key's token has at home."""
        return keys % self._room

    def in_order(self, keys: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the place of each of `keys` among the `number` different ones, and these, ascending."""
        seen = torch.zeros(self._space, dtype=torch.bool, device=keys.device)
        seen.scatter_(0, keys, True)  # seen[keys] = True would copy True to the device, and wait
        places = (seen.cumsum(0) - 1)[keys]
        distinct = keys.new_empty(number)
        distinct[places] = keys
        return places, distinct
