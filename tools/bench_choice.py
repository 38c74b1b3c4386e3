"""How good choices are: what a profile, or trials, chose against all that there is to choose from, measured.

torchrun --nproc-per-node 8 -m tools.bench_choice --profile cluster.json --tp 4 --ep 2 --expert-tp 4 --tokens 256,1024
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType, byte_budget, finite, whole_numbers
from megatron_moe_opt.errors import ConfigurationError

app = typer.Typer(pretty_exceptions_enable=False)


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
    routing: Annotated[str, typer.Option(help="As in moe-opt bench.")] = "uniform",
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Pad every expert to this capacity; with --replicated."),
    ] = None,
    replicated: Annotated[
        bool,
        typer.Option("--replicated", help="parm's choice, on tokens that all TP ranks hold, in a whole MoE layer."),
    ] = False,
    mpmoe: Annotated[
        bool, typer.Option("--mpmoe", help="mpmoe's choice of partitions and memory reuse, in a whole MoE layer.")
    ] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="auto's choice among all systems, in a whole MoE layer.")
    ] = False,
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
    of partitions and memory reuse, by the model and by trials; auto's of all of these, planned and after its trials.
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


if __name__ == "__main__":
    main(app, "bench_choice")
