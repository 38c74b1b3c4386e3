"""The tensors behind the buffer names of MPMoE's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.row_layout import Layout
from megatron_moe_opt.schedules.partition_rows import Move, place_of
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Schedule


class PartitionBuffers:
    """Finds a buffer's tensor: the one that was given for it, or one made at first use, large
    enough for each partition that uses it.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        layouts: Mapping[Move, Layout],
        given: Mapping[str, torch.Tensor],
        schedule: Schedule,
    ) -> None:
        """
        Args:
            exchanges: of each partition.
            layouts: of rows on their way.
            given: buffers that exist already, each of one partition.
            schedule: of the ops that use the buffers.
        """
        self._exchanges, self._layouts, self._given = exchanges, layouts, given
        self._users, self._chunks = schedule.chunks_of, range(exchanges[0].way.stages.chunks)
        self._like = next(iter(given.values()))
        self._counts: dict[str, list[tuple[int, ...]]] = {}
        """The rows in a buffer of each chunk of each partition, by the buffer's name. Only of `parts` are they those of
        the chunk alone.
        """
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
            counts = [one.way.num_rows(of_way, one.plan, number) for one in self._exchanges for number in self._chunks]
            self._counts[base] = list(zip(*[iter(counts)] * len(self._chunks), strict=True))  # as many to a partition
        of_partitions = self._counts[base]
        if whole not in self._made:
            layout = self._layouts[move]
            layout = layout.at_experts if of_way == "sorted" else layout
            most = max(map(max, map(of_partitions.__getitem__, self._users[name])))
            self._made[whole] = layout.blank_rows(most, self._like)
        return self._made[whole].narrow(0, 0, of_partitions[j][chunk])
