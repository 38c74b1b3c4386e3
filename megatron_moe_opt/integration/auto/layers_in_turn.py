"""The layers of a rank under `auto`: which there are, what they run now, and what they hold of their GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.first_step import Alike, refusal, runs_first
from megatron_moe_opt.integration.auto.look import passes_held
from megatron_moe_opt.integration.auto.memory_room import Above
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.auto.stock_variants import (
    is_stock_variant,
    needs_as_many_tokens,
    release_buffers,
    stock_refusal,
)
from megatron_moe_opt.integration.layer.linked_blocks import link
from megatron_moe_opt.integration.layer.overlapped_batches import note_stock
from megatron_moe_opt.integration.micro_batches import later_micro_batches
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.domain_groups import release_domain_groups


class LayersInTurn(list[PlannedLayer]):
    """The layers, as they were built. Every rank of the world has such a list, if an empty one, and calls it alike."""

    def __init__(self, config: Any) -> None:
        """Begins without a layer.

        Args:
            config: Megatron's TransformerConfig, of the model that is planned for.
        """
        super().__init__()
        self._config = config

    @property
    def current(self) -> str | None:
        """Returns the variant that the layers of this rank run; None: this rank has no such layers."""
        return self[0].current if self else None

    def of(self, alike: Alike) -> list[PlannedLayer]:
        """Returns the layers of a shape."""
        return [layer for layer in self if alike.shape is None or layer.shape == alike.shape]

    def run(self, variant: str, layers: Sequence[PlannedLayer], beside: Iterable[str] = ()) -> None:
        """Has some of the layers run a variant, and forget all others but those beside it. A collective call.

        Args:
            beside: variants whose dispatchers are kept, for later turns.
        """
        for layer in layers:
            # Of a layer that has not run nobody knows whether all its passes have as many tokens.
            is_unknown = not layer.passes and needs_as_many_tokens(self._config, variant)
            cannot = is_unknown or self._is_refused(layer.layer.config, variant)
            layer.use(runs_first(layer.layer.config) if cannot else variant)
        if moves_samples(variant):
            link(layer.layer for layer in layers)
        self.note_stock()
        self._keep((variant, *beside), layers)

    def note_stock(self) -> None:
        """Notes for each configuration whether all of its layers run stock's `alltoall`."""
        for config in {id(one.layer.config): one.layer.config for one in self}.values():
            note_stock(config, all(one.current == ALLTOALL for one in self if one.layer.config is config))

    def held(self, shapes: Iterable[Alike], of_layer: Callable[[Alike, PlannedLayer], Above]) -> int:
        """Returns the bytes that all layers of this rank hold in a step together, of what each holds."""
        later = later_micro_batches()
        return sum(
            of_layer(one, layer).of(passes_held(layer, self._config, later), layers=1)
            for one in shapes
            for layer in self.of(one)
        )

    def can_be_looked_at(self, shapes: Iterable[Alike], chosen: Mapping[LayerWorkload | None, str]) -> bool:
        """Whether all GPUs have room for what runs in a step that is looked at, which may hold more than what was
        chosen. A collective call over the world.

        Args:
            chosen: what the layers run, by their shape.
        """
        later = later_micro_batches()
        room = memory_room.room(sum(passes_held(layer, self._config, later) for layer in self), len(self))
        above = self.held(shapes, lambda one, _: one.above(one.ran, chosen[one.shape]))
        return all(known_to_all(room is None or above <= room.spare))

    def _is_refused(self, config: Any, variant: str) -> bool:
        """Whether a layer of another configuration, of a second model, cannot run what is tried in all."""
        why_not = stock_refusal if is_stock_variant(variant) else refusal
        return config is not self._config and why_not(config, variant) is not None

    def _keep(self, variants: Iterable[str], layers: Sequence[PlannedLayer]) -> None:
        """Forgets the dispatchers of other variants, and has their process groups destroyed: a collective call."""
        forgotten = {layer: gone for layer in layers if (gone := layer.keep(variants))}
        for group in dict.fromkeys(layer.groups.ep for layer in forgotten):
            release_domain_groups(group)
        for variant in set().union(*forgotten.values()):
            if is_stock_variant(variant) and not any(layer.current == variant for layer in self):
                release_buffers(variant)
