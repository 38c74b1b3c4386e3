"""The tensors behind the buffer names of MPMoE's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_moe_opt.runtime.rows.exchange_plan import ExchangePlan
from megatron_moe_opt.runtime.rows.row_layout import RowLayout
from megatron_moe_opt.runtime.rows.ways import Way
from megatron_moe_opt.schedules.pipeline import base_name

_PACKED = frozenset({"arrived", "grad_unsorted", "grad_parts", "grad_summed"})
"""The buffers whose rows have their probabilities, or the gradients of these, with them."""


class PartitionBuffers:
    """A buffer is the tensor that was given for it, or one made at first use, large enough for every partition."""

    def __init__(
        self,
        way: Way,
        plans: Sequence[ExchangePlan],
        tokens: RowLayout,
        packed: RowLayout,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        """
        Args:
            given: buffers that exist already, each of one partition.
        """
        self._way, self._plans, self._tokens, self._packed, self._given = way, plans, tokens, packed, given
        self._like = next(iter(given.values()))
        self._counts: dict[str, list[int]] = {}
        """Rows of each partition in a buffer."""
        self._made: dict[str, torch.Tensor] = {}

    def rows(self, name: str, j: int) -> torch.Tensor:
        """Partition j's rows in a buffer."""
        if name in self._given:
            return self._given[name]
        base = base_name(name)
        if base not in self._counts:
            of_way = base.removeprefix("grad_")
            self._counts[base] = [self._way.num_rows(of_way, plan, 0) for plan in self._plans]
        counts = self._counts[base]
        if name not in self._made:
            layout = self._packed if base in _PACKED else self._tokens
            self._made[name] = layout.blank_rows(max(counts), self._like)
        return self._made[name].narrow(0, 0, counts[j])
