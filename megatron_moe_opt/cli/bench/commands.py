"""`moe-opt bench`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.layer_options import Ep, Experts, ExpertTp, FfnHidden, Hidden, Tokens, TopK, Tp
from megatron_moe_opt.cli.option_types import DType, finite


def bench(
    dispatchers: Annotated[
        str,
        typer.Option(
            help="Dispatchers to compare, separated by commas; alltoall always runs (with --replicated: deepspeed). "
            "monta:O3x8 is level O3 with 8 chunks, parm:S2 schedule S2, mpmoe:4:S3 4 partitions that share memory by "
            "strategy S3, expert-migration:2x1 experts that travel in domains 2x1, expert-migration:1x1:c4 tokens that "
            "hop in 4 chunks, mpmoe:4:hops:2x1 4 partitions whose tokens hop, with experts travelling in domains 2x1, "
            "flex:hybridep Megatron's flex over that package; auto, monta:auto and the like choose by --profile."
        ),
    ] = "monta,deepspeed",
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    ffn_hidden: FfnHidden = 1024,
    experts: Experts = 8,
    topk: TopK = 2,
    shared_ffn_hidden: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Hidden size inside the shared experts, which overlap (--moe-shared-expert-overlap).",
            show_default="no shared experts",
        ),
    ] = None,
    tp: Tp = 1,
    ep: Ep = None,
    expert_tp: ExpertTp = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens and weights.")] = DType.bf16,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf, one-hot-expert, or trace:FILE (a routing trace, or an array)."),
    ] = "uniform",
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="Drop what exceeds this capacity.", show_default="dropless"),
    ] = None,
    pad_to_capacity: Annotated[
        bool, typer.Option("--pad-to-capacity", help="Pad every expert to its capacity.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them.")] = 3,
    seed: Annotated[int, typer.Option(max=2**31 - 1, help="Seed of weights, inputs and routing.")] = 1,
    dispatch_only: Annotated[
        bool, typer.Option("--dispatch-only", help="Dispatch and combine alone, without router and experts.")
    ] = False,
    replicated: Annotated[
        bool, typer.Option("--replicated", help="All TP ranks hold the same tokens: TP without sequence parallelism.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="cluster.json of moe-opt profile, for monta:auto and the like, and for predictions in the file of -o."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write everything as JSON, with the ops of the median of three more steps: moe-opt report draws it.",
        ),
    ] = None,
) -> None:
    """Forward + backward of one Megatron-Core MoE layer under each dispatcher.

    Runs on the ranks that torchrun started, or on one process without it:
    torchrun --nproc-per-node 4 -m megatron_moe_opt.cli.main bench --hidden 1024
    """
    from megatron_moe_opt.cli.bench.run import LayerSettings, bench_layer

    settings = LayerSettings(
        dispatchers=tuple(name.strip() for name in dispatchers.split(",")), tokens=tokens, hidden=hidden,
        ffn_hidden=ffn_hidden, experts=experts, topk=topk, shared_ffn_hidden=shared_ffn_hidden, tp=tp, ep=ep,
        expert_tp=expert_tp, dtype=dtype.value, routing=routing, capacity_factor=capacity_factor,
        pad_to_capacity=pad_to_capacity, steps=steps, warmup=warmup, seed=seed, profile=profile,
        dispatch_only=dispatch_only, replicated=replicated,
    )  # fmt: skip
    bench_layer(settings, output)
