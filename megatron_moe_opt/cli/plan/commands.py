"""`moe-opt plan`: the options, and the settings that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import DType, Recompute, byte_budget, finite, whole_numbers
from megatron_moe_opt.option_values import MOST

_LAYOUT, _STEP, _LAYER, _OUTPUT = "Layout", "Step", "MoE layers", "What is shown"
"""Headings under which --help lists the options."""
MOST_GPUS = 500_000
"""GPUs that are planned: the node of each is listed. One layout of so many takes 6 seconds of processor time."""


def plan(
    *,
    cluster: Annotated[
        str,
        typer.Option(
            help="A known one (docs/planning.md lists them), or cluster.json of moe-opt profile. Numbers behind it "
            "replace its own, as in pcie,op_us=5: tflops, efficiency and memory (GiB) of a GPU, op_us of an op, and of "
            "a known one GB/s inter, intra and copy."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A known one, sizes, or both, as in mixtral-8x7b,layers=16: layers, hidden, heads, vocabulary, "
            "experts, topk, ffn (of an expert), kv_heads, head_size, shared_ffn, dense_layers, dense_ffn; gated=no and "
            "the like."
        ),
    ],
    world: Annotated[
        int | None, typer.Option(min=1, max=MOST_GPUS, help="GPUs.", show_default="the file's")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor parallelism.", show_default="the file's, or 1", rich_help_panel=_LAYOUT),
    ] = None,
    cp: Annotated[
        int | None,
        typer.Option(min=1, help="Context parallelism.", show_default="the file's, or 1", rich_help_panel=_LAYOUT),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, help="Pipeline parallelism.", show_default="1", rich_help_panel=_LAYOUT)
    ] = None,
    vpp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Virtual pipeline stages of a GPU: parts of the model that are interleaved.", show_default="1",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(min=1, help="Expert parallelism.", show_default="the file's, or 1", rich_help_panel=_LAYOUT),
    ] = None,
    expert_tp: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tensor parallelism inside an expert.", show_default="the file's, or 1",
            rich_help_panel=_LAYOUT,
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(help="Tokens are split over TP; else all TP ranks hold the same ones.", rich_help_panel=_LAYOUT),
    ] = True,
    sequence: Annotated[
        str,
        typer.Option(
            help="Tokens of a sequence; several, separated by commas, for a table of choices.", rich_help_panel=_STEP
        ),
    ] = "4096",
    micro_batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Sequences of a micro-batch.", show_default="searched, or 1", rich_help_panel=_STEP
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Micro-batches of a step on each data-parallel rank.",
            show_default="1; 4 x --pp in a pipeline or under 1F1B overlap", rich_help_panel=_STEP,
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Sequences of a step, where the layout is searched.",
            show_default="4 Mi tokens of them", rich_help_panel=_STEP,
        ),
    ] = None,
    recompute: Annotated[
        Recompute | None,
        typer.Option(
            help="Activations that backward makes again.", show_default="searched, or none", rich_help_panel=_STEP
        ),
    ] = None,
    overlap_moe_expert_parallel_comm: Annotated[
        bool | None,
        typer.Option(
            help="A micro-batch's exchanges run beside another's computation (Megatron's 1F1B overlap).",
            show_default="searched, or not", rich_help_panel=_STEP,
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Elements of tokens and weights.", rich_help_panel=_STEP)] = DType.bf16,
    capacity_factor: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1e6, callback=finite, help="Every expert gets its capacity.", show_default="dropless",
            rich_help_panel=_LAYER,
        ),
    ] = None,
    imbalance: Annotated[
        float,
        typer.Option(
            min=1.0, max=1e6, callback=finite, help="Rows of the busiest rank over the mean.", rich_help_panel=_LAYER
        ),
    ] = 1.0,
    placement_saving: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, callback=finite, rich_help_panel=_LAYER,
            help="Part of the bytes between nodes that netmoe saves, as moe-opt trace replay says.",
        ),
    ] = None,
    activation_budget: Annotated[
        int | None,
        typer.Option(
            parser=byte_budget, metavar="BYTES", help="What activations of a MoE layer may take, such as 512MiB.",
            show_default="no limit", rich_help_panel=_LAYER,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan, for --moe-opt-plan.", rich_help_panel=_OUTPUT),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also what the times are made of.", rich_help_panel=_OUTPUT)
    ] = False,
    all_candidates: Annotated[
        bool, typer.Option("--all", help="Every candidate, not the fastest alone.", rich_help_panel=_OUTPUT)
    ] = False,
    lanes: Annotated[
        list[Path] | None,
        typer.Option(
            help="Draw the planned lanes: .png, .svg or .pdf; .json opens in ui.perfetto.dev. Repeatable.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(
            help="The candidates that --lanes shows, such as alltoall,monta:O3x4.", show_default="the chosen",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Predict what every dispatcher would take for a model on a cluster that need not be at hand, and advise.

    Of a known cluster without --tp, --pp, --vpp, --ep and --expert-tp the fastest layout that fits is searched.

    moe-opt plan --cluster h100-ib400 --model mixtral-8x7b --world 64 -o plan.json
    """
    from megatron_moe_opt.cli.plan.layout_search import wanted_of
    from megatron_moe_opt.cli.plan.named_sizes import read_named
    from megatron_moe_opt.cli.plan.report import Drawing, PlanSettings, report_plan
    from megatron_moe_opt.cli.plan.settings import CLUSTER_NUMBERS, MODEL_SIZES
    from megatron_moe_opt.planning.costs.known_clusters import KNOWN_CLUSTERS
    from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS

    site = read_named("--cluster", cluster, KNOWN_CLUSTERS, CLUSTER_NUMBERS)
    wanted = wanted_of(
        site.name or cluster,
        {"--tp": tp, "--pp": pp, "--vpp": vpp, "--ep": ep, "--expert-tp": expert_tp, "--micro-batches": micro_batches,
         "--no-sequence-parallel": None if sequence_parallel else ""},
        global_batch, micro_batch, recompute and recompute.value, overlap_moe_expert_parallel_comm,
    )  # fmt: skip
    overlaps = bool(overlap_moe_expert_parallel_comm)
    settings = PlanSettings(
        cluster=site.name or cluster, cluster_numbers=site.given,
        model=read_named("--model", model, KNOWN_MODELS, MODEL_SIZES),
        sizes={"--world": world, "--tp": tp, "--cp": cp, "--pp": pp, "--ep": ep, "--expert-tp": expert_tp,
               "--vpp": vpp},
        sequence_parallel=sequence_parallel, sequences=tuple(whole_numbers("--sequence", sequence)),
        micro_batch=micro_batch or 1, micro_batches=micro_batches or _micro_batches(pp or 1, overlaps),
        recompute=(recompute or Recompute.none).value, overlaps=overlaps, dtype=dtype.value,
        capacity_factor=capacity_factor, imbalance=imbalance, placement_saving=placement_saving,
        activation_budget=activation_budget,
    )  # fmt: skip
    report_plan(
        settings,
        wanted,
        explain,
        all_candidates,
        output,
        Drawing(tuple(draw.split(",")) if draw else (), tuple(lanes or ())),
    )


def _micro_batches(pp: int, overlaps: bool) -> int:
    """Returns the micro-batches of a step where nobody says how many: one that none overlaps and no other stage waits
    for has no use for others; a pipeline is filled, so that its memory is what it is in training, and its bubble 20 %
    at most.
    """
    return 4 * pp if pp > 1 or overlaps else 1
