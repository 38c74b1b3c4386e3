"""The plan.json that `auto` is given, held against the model and the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_moe_opt import __version__
from megatron_moe_opt.dispatchers.say import say_once, say_other_settings
from megatron_moe_opt.integration.layer.configured_workload import moe_layers, type_of_rows
from megatron_moe_opt.integration.layer.overlapped_batches import overlaps_batches
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.plan_file import Plan, facts_of_plan


def read_plan(file: Path, config: Any) -> Plan:
    """Returns the plan in a file, which is one for this model. Says on rank 0 what else it was not made for.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        ConfigurationError: it cannot be read, or is for another model or another layout of its experts.
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
    return plan


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
