"""`moe-opt trace`: the options of what reads routing traces, and of what makes one up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Routing traces: which experts every token of a training run chose (trace record).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Nodes = Annotated[int, typer.Option(min=2, help="Nodes that the ranks of an expert-parallel group are on.")]
RanksPerNode = Annotated[int, typer.Option(min=1, help="Ranks of the group on each node.")]


@app.command(
    short_help="Run a training script, and write its routing.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def record(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT ARGS...", help="As behind megatron_moe_opt.launch.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")],
    steps: Annotated[
        str, typer.Option(help="Optimizer steps to record, FIRST-LAST, counted from 1 at the start of this run.")
    ] = "1-10",
) -> None:
    """Run a Megatron script, unmodified, and write which experts every token went to in some of its steps.

    torchrun ... -m megatron_moe_opt.cli.main trace record -o a.npz pretrain_gpt.py ARGS
    """
    from megatron_moe_opt.cli.trace.record import record_routing

    record_routing(script, output, steps)


@app.command(short_help="What placing samples would have saved between nodes.")
def replay(
    trace: Annotated[Path, typer.Argument(help="A routing trace.")],
    *,
    nodes: Nodes,
    ranks_per_node: RanksPerNode,
    expert_order: Annotated[
        Path | None, typer.Option(help="A file of moe-opt trace place.", show_default="stock's order")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Draw reductions and moved samples, pass by pass (.png, .svg or .pdf)."),
    ] = None,
) -> None:
    """What NetMoE's placement of samples would have sent between nodes in a recorded training run, and stock's.

    moe-opt trace replay routing.npz --nodes 2 --ranks-per-node 4
    """
    from megatron_moe_opt.cli.trace.replay import report_replay

    report_replay(trace, nodes, ranks_per_node, expert_order, output)


@app.command(short_help="Put experts that the same samples use together.")
def place(
    trace: Annotated[Path, typer.Argument(help="A routing trace.")],
    *,
    nodes: Nodes,
    ranks_per_node: RanksPerNode,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for --moe-opt-expert-order.")],
) -> None:
    """Put experts that the same samples use on the same node and rank: fitted to the first half of a trace, judged on
    the second.

    moe-opt trace place routing.npz --nodes 2 --ranks-per-node 4 -o order.json
    """
    from megatron_moe_opt.cli.trace.replay import report_plan

    report_plan(trace, nodes, ranks_per_node, output)


@app.command(short_help="Draw a trace with the locality of NetMoE's Table 5.")
def generate(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")],
    like: Annotated[str, typer.Option(help="A model of NetMoE's Table 5, such as MoE-GPT-S.")] = "MoE-GPT-S",
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of 8 GPUs there: 2 or 4.")] = 2,
    passes: Annotated[int, typer.Option(min=1, help="Passes.")] = 10,
    layers: Annotated[int, typer.Option(min=2, help="MoE layers.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sample; the table's have 1024.")] = 1024,
    topk: Annotated[int, typer.Option(min=1, max=32, help="Experts of a token; the table's have 2.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything that is random.")] = 0,
) -> None:
    """Draw a routing trace with the locality of a row of NetMoE's Table 5.

    moe-opt trace generate --like MoE-GPT-S --nodes 2 -o routing.npz
    """
    from megatron_moe_opt.cli.console import report_console, say_written
    from megatron_moe_opt.errors import ConfigurationError
    from megatron_moe_opt.output_file import check_output_file
    from megatron_moe_opt.planning.traces.routing_generator import TABLE5, like_table5
    from megatron_moe_opt.planning.traces.routing_trace import write_routing_trace

    check_output_file("--output", output)
    if like not in TABLE5:
        raise ConfigurationError(f"--like {like} is not a model of the table: choose one of {', '.join(TABLE5)}")
    if nodes not in TABLE5[like]:
        raise ConfigurationError(f"--nodes {nodes} is not in the table: choose 2 or 4")
    write_routing_trace(
        output, like_table5(TABLE5[like][nodes], passes=passes, layers=layers, seed=seed, tokens=tokens, topk=topk)
    )
    say_written(output, report_console())
