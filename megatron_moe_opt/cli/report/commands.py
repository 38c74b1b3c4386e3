"""`moe-opt timeline` and `moe-opt report`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.layer_options import Ep, Experts, ExpertTp, Hidden, Tokens, Tp
from megatron_moe_opt.cli.option_types import DType
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.systems import monta, mpmoe

MONTA, MPMOE = monta.MONTA.name, mpmoe.MPMOE.name


def timeline(
    *,
    output: Annotated[
        list[Path],
        typer.Option(
            "--output", "-o", help="Draw the lanes: .png, .svg or .pdf; .json opens in ui.perfetto.dev. Repeatable."
        ),
    ],
    dispatchers: Annotated[
        str,
        typer.Option(
            help=f"One, written as for moe-opt bench: {MONTA}:O3x4 is level O3 with 4 chunks; {MPMOE}:4:S3:hops draws "
            "mpmoe's pipeline through the experts instead."
        ),
    ] = f"{MONTA}:O3x{monta.DEFAULT_CHUNKS}",
    tokens: Tokens = 4096,
    hidden: Hidden = 1024,
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Hidden size inside an expert; mpmoe's.")] = 1024,
    experts: Experts = 8,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token, chosen uniformly.")] = 2,
    tp: Tp = 1,
    ep: Ep = None,
    expert_tp: ExpertTp = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.bf16,
    profile: Annotated[
        Path | None, typer.Option(help="cluster.json of moe-opt profile, of the same groups: draws the prediction too.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose timeline.", show_default="the rank whose step took longest")
    ] = None,
) -> None:
    """When each op of dispatch and combine ran, forward and backward, and when it was predicted to run. Of
    mpmoe: each op of its pipeline.

    Runs on the ranks that torchrun or srun started, or on one process without them:
    torchrun --nproc-per-node 8 -m megatron_moe_opt.cli.main timeline --expert-tp 4 --profile cluster.json -o a.png
    """
    name = dispatchers.partition(":")[0]
    if "," in dispatchers or name not in (MONTA, MPMOE):
        raise ConfigurationError(
            f"--dispatchers {dispatchers}: write one of {MONTA} or {MPMOE}, such as {MONTA}:O3x4 or {MPMOE}:4:S3"
        )
    from megatron_moe_opt.cli.report.step_timelines import layer_timeline
    from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings

    settings = LayerSettings(
        dispatchers=(dispatchers,), tokens=tokens, hidden=hidden,
        ffn_hidden=ffn_hidden if name == MPMOE else expert_tp, experts=experts, topk=topk, tp=tp, ep=ep,
        expert_tp=expert_tp, dtype=dtype.value, steps=5, warmup=3, profile=profile, dispatch_only=name == MONTA,
    )  # fmt: skip
    layer_timeline(settings, rank, output)


def report(
    measured: Annotated[Path, typer.Argument(help="A file of moe-opt bench -o.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, such as report.html.")],
) -> None:
    """One page with a verdict on each dispatcher, tables, charts and the ops of a step; it needs no other file.

    moe-opt report layer.json -o report.html
    """
    from megatron_moe_opt.cli.report.page import write_page

    write_page(measured, output)
