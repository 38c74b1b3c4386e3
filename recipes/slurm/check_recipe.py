#!/usr/bin/env python3
"""Dry run of recipes, without a GPU and without a process besides: does the model fit its world?

    python recipes/slurm/check_recipe.py mixtral_8x7b --nodes 8 -- --global-batch-size 512
    python recipes/slurm/check_recipe.py --megatron-lm CHECKOUT recipes/slurm/models/*.sh

Builds the process groups of the world size and Megatron's configuration, under the dispatcher's own checks, and
estimates the memory of a GPU. With --megatron-lm, that checkout's own parser reads and validates the arguments and
makes the configuration. What follows `--` is added to the recipe's arguments, as the job adds it. Exits with 2, and one
sentence a recipe, where something does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from recipe import Flags, Recipe, read_recipe

import megatron_moe_opt
from megatron_moe_opt.cli.doctor import import_problem
from megatron_moe_opt.cli.plan.case import fits_part
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import split_options
from megatron_moe_opt.planning.costs.known_clusters import GIB
from megatron_moe_opt.planning.training.memory import (
    BF16,
    FP32,
    RECOMPUTED,
    BytesPerParameter,
    TellingStage,
    telling_stages,
)
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import OVERLAP
from megatron_moe_opt.topology.layouts import JOINT_ROLES, Layout
from megatron_moe_opt.versions import check_megatron

PROGRAM = "check_recipe"

# Arguments of Megatron-LM that set fields of other names in Megatron-Core's TransformerConfig.
_RENAMED = {
    "--num-experts": "num_moe_experts",
    "--norm-epsilon": "layernorm_epsilon",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
_GPU = (9, 0)  # compute capability that Megatron is told of, where the job's GPUs are not at hand
_LISTS = ("--recompute-modules",)
_ENGINE = "transformer_engine"
_SAVE_MEMORY = (
    "--cpu-offloading-num-layers", "--fine-grained-activation-offloading", "--fp8-format", "--fp8-param-gather",
    "--grad-reduce-in-bf16", "--moe-expert-capacity-factor", "--moe-opt-memory-reuse", "--use-megatron-fsdp",
    "--use-precision-aware-optimizer", "--use-torch-fsdp2",
)  # fmt: skip
"""Arguments that save memory, of which the estimate knows nothing."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a recipe makes of its world."""

    recipe: Recipe
    layout: Layout
    micro_batches: int
    """Micro-batches of a step and data-parallel rank."""
    stage: TellingStage | None
    """The stage whose ranks need most memory; None where its layers are not modelled."""
    warning: str = ""
    """Why the model may not fit all the same; empty where the estimate says that it does."""

    def lines(self) -> list[str]:
        """Returns the report as lines for a person."""
        one, recipe = self.layout, self.recipe
        nodes = len({rank // recipe.gpus_per_node for rank in one.first_group(*JOINT_ROLES)})
        lines = [
            f"{recipe.name}: {recipe.nodes} nodes x {recipe.gpus_per_node} GPUs = {one.world} ranks, "
            f"dispatcher {recipe.flags.values('--moe-token-dispatcher-type')[0]}",
            f"  TP {one.tp}, PP {one.pp}, CP {one.cp}, DP {one.dp}, {self.micro_batches} micro-batches a step",
            f"  EP {one.ep}, expert-TP {one.expert_tp}, expert-DP {one.expert_dp}: experts of a layer on "
            f"{len(one.first_group(*JOINT_ROLES))} ranks of {nodes} node{'s' * (nodes > 1)}",
        ]
        if self.stage is None:
            return [*lines, "  memory: not estimated (latent attention, or stages of unequal layers)"]
        memory = self.stage.memory
        states = memory.weights + memory.gradients + memory.optimizer
        return [
            *lines,
            f"  memory of a GPU: {states / GIB:.0f} GiB of weights, gradients and optimizer, "
            f"{memory.activations / GIB:.0f} of activations, {self.stage.logits / GIB:.0f} of logits, of "
            f"{recipe.gpu_memory} (words and buffers of libraries not counted)",
            *([f"  warning: {self.warning}"] if self.warning else []),
        ]


def check(recipe: Recipe, megatron_lm: Path | None = None) -> Report:
    """Builds the layout and the configuration of a recipe.

    Registers the recipe's `--moe-opt-*` options in this process (see megatron_moe_opt.register).

    Args:
        recipe: what to check.
        megatron_lm: a checkout whose parser and validation the arguments also go through. It must be the Megatron of
            this process: first on sys.path before anything imports Megatron.

    Raises:
        ConfigurationError: the first thing that does not fit, in one sentence.
    """
    layout = recipe.layout
    micro_batches = _check_batch(recipe.flags, layout)
    _check_stages(recipe.flags, layout)
    options, remaining = split_options(recipe.command_line)
    if importlib.util.find_spec(_ENGINE) is None:  # Megatron refuses it without this library, which the job has
        remaining = [word for word in remaining if word != "--moe-permute-fusion"]
    megatron_moe_opt.register(options, refuse_unread=True)
    try:
        config = _build_config(recipe, Flags(remaining)) if megatron_lm is None else _parse(recipe, remaining)
    except ConfigurationError:
        raise
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigurationError(f"Megatron refuses the configuration: {error}") from error
    selective = config.recompute_modules if config.recompute_granularity == "selective" else []
    stage = _fullest_stage(recipe, layout, micro_batches, selective)
    needed = 0 if stage is None else stage.total
    overlaps = OVERLAP in recipe.flags
    part = fits_part(overlaps)
    if needed <= part * recipe.gpu_memory * GIB:
        return Report(recipe, layout, micro_batches, stage)
    problem = (
        f"a rank of {layout.world} needs {needed / GIB:.0f} GiB, and a GPU has {recipe.gpu_memory} (gpu_memory), "
        f"of which {1 - part:.0%} are left for what is not counted"
    )
    savings = [flag for flag in _SAVE_MEMORY if flag in recipe.flags]
    savings += [f"--recompute-modules {module}" for module in selective if module not in RECOMPUTED]
    if savings:
        warning = f"{problem}, if {', '.join(savings)} saved nothing: whether it fits is not estimated"
        return Report(recipe, layout, micro_batches, stage, warning)
    less = f"or leave out {OVERLAP}" if overlaps else "or --recompute-granularity full"
    raise ConfigurationError(f"{problem}: take more nodes, more of --pipeline-model-parallel-size, {less}")


def _check_batch(flags: Flags, layout: Layout) -> int:
    batch, samples = flags.number("--global-batch-size"), flags.number("--micro-batch-size") * layout.dp
    if batch % samples:
        raise ConfigurationError(
            f"--global-batch-size {batch} is no multiple of {samples}, --micro-batch-size x DP {layout.dp}: choose one"
        )
    sequence = flags.number("--seq-length")
    if not layout.cuts(sequence):
        raise ConfigurationError(
            f"--seq-length {sequence} is cut by TP {layout.tp} and CP {layout.cp}: choose a multiple of "
            f"{layout.least_sequence}"
        )
    if flags.number("--max-position-embeddings") < sequence:
        raise ConfigurationError(f"--max-position-embeddings is less than --seq-length {sequence}: raise it")
    warmup, steps = (flags.number(flag, 0) for flag in ("--lr-warmup-iters", "--train-iters"))
    steps = flags.number("--lr-decay-iters", steps)
    if steps and warmup >= steps:
        raise ConfigurationError(
            f"--lr-warmup-iters {warmup} is not below the {steps} steps of the rate's schedule (--train-iters, "
            "or --lr-decay-iters): lower it"
        )
    return batch // samples


def _check_stages(flags: Flags, layout: Layout) -> None:
    layers, stages = flags.number("--num-layers"), layout.pp
    for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
        if flag in flags:
            layers, stages = layers - flags.number(flag), stages - 1
    laid = "--pipeline-model-parallel-layout" in flags  # Megatron checks it
    if not laid and (layers < stages or (layers % stages if stages else layers)):
        raise ConfigurationError(
            f"--pipeline-model-parallel-size {layout.pp} does not cut --num-layers {flags.number('--num-layers')}: "
            f"{layers} layers are left for {stages} stages; choose sizes that divide, or "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    ffn = flags.number("--moe-ffn-hidden-size", flags.number("--ffn-hidden-size"))
    if ffn % layout.expert_tp:
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {layout.expert_tp} does not divide the {ffn} of an expert: choose a divisor"
        )


def _parse(recipe: Recipe, arguments: list[str]) -> Any:
    """The configuration that the checkout's training script would train, from its own parser."""
    import torch
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    from megatron_moe_opt.integration.host import limits

    paths = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(recipe.vocabulary - 1)]
    paths += ["--save", "checkpoints", "--load", "checkpoints", "--ckpt-format", "torch_dist"]
    paths += ["--tensorboard-dir", "checkpoints/tensorboard"]
    if importlib.util.find_spec(_ENGINE) is None:
        paths += ["--no-rope-fusion"]  # which Megatron refuses where this library, that the job has, is not
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(recipe.layout.world)}
    sys.argv[1:] = [*arguments, *paths]
    try:
        args = parse_args()
    except SystemExit as error:
        raise ConfigurationError("Megatron-LM's parser does not know an argument; its own message is above") from error
    of_the_job = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: _GPU)
    with of_the_job, mock.patch.object(limits, "LIMITS", ()):  # what this machine cannot run, the job's GPUs can
        validate_args(args)
        return core_transformer_config_from_args(args)


