"""`moe-opt plan`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import DType, Recompute, byte_budget, finite, whole_numbers


def plan(
    *,
    cluster: Annotated[
        str,
        typer.Option(help="Name of a known cluster (docs/planning.md lists them), or cluster.json of moe-opt profile."),
    ],
    model: Annotated[
        str | None, typer.Option(help="Name of a known model; sizes that are given besides replace its own.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.")] = None,
    ffn_hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size inside an expert.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of a layer.")] = None,
    topk: Annotated[int | None, typer.Option(min=1, help="Experts of a token.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Padded size of the vocabulary.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads.", show_default="--heads")] = None,
    head_size: Annotated[int | None, typer.Option(min=1, help="Of a head.", show_default="--hidden / --heads")] = None,
    shared_ffn: Annotated[
        int | None, typer.Option(min=0, help="Hidden size inside the shared experts together.", show_default="0")
    ] = None,
    dense_layers: Annotated[
        int | None, typer.Option(min=0, help="Leading layers without experts.", show_default="0")
    ] = None,
    dense_ffn: Annotated[int | None, typer.Option(min=0, help="Hidden size inside their MLP.", show_default="0")
    ] = None,
    gated: Annotated[
        bool | None, typer.Option("--gated/--no-gated", help="Experts with SwiGLU or the like.", show_default="gated")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="GPUs.", show_default="the file's")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism.", show_default="the file's, or 1")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context parallelism.", show_default="the file's, or 1")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline parallelism.", show_default="1")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="the file's, or 1")] = None,
    expert_tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor parallelism inside an expert.", show_default="the file's, or 1")
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Tokens are split over TP; else all TP ranks hold the same ones.")
    ] = True,
    sequence: Annotated[
        str, typer.Option(help="Tokens of a sequence; several, separated by commas, for a table of choices.")
    ] = "4096",
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a micro-batch.", show_default="searched, or 1")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Of a step and data-parallel rank.", show_default="1")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences of a step, where the layout is searched.", show_default="4 Mi tokens of them"
        ),
    ] = None,
    recompute: Annotated[
        Recompute | None, typer.Option(help="Activations that backward makes again.", show_default="searched, or none")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Elements of tokens and weights.")] = DType.bf16,
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="Every expert gets its capacity.", show_default="dropless"),
    ] = None,
    imbalance: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Rows of the busiest rank over the mean.")
    ] = 1.0,
    placement_saving: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, callback=finite,
            help="Part of the bytes between nodes that netmoe saves, as moe-opt trace replay says.",
        ),
    ] = None,
    activation_budget: Annotated[
        int | None,
        typer.Option(
            parser=byte_budget, metavar="BYTES", help="What activations of a MoE layer may take, such as 512MiB.",
            show_default="no limit",
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            min=0.001, callback=finite, help="Of a GPU, dense, in the training dtype.",
            show_default="the known cluster's",
        ),
    ] = None,
    gemm_efficiency: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1.0, callback=finite,
            help="Part of the peak that the model's compute reaches.", show_default="the known cluster's",
        ),
    ] = None,
    op_microseconds: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="What every op takes besides.", show_default="the cluster's"),
    ] = None,
    inter_bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="GB/s that a GPU reaches between nodes, else the cluster's."),
    ] = None,
    intra_bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="GB/s that it reaches inside its node, such as over NVLink."),
    ] = None,
    copy_bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, callback=finite, help="GB/s of rows that it copies in its memory."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also what the times are made of.")] = False,
    all_candidates: Annotated[bool, typer.Option("--all", help="Every candidate, not the fastest alone.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan, for --moe-opt-plan.")] = None,
    lanes: Annotated[
        list[Path] | None,
        typer.Option(help="Draw the planned lanes: .png, .svg or .pdf; .json opens in ui.perfetto.dev. Repeatable."),
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(help="The candidates that --lanes shows, such as alltoall,monta:O3x4.", show_default="the chosen"),
    ] = None,
) -> None:  # fmt: skip
    """Predict what every dispatcher would take for a model on a cluster that need not be at hand, and advise.

    Of a known cluster without --tp, --pp, --ep and --expert-tp the fastest layout that fits is searched.

    moe-opt plan --cluster h100-ib400 --model mixtral-8x7b --world 64 -o plan.json
    """
    from megatron_moe_opt.cli.plan.layout_search import wanted_of
    from megatron_moe_opt.cli.plan.report import Drawing, PlanSettings, report_plan

    wanted = wanted_of(
        cluster,
        {"--tp": tp, "--pp": pp, "--ep": ep, "--expert-tp": expert_tp, "--micro-batches": micro_batches,
         "--no-sequence-parallel": None if sequence_parallel else ""},
        global_batch, micro_batch, recompute and recompute.value,
    )  # fmt: skip
    settings = PlanSettings(
        cluster=cluster,
        model=model,
        shape={
            "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "experts": experts,
            "topk": topk, "ffn": ffn_hidden, "kv_heads": kv_heads, "head_size": head_size, "shared_ffn": shared_ffn,
            "dense_layers": dense_layers, "dense_ffn": dense_ffn, "gated": gated,
        },
        sizes={"--world": world, "--tp": tp, "--cp": cp, "--pp": pp, "--ep": ep, "--expert-tp": expert_tp},
        sequence_parallel=sequence_parallel, sequences=tuple(whole_numbers("--sequence", sequence)),
        micro_batch=micro_batch or 1, micro_batches=micro_batches or 1,
        recompute=(recompute or Recompute.none).value, dtype=dtype.value, capacity_factor=capacity_factor,
        imbalance=imbalance, placement_saving=placement_saving, activation_budget=activation_budget,
        peak_tflops=peak_tflops, gemm_efficiency=gemm_efficiency, op_microseconds=op_microseconds,
        bandwidths={
            "--inter-bandwidth": inter_bandwidth, "--intra-bandwidth": intra_bandwidth,
            "--copy-bandwidth": copy_bandwidth,
        },
    )  # fmt: skip
    report_plan(
        settings,
        wanted,
        explain,
        all_candidates,
        output,
        Drawing(tuple(draw.split(",")) if draw else (), tuple(lanes or ())),
    )
