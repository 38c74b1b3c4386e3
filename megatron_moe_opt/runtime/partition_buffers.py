"""The tensors behind the buffer names of MPMoE's schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_moe_opt.runtime.exchange_plan import ExchangePlan
from megatron_moe_opt.runtime.row_layout import RowLayout
from megatron_moe_opt.runtime.row_steps import num_parts
from megatron_moe_opt.schedules.mpmoe import PARTS, base_name
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class _Shape:
    """What a buffer holds."""

    packed: bool
    """Rows with their probabilities."""
    gathered: bool = True
    """Of all expert-TP peers."""


_SHAPES = {
    "arrived": _Shape(packed=True),
    "tokens": _Shape(packed=False),
    "unsorted": _Shape(packed=False),
    "summed": _Shape(packed=False, gathered=False),
    "grad_arrived": _Shape(packed=False),
    "grad_output": _Shape(packed=False),
    "grad_unsorted": _Shape(packed=True),
    "grad_summed": _Shape(packed=True, gathered=False),
}


class PartitionBuffers:
    """A buffer is the tensor that was given for it, or one made at first use, large enough for every partition."""

    def __init__(self, plans: Sequence[ExchangePlan], tokens: RowLayout, packed: RowLayout, like: torch.Tensor) -> None:
        self._plans, self._layouts, self._like = plans, {False: tokens, True: packed}, like
        self._counts = {
            True: [sum(plan.chunks[0].gather_counts) for plan in plans],
            False: [sum(plan.chunks[0].receive_counts) for plan in plans],
        }
        """Rows of each partition, by _Shape.gathered."""
        self._given: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}

    def give(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Buffers that exist already, each of one partition."""
        self._given.update(tensors)

    def rows(self, name: str, j: int) -> torch.Tensor:
        """Partition j's rows in a buffer."""
        if name in self._given:
            return self._given[name]
        shape = _SHAPES[base_name(name)]
        counts = self._counts[shape.gathered]
        if name not in self._made:
            self._made[name] = self._layouts[shape.packed].blank_rows(max(counts), self._like)
        return self._made[name].narrow(0, 0, counts[j])

    def parts(self, layout: RowLayout, groups: ExpertGroups) -> torch.Tensor:
        """What the reduce-scatters of such rows bring, schedules.mpmoe.PARTS; one follows the other."""
        name = f"{PARTS} {layout.width}"
        if name not in self._made:
            num_rows = max(num_parts(plan.chunks[0], groups) for plan in self._plans)
            self._made[name] = layout.empty_rows(num_rows, self._like)
        return self._made[name]
