"""`moe-opt timeline`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import DType
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.monta import LEVELS
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES
from megatron_moe_opt.systems.monta import DEFAULT_CHUNKS
from megatron_moe_opt.systems.mpmoe import HOPS, ROWS


def timeline(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 1024,
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 8,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token, chosen uniformly.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism; above 1 with sequence parallelism.")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="ranks / expert-tp")] = None,
    expert_tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism inside an expert.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.bf16,
    level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")] = "O3",
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help="Chunks of the pipeline at O2 and O3.", show_default=str(DEFAULT_CHUNKS)),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="Of mpmoe: draws its pipeline through the experts instead.")
    ] = None,
    memory_reuse: Annotated[str, typer.Option(help=f"Of mpmoe: {', '.join(STRATEGIES)}.")] = NONE,
    way: Annotated[str, typer.Option(help=f"Of mpmoe: {ROWS}, or {HOPS}.")] = ROWS,
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Of mpmoe: hidden size inside an expert.")] = 1024,
    profile: Annotated[
        Path | None, typer.Option(help="cluster.json of moe-opt profile, of the same groups: draws the prediction too.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose timeline.", show_default="the rank whose step took longest")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the lanes for ui.perfetto.dev.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the lanes (.png, .svg or .pdf).")] = None,
) -> None:
    """When each op of dispatch and combine ran, forward and backward, and when it was predicted to run. With
    --partitions: each op of mpmoe's pipeline.

    Runs on the ranks that torchrun or srun started, or on one process without them:
    torchrun --nproc-per-node 8 -m megatron_moe_opt.cli.main timeline --expert-tp 4 --profile cluster.json --png a.png
    """
    if level not in LEVELS:
        raise ConfigurationError(f"--level {level} is unknown: choose one of {', '.join(LEVELS)}")
    if level == "O1" and chunks not in (None, 1):
        raise ConfigurationError(f"--chunks {chunks} has no meaning at --level O1, which does not cut: use O2 or O3")
    if memory_reuse not in STRATEGIES:
        raise ConfigurationError(f"--memory-reuse {memory_reuse} is unknown: choose one of {', '.join(STRATEGIES)}")
    if way not in (ROWS, HOPS):
        raise ConfigurationError(f"--way {way} is unknown: choose {ROWS} or {HOPS}")
    if partitions is None and way != ROWS:
        raise ConfigurationError(f"--way {way} is about mpmoe's partitions: give --partitions")
    if partitions is None and memory_reuse != NONE:
        raise ConfigurationError(f"--memory-reuse {memory_reuse} is about mpmoe's partitions: give --partitions")
    from megatron_moe_opt.cli.report.step_timelines import layer_timeline
    from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings

    variant = f"monta:{level}x{chunks or (1 if level == 'O1' else DEFAULT_CHUNKS)}"
    if partitions is not None:
        variant = ":".join(["mpmoe", str(partitions), memory_reuse, *([way] if way == HOPS else [])])
    settings = LayerSettings(
        dispatchers=(variant,), tokens=tokens, hidden=hidden,
        ffn_hidden=expert_tp if partitions is None else ffn_hidden, experts=experts, topk=topk, tp=tp, ep=ep,
        expert_tp=expert_tp, dtype=dtype.value, steps=5, warmup=3, profile=profile, dispatch_only=partitions is None,
    )  # fmt: skip
    layer_timeline(settings, rank, trace, png)
