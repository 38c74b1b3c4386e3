"""A MoE layer under `auto`: dispatchers take turns in it, and it says what it has to do in a pass."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.experts_look import ExpertsLook
from megatron_moe_opt.integration.auto.first_step import Seen
from megatron_moe_opt.integration.auto.stock_variants import is_stock_variant, needs_as_many_tokens, stock_dispatcher
from megatron_moe_opt.integration.layer.configured_workload import layer_workload
from megatron_moe_opt.integration.layer.experts_of_owners import stays_behind
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot, own_method
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass
from megatron_moe_opt.integration.layer.routed_by import routed_by
from megatron_moe_opt.integration.micro_batches import trains
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.topology.domain_groups import leave_domain_groups, levels_of
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.variants import split_variant

Plug = Callable[[Any, str, Options], None]
"""Puts the dispatcher of a name, with these options, into a MoE layer."""


class PlannedLayer:
    """A MoE layer, and the dispatchers that it has had."""

    def __init__(self, layer: Any, groups: ExpertGroups, options: Options, plug: Plug) -> None:
        self.layer, self.groups, self.options = layer, groups, options
        self.passes = self.rows = self.tokens = self.fewest = 0
        """What the layer did in the last step that was looked at: its forward passes in training, the rows that they
        computed here together, and the most and the fewest tokens that one of them had.
        """
        self._is_looking = False
        self.lies_unlike = False
        """Whether other expert-parallel groups of the world lie on nodes in another way than the layer's."""
        self._experts = ExpertsLook(layer.experts)
        self.current = ALLTOALL
        self._plug = plug
        self._stock = copy.copy(layer.token_dispatcher)
        """Megatron's dispatcher as it was built, when it held nothing of a pass."""
        self._built: dict[str, tuple[Any, Any]] = {ALLTOALL: (layer.token_dispatcher, None)}
        before_pass(layer, self._see_tokens)
        layer.experts.register_forward_pre_hook(self._see_rows)

    def use(self, variant: str) -> None:
        """Has the next passes run under this variant. A collective call over the layer's groups at its first use."""
        layer = self.layer
        if variant not in self._built:
            self._built.setdefault(ALLTOALL, (copy.copy(self._stock), None))
            self._restore(ALLTOALL)
            if variant == ALLTOALL:
                return
            if is_stock_variant(variant):
                self.layer.token_dispatcher = stock_dispatcher(layer, variant)
                self._built[variant] = layer.token_dispatcher, None
                self._restore(variant)
                return
            name, options = split_variant(variant, None)
            ours = self.options
            common = {"network_levels": ours.network_levels, "prefetch_layers": ours.prefetch_layers}
            if options.experts_may_travel:
                common["resident_layers"] = ours.resident_layers
            self._plug(layer, name, dataclasses.replace(options, **common))
            self._built[variant] = layer.token_dispatcher, LayerSeam(layer).get(LayerSlot.EXPERTS)
        self._restore(variant)

    def keep(self, variants: Iterable[str]) -> set[str]:
        """Forgets the dispatchers of other variants, and what they hold; the one in use stays.

        Returns:
            What is forgotten.
        """
        gone = set(self._built) - {self.current, *variants}
        for variant in gone:
            dispatcher, _ = self._built.pop(variant)
            leave_domain_groups(getattr(dispatcher, "dispatcher", dispatcher))  # stock's has none of ours
        return gone

    def look(self) -> None:
        """Counts from here on, until it says what was seen."""
        self._is_looking, self.passes, self.rows, self.tokens, self.fewest = True, 0, 0, 0, 0
        self._experts.again()

    def seen(self) -> Seen | None:
        """Returns what the layer did since it was looked at; None: no pass. It counts no more."""
        self._is_looking = False
        if not self.passes:
            return None
        experts = dataclasses.replace(
            self._experts.seen(self.groups.joint),
            called_by=own_method(self.layer, LayerSlot.EXPERTS.value),
            stays_behind=stays_behind(self.layer.experts),
        )
        tokens, others = (self.fewest, self.tokens), routed_by(self.layer)
        return Seen(self.workload(), self.rows / self.passes, self.passes, tokens, experts, others)

    def workload(self) -> LayerWorkload:
        """Returns the workload of one micro-batch, routed evenly."""
        return layer_workload(self.layer.config, self.groups, self.workers(), self.options.resident_limit, self.tokens)

    @property
    def shape(self) -> LayerWorkload:
        """Returns what the layer's passes have in common, whatever their tokens: its workload with 0 tokens."""
        return dataclasses.replace(self.workload(), tokens=0)

    def workers(self) -> tuple[int, ...]:
        """Returns those of each network level; none where nodes make no levels, or others in groups that may hold the
        same experts, so that no expert migrates: all who hold them must be planned alike.

        Raises:
            ConfigurationError: --moe-opt-levels is not how the ranks lie.
        """
        if self.lies_unlike:
            return ()
        try:
            return levels_of(self.groups.ep, self.options.network_levels)
        except ConfigurationError:
            if self.options.network_levels is not None:
                raise
            return ()

    def _restore(self, variant: str) -> None:
        self.layer.token_dispatcher, compute = self._built[variant]
        LayerSeam(self.layer).put(LayerSlot.EXPERTS, compute)
        self.current = variant
        # With --cuda-graph-impl transformer_engine Megatron does not forget, from step to step, that a GEMM adds to a
        # weight's main_grad itself. Where experts travel none does, and their gradients would be passed over.
        for weight in self.layer.experts.parameters():
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False

    def _see_tokens(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        needs_as_many = needs_as_many_tokens(layer.config, self.current)
        if needs_as_many and inputs:
            # Passes of an evaluation may have other tokens on each rank; all ranks evaluate together.
            self.layer.token_dispatcher = self._built[self.current][0] if trains(layer) else copy.copy(self._stock)
        if not trains(layer) or not inputs or is_recomputing():
            return
        tokens = inputs[0].shape[:-1].numel()
        if self._is_looking:
            self.fewest = min(self.fewest, tokens) if self.passes else tokens
            self.passes += 1
            self.tokens = max(self.tokens, tokens)
            self._experts.before_pass()
        elif needs_as_many and tokens != self.tokens:
            raise ConfigurationError(
                f"--moe-token-dispatcher-type {AUTO} runs {self.current}, which takes as many tokens from each rank: "
                f"all passes had {self.tokens} when it was planned, and this one has {tokens}: name alltoall instead"
            )

    def _see_rows(self, experts: Any, inputs: tuple[Any, ...] | None) -> None:
        # Megatron's fused experts call hooks without inputs.
        if self._is_looking and inputs and trains(experts) and not is_recomputing():
            self.rows += inputs[0].size(0)
