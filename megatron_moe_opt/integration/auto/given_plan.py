"""The plan.json that `auto` is given: held against the model and the run, and run by the layers from the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moe_opt import __version__
from megatron_moe_opt.dispatchers.say import say_once, say_other_settings
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto.first_step import refusal
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.layer.configured_workload import moe_layers, type_of_rows
from megatron_moe_opt.integration.layer.layer_passes import number_of
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass, overlaps_batches
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.plan_file import Plan, facts_of_plan
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.row_format import SAME
from megatron_moe_opt.systems import moves_samples, system_names, system_of
from megatron_moe_opt.systems.system import PREFIX
from megatron_moe_opt.topology.agreement import found_by_first
from megatron_moe_opt.variants import split_variant


class GivenPlan:
    """The plan in a file. All ranks go by what the first one reads: other nodes may not have the file."""

    def __init__(self, file: Path, config: Any) -> None:
        """Reads the plan; before there are process groups, on rank 0 alone, to refuse it now.

        Args:
            config: Megatron's TransformerConfig.
        """
        self._file, self._config = file, config
        self.plan: Plan | None = None
        """None: this rank does not know it yet."""
        self._is_agreed = False
        if dist.is_initialized():
            self._agree(dist.group.WORLD)
        elif os.environ.get("RANK", "0") == "0":
            self.plan = read_plan(self._file, self._config)

    def run_in(self, layer: PlannedLayer) -> None:
        """Has a layer that has just been built run as planned from the start. A collective call over its groups.

        Raises:
            ConfigurationError: samples would move through some layers only.
        """
        if not self._is_agreed:
            self._agree(layer.groups.joint)
        variants = set(self.plan.layers.values())
        if len(variants) == 1:
            layer.use(*variants)
        elif moving := [one for one in variants if moves_samples(one)]:
            raise ConfigurationError(
                f"{PREFIX}plan {self._file} has {moving[0]} in some layers only, but samples move through all "
                "of a stage: plan it for all, or for none"
            )
        else:

            def use_planned(*_: Any) -> None:  # at the first pass: a layer gets its number after it is built
                handle.remove()
                number = min(number_of(layer.layer), max(self.plan.layers))  # multi-token prediction: as the last one
                layer.use(self.plan.variant_of(number, self._file))

            handle = before_pass(layer.layer, use_planned)

    def _agree(self, group: dist.ProcessGroup) -> None:
        """Has all ranks of the group run what the first one reads."""
        self.plan, self._is_agreed = found_by_first(lambda: read_plan(self._file, self._config), group), True


def read_plan(file: Path, config: Any) -> Plan:
    """Returns the plan in a file, which this model can run. Says on rank 0 what it was not made for.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        ConfigurationError: it cannot be read, is for another model or another layout of its experts, or runs what this
            configuration cannot.
    """
    plan = Plan.load(file)
    made_for = facts_of_plan(
        hidden=config.hidden_size,
        ffn=config.moe_ffn_hidden_size,
        topk=config.moe_router_topk,
        dtype=type_of_rows(config),
        ranks=dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1")),
        tokens=_tokens(config),
        version=__version__,
        overlaps=overlaps_batches(config),
    )
    unlike = plan.check(
        file,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        experts=config.num_moe_experts,
        layers=moe_layers(config),
        made_for=made_for,
    )
    if unlike is not None:
        line = f"{file} was made for another run, and its predictions may not hold: {unlike}; make a new plan"
        say_once(AUTO, line, lambda: line)
    say_other_settings(AUTO, file, plan.gpu_settings)
    _check_variants(plan, file, config)
    return plan


def _check_variants(plan: Plan, file: Path, config: Any) -> None:
    """Refuses, as for a dispatcher that the user names, what is none, rounds rows, or cannot run here."""
    for variant in dict.fromkeys((*plan.layers.values(), *(one.variant for one in plan.candidates))):
        try:
            _, options = split_variant(variant, None)
        except ConfigurationError as error:
            raise ConfigurationError(f"{PREFIX}plan {file} has {variant}, which is no variant: {error}") from error
        if options.wire != SAME or options.compression:
            raise ConfigurationError(
                f"{PREFIX}plan {file} has {variant}, which rounds what travels, and {AUTO} trains "
                "like stock: name that dispatcher and its options in the place of the plan, or take it out"
            )
    for variant in dict.fromkeys(plan.layers.values()):
        if variant != ALLTOALL and system_of(variant) is None:
            names = ", ".join(system_names())
            raise ConfigurationError(f"{PREFIX}plan {file} runs {variant}, which is none of {ALLTOALL}, {names}")
        reason = refusal(config, variant)
        if reason is not None:
            raise ConfigurationError(f"{PREFIX}plan {file} runs {variant}: {reason}")


def _tokens(config: Any) -> int | None:
    """Returns the tokens of a micro-batch that a rank enters a MoE layer with, by Megatron-LM's command line; None: it
    does not say, or sequences differ in length.
    """
    arguments = training_arguments()
    sizes = [getattr(arguments, name, None) for name in ("micro_batch_size", "seq_length")]
    if None in sizes or config.variable_seq_lengths:
        return None
    micro_batch, sequence = sizes
    split = 1 if holds_replicated_tokens(config) else config.tensor_model_parallel_size
    return micro_batch * sequence // (config.context_parallel_size * split)
