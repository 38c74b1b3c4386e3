"""`moe-opt simulate`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import DType, finite


def simulate(
    cluster: Annotated[
        Path | None, typer.Argument(help="cluster.json of moe-opt profile; else give bandwidths.")
    ] = None,
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank in a MoE layer.")],
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")],
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Hidden size inside an expert.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of a layer.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with experts.")],
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")],
    vocabulary: Annotated[int, typer.Option(min=1, help="Padded size of the vocabulary.")],
    peak_tflops: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Of a GPU, dense, in the training dtype.")
    ],
    gemm_efficiency: Annotated[
        float,
        typer.Option(min=0.001, max=1.0, callback=finite, help="Part of the peak that the model's compute reaches."),
    ],
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads.", show_default="--heads")] = None,
    gated: Annotated[bool, typer.Option(help="Experts with SwiGLU or the like.")] = True,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="one sequence a micro-batch")
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step and data-parallel rank.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Elements of the rows.")] = DType.bf16,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism.", show_default="the file's, or 1")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context parallelism.", show_default="the file's, or 1")] = None,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism.")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="the file's, or 1")] = None,
    expert_tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor parallelism inside an expert.", show_default="the file's, or 1")
    ] = None,
    inter_bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="GB/s of a GPU in its EP group, such as its link between nodes."),
    ] = None,
    intra_bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="GB/s of a GPU in its expert-TP group, such as NVLink."),
    ] = None,
    copy_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, callback=finite, help="GB/s of rows copied on the device.")
    ] = None,
    bandwidth_efficiency: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1.0, callback=finite, help="Part of these bandwidths that is reached.", show_default="1"
        ),
    ] = None,
    op_microseconds: Annotated[
        float | None, typer.Option(min=0.0, callback=finite, help="What every op takes besides.", show_default="0")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the chosen timeline for ui.perfetto.dev.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the chosen timeline (.png, .svg or .pdf).")] = None,
) -> None:
    """Predict the time of monta's levels and chunk counts, the choice among them, and tokens/s and MFU of a step.

    With a cluster.json also that of parm's schedules, and of mpmoe's partitions and memory reuse.

    moe-opt simulate cluster.json --tokens 4096 --hidden 4096 --ffn-hidden 14336 --experts 8 --topk 2 --layers 32
    --heads 32 --vocabulary 32000 --peak-tflops 312 --gemm-efficiency 0.5
    """
    from megatron_moe_opt.cli.plan.simulate_step import StepSettings, simulate_step
    from megatron_moe_opt.planning.model import ModelShape
    from megatron_moe_opt.planning.throughput import Device

    settings = StepSettings(
        cluster=cluster,
        model=ModelShape(layers, hidden, heads, vocabulary, experts, topk, ffn_hidden, kv_heads, gated=gated),
        device=Device(peak_tflops * 1e12, gemm_efficiency),
        tokens=tokens,
        sequence=sequence,
        micro_batches=micro_batches,
        element_bytes={DType.fp32: 4, DType.bf16: 2}[dtype],
        sizes={"--tp": tp, "--cp": cp, "--pp": pp, "--ep": ep, "--expert-tp": expert_tp},
        bandwidths={
            "--inter-bandwidth": inter_bandwidth,
            "--intra-bandwidth": intra_bandwidth,
            "--copy-bandwidth": copy_bandwidth,
            "--bandwidth-efficiency": bandwidth_efficiency,
            "--op-microseconds": op_microseconds,
        },
    )
    simulate_step(settings, trace, png)