def _build_config(recipe: Recipe, flags: Flags) -> Any:
    """Returns the configuration from the installed Megatron-Core alone, which has no parser."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if "--multi-latent-attention" in flags else TransformerConfig
    fields = {field.name for field in dataclasses.fields(config_class)}
    names = {flag: _RENAMED.get(flag, flag[2:].replace("-", "_")) for flag in flags}
    dtype = torch.bfloat16 if "--bf16" in flags else torch.float32
    settings = {name: _value(flag, flags.values(flag)) for flag, name in names.items() if name in fields}
    settings |= {
        "moe_layer_freq": [int(has_experts) for has_experts in recipe.moe_layers],
        "add_bias_linear": "--disable-bias-linear" not in flags,
        "gated_linear_unit": "--swiglu" in flags,
        "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion" not in flags,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "virtual_pipeline_model_parallel_size": recipe.layout.vpp if recipe.layout.vpp > 1 else None,
    }
    if "--swiglu" in flags:
        settings["activation_func"] = torch.nn.functional.silu
    if "--recompute-activations" in flags:
        settings["recompute_granularity"] = "selective"
    return config_class(**settings)


def _value(flag: str, values: list[str]) -> Any:
    if flag in _LISTS or len(values) > 1:
        return [_number(text) for text in values]
    return _number(values[0]) if values else True


def _number(text: str) -> Any:
    """Returns a number where the text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def model_shape(recipe: Recipe) -> ModelShape | None:
    """The model's sizes; None where it has latent attention."""
    flags = recipe.flags
    if "--multi-latent-attention" in flags:
        return None
    hidden, heads, ffn = map(flags.number, ("--hidden-size", "--num-attention-heads", "--ffn-hidden-size"))
    padding = flags.number("--make-vocab-size-divisible-by", 128) * recipe.layout.tp
    return ModelShape(
        layers=flags.number("--num-layers"),
        hidden=hidden,
        heads=heads,
        vocabulary=-(-recipe.vocabulary // padding) * padding,
        experts=flags.number("--num-experts"),
        topk=flags.number("--moe-router-topk"),
        ffn=flags.number("--moe-ffn-hidden-size", ffn),
        kv_heads=flags.number("--num-query-groups", heads),
        head_size=flags.number("--kv-channels", hidden // heads),
        shared_ffn=flags.number("--moe-shared-expert-intermediate-size", 0),
        dense_layers=recipe.moe_layers.index(True),
        dense_ffn=ffn,
        gated="--swiglu" in flags,
        norm_parameters=1 if flags.values("--normalization") == ["RMSNorm"] else 2,
        qk_norm="--qk-layernorm" in flags,
        tied="--untie-embeddings-and-output-weights" not in flags,
    )


def _fullest_stage(recipe: Recipe, layout: Layout, micro_batches: int, selective: Sequence[str]) -> TellingStage | None:
    """Returns the stage whose ranks need most memory; None where its layers are not modelled.

    Args:
        selective: modules that alone are recomputed.
    """
    flags, model = recipe.flags, model_shape(recipe)
    if model is None or model.layers % layout.chunks or "--pipeline-model-parallel-layout" in flags:
        return None
    batch = flags.number("--micro-batch-size"), flags.number("--seq-length")
    recompute = "full" if flags.values("--recompute-granularity") == ["full"] else "selective" if selective else "none"
    modules = [module for module in selective if module in RECOMPUTED]
    each = BytesPerParameter(BF16, FP32, 0 if "--optimizer-cpu-offload" in flags else 3 * FP32)
    stages = telling_stages(
        model, layout, *batch, micro_batches, recompute, each, overlaps=OVERLAP in flags, modules=modules
    )
    return max(stages, key=lambda stage: stage.total)


def _leave_out_engine() -> None:
    """Has Megatron see no Transformer Engine where that cannot be imported for want of a GPU and its driver, as on a
    login node: Megatron expects that it is not there, and not that it raises another error.
    """
    import torch

    is_here = importlib.util.find_spec(_ENGINE) is not None
    if is_here and not torch.cuda.is_available() and import_problem(f"{_ENGINE}.pytorch") is not None:
        sys.modules[_ENGINE] = None  # type: ignore[assignment]


def main(command_line: Sequence[str]) -> int:
    """Returns the exit status."""
    end = command_line.index("--") if "--" in command_line else len(command_line)
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name in recipes/slurm/models, or file")
    parser.add_argument("--nodes", type=int, help="instead of the recipe's")
    parser.add_argument("--megatron-lm", type=Path, help="checkout whose parser the arguments go through")
    args = parser.parse_args(command_line[:end])
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    if args.megatron_lm is not None:
        sys.path.insert(0, str(args.megatron_lm.resolve()))
    try:
        check_megatron()
    except ConfigurationError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    _leave_out_engine()
    megatron_moe_opt.use_host_backend()
    refused = False
    for model in args.models:
        try:
            recipe = read_recipe(model)
            added = tuple(command_line[end + 1 :])
            report = check(dataclasses.replace(recipe, nodes=args.nodes or recipe.nodes, added=added), args.megatron_lm)
        except ConfigurationError as error:
            print(f"{PROGRAM}: error: {model}: {error}", file=sys.stderr)
            refused = True
        else:
            print(*report.lines(), sep="\n")
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
