"""The tensors behind the buffer names of MPMoE's schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.row_layout import Layout
from megatron_moe_opt.schedules.mpmoe import Move, place_of
from megatron_moe_opt.schedules.pipeline import base_name


class PartitionBuffers:
    """Finds a buffer's tensor: the one that was given for it, or one made at first use, large
    enough for each partition that uses it.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        layouts: Mapping[Move, Layout],
        given: Mapping[str, torch.Tensor],
        users: Mapping[str, Collection[int]],
    ) -> None:
        """
        Args:
            exchanges: of each partition.
            layouts: of rows on their way.
            given: buffers that exist already, each of one partition.
            users: the partitions that use each buffer.
        """
        self._exchanges, self._layouts, self._given, self._users = exchanges, layouts, given, users
        self._like = next(iter(given.values()))
        self._counts: dict[str, list[list[int]]] = {}
        """The rows in a buffer, by its name, partition and the number of a chunk: of `parts`, those of the chunk."""
        self._made: dict[str, torch.Tensor] = {}
        self._rows: dict[tuple[str, int, int], torch.Tensor] = {}

    def rows(self, name: str, j: int, chunk: int = 0) -> torch.Tensor:
        """Returns partition j's rows in a buffer, for the op that moves this chunk of them."""
        if name in self._given:
            return self._given[name]
        if (name, j, chunk) not in self._rows:
            self._rows[name, j, chunk] = self._part(name, j, chunk)
        return self._rows[name, j, chunk]

    def _part(self, name: str, j: int, chunk: int) -> torch.Tensor:
        base, whole = base_name(name), name.partition("/")[0]
        move, of_way = place_of(base)
        if base not in self._counts:
            self._counts[base] = [
                [one.way.num_rows(of_way, one.plan, number) for number in range(one.way.stages.chunks)]
                for one in self._exchanges
            ]
        counts = self._counts[base]
        if whole not in self._made:
            layout = self._layouts[move]
            layout = layout.at_experts if of_way == "sorted" else layout
            most = max(max(counts[user]) for user in self._users[name])
            self._made[whole] = layout.blank_rows(most, self._like)
        return self._made[whole].narrow(0, 0, counts[j][chunk])
