"""`moe-opt bench`: the options of the benchmarks, which import what they run when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.option_types import Device, DType, byte_budget, finite, whole_numbers
from megatron_moe_opt.errors import ConfigurationError

app = typer.Typer(help="Benchmarks, each against stock Megatron-Core in the same run.", no_args_is_help=True)


@app.command()
def layer(
    dispatchers: Annotated[
        str,
        typer.Option(
            help="Dispatchers to compare, separated by commas; alltoall always runs (with --replicated: deepspeed). "
            "monta:O3x8 is level O3 with 8 chunks, parm:S2 schedule S2, mpmoe:4:S3 4 partitions that share memory by "
            "strategy S3, expert-migration:2x1 its domain sizes, flex:hybridep Megatron's flex over that package; "
            "auto, monta:auto and the like choose by --profile."
        ),
    ] = "monta,deepspeed",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 1024,
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Hidden size inside an expert.")] = 1024,
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 8,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism; above 1 with sequence parallelism.")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="ranks / expert-tp")] = None,
    expert_tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism inside an expert.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens and weights.")] = DType.fp32,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf, one-hot-expert, or trace:FILE (a routing trace, or an array)."),
    ] = "uniform",
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Drop what exceeds this capacity.", show_default="dropless"),
    ] = None,
    pad_to_capacity: Annotated[bool, typer.Option(help="Pad every expert to its capacity.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and routing.")] = 1,
    dispatch_only: Annotated[
        bool, typer.Option(help="Dispatch and combine alone, without router and experts.")
    ] = False,
    replicated: Annotated[
        bool, typer.Option(help="All TP ranks hold the same tokens: TP without sequence parallelism.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="cluster.json of moe-opt profile, for monta:auto and the like, and --report's predictions."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything, every round's time too.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html: all of it with charts, and the ops of one more step, as a page."),
    ] = None,
) -> None:
    """Forward + backward of one Megatron-Core MoE layer under each dispatcher.

    Runs on the ranks that torchrun started, or on one process without it:
    torchrun --nproc-per-node 4 -m megatron_moe_opt.cli.main bench layer --hidden 1024
    """
    from megatron_moe_opt.cli.bench.layer import LayerSettings, bench_layer

    settings = LayerSettings(
        dispatchers=tuple(name.strip() for name in dispatchers.split(",")), tokens=tokens, hidden=hidden,
        ffn_hidden=ffn_hidden, experts=experts, topk=topk, tp=tp, ep=ep, expert_tp=expert_tp, dtype=dtype.value,
        routing=routing, capacity_factor=capacity_factor, pad_to_capacity=pad_to_capacity, steps=steps, warmup=warmup,
        seed=seed, profile=profile, dispatch_only=dispatch_only, replicated=replicated,
    )  # fmt: skip
    bench_layer(settings, json, report)


@app.command()
def kernels(
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.cpu,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 4096,
    experts: Annotated[int, typer.Option(min=1, help="Experts.")] = 64,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 8,
    elements: Annotated[int, typer.Option(min=1, help="Elements of the residual codec's expert.")] = 8 * 2**20,
    keep_one_in: Annotated[int, typer.Option(min=1, help="Elements of the expert for each one that is kept.")] = 50,
    dtypes: Annotated[str, typer.Option(help="Of fp32, bf16 and fp16, separated by commas.")] = "fp32,bf16",
    repeats: Annotated[int, typer.Option(min=2, help="Timed repetitions of each operation.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of rows and routing.")] = 1234,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file too.")] = None,
) -> None:
    """Permute and unpermute against Megatron-Core's unfused ones, the residual codec against PyTorch's operations, both
    against plain copies; placing samples against scipy and PyTorch, at fixed sizes. In one process.
    """
    from megatron_moe_opt.cli.bench.kernels import bench_kernels

    bench_kernels(device, tokens, hidden, experts, topk, elements, keep_one_in, dtypes, repeats, seed, json)


@app.command()
def samples(
    trace: Annotated[Path, typer.Argument(help="A routing trace, recorded or from moe-opt generate-routing.")],
    dispatchers: Annotated[
        str, typer.Option(help="Dispatchers to compare, separated by commas; alltoall always runs.")
    ] = "netmoe",
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 768,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each sample; the first ones.", show_default="all")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.fp32,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them; netmoe learns in them.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write everything, every round's time too.")] = None,
) -> None:
    """Dispatch and combine of all MoE layers of a routing trace, one after another, forward and backward.

    The trace's samples are dealt out to the ranks in their order. Experts return what they get, there is no attention.
    """
    from megatron_moe_opt.cli.bench.samples import SampleSettings, bench_samples

    names = tuple(name.strip() for name in dispatchers.split(","))
    bench_samples(SampleSettings(trace, names, hidden, tokens, dtype.value, steps, warmup), json)


@app.command()
def choice(
    profile: Annotated[Path, typer.Option(help="cluster.json of moe-opt profile, of the same groups.")],
    tokens: Annotated[str, typer.Option(help="Tokens of each rank, one point each, separated by commas.")] = "256,1024",
    chunks: Annotated[
        str | None,
        typer.Option(help="Chunk counts at O2 and O3, or partitions.", show_default="2,4,8,16; 1 to 8 with --mpmoe"),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 1024,
    ffn_hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size inside an expert; with --mpmoe or --auto.", show_default="--hidden"),
    ] = None,
    experts: Annotated[int, typer.Option(min=1, help="Experts of the layer.")] = 8,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism; above 1 with sequence parallelism.")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.", show_default="ranks / expert-tp")] = None,
    expert_tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism inside an expert.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.fp32,
    routing: Annotated[str, typer.Option(help="As in bench layer.")] = "uniform",
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Pad every expert to this capacity; with --replicated."),
    ] = None,
    replicated: Annotated[
        bool, typer.Option(help="parm's choice, on tokens that all TP ranks hold, in a whole MoE layer.")
    ] = False,
    mpmoe: Annotated[
        bool, typer.Option(help="mpmoe's choice of partitions and memory reuse, in a whole MoE layer.")
    ] = False,
    auto: Annotated[bool, typer.Option(help="auto's choice among all systems, in a whole MoE layer.")] = False,
    reuse: Annotated[
        str, typer.Option(help="Memory reuse: none, one of S1 to S4, or auto to choose from all; with --mpmoe.")
    ] = "none",
    activation_budget: Annotated[
        int | None,
        typer.Option(
            parser=byte_budget,
            metavar="BYTES",
            help="What activations may take of a choice, such as 512MiB; with --mpmoe.",
            show_default="no limit",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of inputs and routing.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write everything.")] = None,
) -> None:
    """How much slower a choice is than the fastest of all: monta's of level and chunks, parm's of its schedule, mpmoe's
    of partitions and memory reuse, by the profile; auto's of all of these, planned and after its trials.
    """
    from megatron_moe_opt.cli.bench.choice import bench_choice
    from megatron_moe_opt.cli.bench.choosers import chooser_of
    from megatron_moe_opt.cli.layer.settings import LayerSettings

    sizes, counts = whole_numbers("--tokens", tokens), None if chunks is None else whole_numbers("--chunks", chunks)
    systems = [flag for flag, given in {"--replicated": replicated, "--mpmoe": mpmoe, "--auto": auto}.items() if given]
    if len(systems) > 1:
        raise ConfigurationError(f"{' and '.join(systems)} are choices of different systems: give one of them")
    chooser = chooser_of(systems[0] if systems else None, counts, reuse, activation_budget)
    settings = LayerSettings(
        dispatchers=(), tokens=sizes[0], hidden=hidden,
        ffn_hidden=(ffn_hidden or hidden) if mpmoe or auto else expert_tp, experts=experts, topk=topk, tp=tp, ep=ep,
        expert_tp=expert_tp, dtype=dtype.value, routing=routing, capacity_factor=capacity_factor,
        pad_to_capacity=capacity_factor is not None, steps=steps, warmup=warmup, seed=seed, profile=profile,
        replicated=replicated,
    )  # fmt: skip
    bench_choice(settings, sizes, chooser, json)
