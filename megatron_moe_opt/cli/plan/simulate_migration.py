"""`moe-opt simulate-migration`: the options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import DType, finite, whole_numbers
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.expert_migration import Link


def simulate_migration(
    *,
    bandwidth: Annotated[
        str, typer.Option(help="GB/s of one GPU between data centres, separated by commas: a table and a line each.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each GPU in a MoE layer.")],
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")],
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Hidden size inside an expert.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")],
    peak_tflops: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Of a GPU, dense, in the training dtype.")
    ],
    gemm_efficiency: Annotated[
        float,
        typer.Option(min=0.001, max=1.0, callback=finite, help="Part of the peak that the model's compute reaches."),
    ],
    data_centres: Annotated[str, typer.Option(help="Numbers of data centres, separated by commas.")] = (
        "10,50,100,500,1000"
    ),
    latency: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Microseconds that each message between them adds.")
    ] = 0.0,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="WORKERS:GB/s:MICROSECONDS of a level inside a data centre, such as 8:400:5; the outermost first.",
            show_default="one GPU in each data centre",
        ),
    ] = None,
    experts_per_gpu: Annotated[int, typer.Option(min=1, help="Experts of a layer on each GPU.")] = 1,
    gated: Annotated[bool, typer.Option(help="Experts with SwiGLU or the like.")] = True,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="all tokens of a GPU")
    ] = None,
    dense_layers: Annotated[int, typer.Option(min=0, help="Layers without experts before each MoE layer.")] = 0,
    dtype: Annotated[DType, typer.Option(help="Tokens, weights and gradients that travel.")] = DType.bf16,
    compression_ratio: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Bytes of the experts over bytes that travel for them.")
    ] = 1.0,
    gradient_compression_ratio: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="The same of their gradients.")
    ] = 1.0,
    backward: Annotated[bool, typer.Option(help="Forward and backward pass; else forward alone, as in the paper.")] = (
        True
    ),
    domain: Annotated[int, typer.Option(min=1, help="The fixed domain size: data centres that share experts.")] = 2,
    p: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=finite, help="The fixed proportion that travels as tokens.")
    ] = 0.9,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw speed-ups, and traffic at the first number of data centres (.png, .svg or .pdf)."),
    ] = None,
) -> None:
    """Predict a MoE layer under expert parallelism and under expert migration, for up to thousands of data centres.

    moe-opt simulate-migration --bandwidth 0.125,1.25 --tokens 8192 --hidden 1024 --ffn-hidden 4096 --topk 4
    --peak-tflops 312 --gemm-efficiency 0.5 --level 8:200:5 --compression-ratio 25 --gradient-compression-ratio 25
    """
    from megatron_moe_opt.cli.plan.migration_report import MigrationSettings, report_migration

    settings = MigrationSettings(
        data_centres=tuple(whole_numbers("--data-centres", data_centres)),
        outer=tuple(Link(rate * 1e9, latency * 1e-6) for rate in _bandwidths(bandwidth)),
        inner=tuple(_level(text) for text in level or ()),
        tokens=tokens,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        topk=topk,
        experts_per_gpu=experts_per_gpu,
        gated=gated,
        sequence=sequence or tokens,
        dense_layers=dense_layers,
        element_bytes={DType.fp32: 4, DType.bf16: 2}[dtype],
        flops=peak_tflops * 1e12 * gemm_efficiency,
        compression_ratio=compression_ratio,
        gradient_compression_ratio=gradient_compression_ratio,
        backward=backward,
        domain=domain,
        p=p,
    )
    report_migration(settings, png)


def _bandwidths(text: str) -> list[float]:
    rates = [_number(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise ConfigurationError(
            f"--bandwidth {text}: write GB/s above 0 of a GPU, separated by commas, such as 0.125,1.25"
        )
    return rates


def _level(text: str) -> tuple[int, Link]:
    workers, *link = (_number(part) for part in text.split(":"))
    if len(link) != 2 or workers < 1 or workers != int(workers) or not (link[0] > 0 and link[1] >= 0):
        raise ConfigurationError(
            f"--level {text}: write workers, GB/s of a GPU and microseconds a message, such as 8:400:5"
        )
    return int(workers), Link(link[0] * 1e9, link[1] * 1e-6)


def _number(text: str) -> float:
    """A finite number; -1 for anything else."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0
