"""Routing traces as tables: what a placement of samples sends, and what another order of experts makes of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.table import Table

from megatron_moe_opt.cli.console import report_console, say, say_written, table_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_file, written_whole
from megatron_moe_opt.planning.offline.expert_grouping import group_experts
from megatron_moe_opt.planning.offline.expert_order import (
    ExpertOrder,
    read_expert_order,
    stock_devices,
    write_expert_order,
)
from megatron_moe_opt.planning.offline.placement import solvers
from megatron_moe_opt.planning.traces.routing_replay import PLANS, Replay, replay
from megatron_moe_opt.planning.traces.routing_trace import RoutingTrace, read_routing_trace
from megatron_moe_opt.schedules.picture import check_picture

WIDTH = 150
PARTS = 8
"""The number of parts, a row each, of a recording that is long enough to show how its routing changes."""
POINTS = 50
"""The most points of a line of the picture: each stands for the passes up to the next."""


def report_replay(path: Path, nodes: int, ranks_per_node: int, expert_order: Path | None, output: Path | None) -> None:
    """Prints a table with three placements for each pair of layers and for all, and draws the picture.

    Raises:
        ConfigurationError: files that cannot be used or written, sizes that do not fit.
    """
    check_output_file("--output", output, others=[("the trace", path), ("--expert-order", expert_order)])
    if output is not None:
        check_picture(output)
    trace = read_routing_trace(path)
    _check_sizes(path, trace, nodes, ranks_per_node)
    devices = _expert_devices(trace, nodes, ranks_per_node, expert_order)
    counts = trace.counts()
    done = _replay(counts, devices, nodes, ranks_per_node)
    console = report_console(WIDTH)
    order = "stock's order" if expert_order is None else f"the order of {expert_order}"
    say(console, f"{path}: {_describe(trace)}")
    say(console, f"{nodes} nodes of {ranks_per_node} ranks; experts in {order}")
    console.print(_replay_table(trace, done))
    if trace.num_passes >= 2 * PARTS:
        console.print(_training_table(trace, done))
    say(
        console,
        "Of all all-to-alls, first dispatch and last combine included: "
        f"predicted {done.whole_reduction('predicted'):.1%}, oracle {done.whole_reduction('oracle'):.1%} less between "
        "nodes",
    )
    say(console, f"The fullest rank gets {done.heaviest.mean():.2f} times the mean of the tokens")
    if output is not None:
        draw_replay(output, trace, done, counts[:, 0].sum(axis=1))
        say_written(output, console)


def report_plan(path: Path, nodes: int, ranks_per_node: int, output: Path) -> None:
    """Writes an order of experts, and prints what it does in the half it was fitted to and in the other.

    Raises:
        ConfigurationError: files that cannot be used or written, sizes that do not fit, a trace that is too short.
    """
    check_output_file("--output", output, others=[("the trace", path)])
    trace = read_routing_trace(path)
    _check_sizes(path, trace, nodes, ranks_per_node)
    if trace.num_passes < 2:
        raise ConfigurationError(f"{path} has one pass, which cannot be halved: record more")
    counts, half = trace.counts(), trace.num_passes // 2
    planned = group_experts(counts[:half], nodes, ranks_per_node, solvers()[0])
    order = ExpertOrder.of_devices(planned, trace.layers, nodes, nodes * ranks_per_node)
    write_expert_order(output, order)
    stock = stock_devices(len(trace.layers), trace.num_experts, nodes * ranks_per_node)
    console = report_console(WIDTH)
    say(console, f"{path}: {_describe(trace)}")
    table = table_of(
        f"{nodes} nodes of {ranks_per_node} ranks",
        ("passes", "experts", "outside", "predicted", "oracle", "of oracle", "predicted / stock's order",
         "fullest rank"),
        names=2,
        caption="outside: mean share of a sample's tokens outside its best node; predicted, oracle: less between "
        "nodes than stock's placement",
    )  # fmt: skip
    whole = {
        label: _replay(counts, devices, nodes, ranks_per_node)
        for label, devices in (("stock's order", stock), ("planned", planned))
    }
    for name, ends in ((f"1-{half}, fitted", (0, half)), (f"{half + 1}-{len(counts)}, held out", (half, len(counts)))):
        halves = {label: done.of_passes(*ends) for label, done in whole.items()}
        before = halves["stock's order"].reduction("predicted")
        for label, done in halves.items():
            table.add_row(
                name, label, f"{done.outside.mean():.1%}", f"{done.reduction('predicted'):.1%}",
                f"{done.reduction('oracle'):.1%}", f"{done.share_of_oracle():.1%}",
                f"{done.reduction('predicted') / before:.2f}x" if before > 0 else "-", f"{done.heaviest.mean():.2f}x",
            )  # fmt: skip
            name = ""
        table.add_section()
    console.print(table)
    say_written(output, console)


def _describe(trace: RoutingTrace) -> str:
    passes, layers, samples, tokens, topk = trace.experts.shape
    first, last = trace.iterations.min(), trace.iterations.max()
    kinds = f" of {', '.join(trace.kind_names)}" if trace.kind_names else ""
    return (
        f"{passes} passes of iterations {first} to {last}; {samples} samples{kinds}, {tokens} tokens each; "
        f"{layers} MoE layers, {trace.num_experts} experts, top-{topk}"
    )


def _check_sizes(path: Path, trace: RoutingTrace, nodes: int, ranks_per_node: int) -> None:
    ranks, samples = nodes * ranks_per_node, trace.num_samples
    if len(trace.layers) < 2:
        raise ConfigurationError(
            f"{path} has one MoE layer: a placement lies between two; record a model with more of them"
        )
    for what, number in (("samples of a pass", samples), ("experts", trace.num_experts)):
        if number % ranks:
            raise ConfigurationError(
                f"--nodes {nodes} x --ranks-per-node {ranks_per_node} = {ranks} ranks do not divide the {number} "
                f"{what} of {path}: choose sizes that do"
            )


def _expert_devices(trace: RoutingTrace, nodes: int, ranks_per_node: int, expert_order: Path | None) -> np.ndarray:
    """Returns the device of every expert in stock's order or the file's: [layers, experts]."""
    ranks = nodes * ranks_per_node
    if expert_order is None:
        return stock_devices(len(trace.layers), trace.num_experts, ranks)
    order = read_expert_order(expert_order)
    if (order.num_experts, order.ranks) != (trace.num_experts, ranks):
        raise ConfigurationError(
            f"--expert-order {expert_order} is of {order.num_experts} experts on {order.ranks} ranks, the replay of "
            f"{trace.num_experts} on {ranks}: plan it for these"
        )
    missing = sorted(set(trace.layers.tolist()) - set(order.layers))
    if missing:
        raise ConfigurationError(f"--expert-order {expert_order} has no layer {missing[0]}: plan it from this trace")
    return order.expert_device(trace.layers)


def _replay(counts: np.ndarray, expert_device: np.ndarray, nodes: int, ranks_per_node: int) -> Replay:
    return replay(counts, expert_device, np.repeat(np.arange(nodes), ranks_per_node), solvers()[1])


def _replay_table(trace: RoutingTrace, done: Replay) -> Table:
    table = table_of(
        "what crosses links, tokens of a pass",
        ("combine, dispatch", "placement", "inter", "intra", "local", "inter less", "of oracle", "outside",
         "moved: node", "device"),
        names=2,
        caption="combine, dispatch: MoE layers whose all-to-alls a placement decides; inter, intra, local: between "
        "nodes, between ranks of a node, on a rank; outside: mean share of a sample's tokens outside its best node",
    )  # fmt: skip
    pairs = range(len(trace.layers) - 1)
    for pair in (*pairs, None):
        name = "all" if pair is None else f"{trace.layers[pair]}, {trace.layers[pair + 1]}"
        part = slice(None) if pair is None else slice(pair, pair + 1)
        outside = f"{done.outside[:, part].mean():.1%}"
        for plan in PLANS:
            volume = done.volume(plan, pair)
            node, device = done.moved[plan][:, part].mean(axis=(0, 1))
            stock = plan == "stock"
            table.add_row(
                name,
                plan,
                *map(str, (volume.inter, volume.intra, volume.local)),
                "" if stock else f"{done.reduction(plan, pair):.1%}",
                f"{done.share_of_oracle(pair):.1%}" if plan == "predicted" else "",
                outside,
                *(("", "") if stock else (f"{node:.1%}", f"{device:.1%}")),
            )
            name = outside = ""
        table.add_section()
    return table


def _training_table(trace: RoutingTrace, done: Replay) -> Table:
    """Returns what placements save in each part of a recording, as NetMoE's Fig. 10 has it."""
    table = table_of(
        "over training, all pairs of layers",
        ("iterations", "outside", "predicted", "oracle", "of oracle", "moved to another node", "fullest rank"),
        caption="predicted, oracle: less between nodes than stock's placement; moved: predicted",
    )
    for begin, end in _parts(trace.num_passes, PARTS):
        part, iterations = done.of_passes(begin, end), trace.iterations[begin:end]
        table.add_row(
            f"{iterations[0]} to {iterations[-1]}", f"{part.outside.mean():.1%}",
            f"{part.reduction('predicted'):.1%}", f"{part.reduction('oracle'):.1%}", f"{part.share_of_oracle():.1%}",
            f"{part.moved['predicted'][..., 0].mean():.1%}", f"{part.heaviest.mean():.2f}x",
        )  # fmt: skip
    return table


def _parts(passes: int, number: int) -> list[tuple[int, int]]:
    """Returns where each of so many parts of the passes begins and ends, of as equal length as whole passes allow."""
    return list(pairwise(passes * end // number for end in range(number + 1)))


def draw_replay(path: Path, trace: RoutingTrace, done: Replay, of_experts: np.ndarray) -> None:
    """Draws reductions, moved samples and the first layer's experts over training, as NetMoE's Fig. 10, a line a
    placement and a band an expert; the file's format follows from its suffix.

    Args:
        of_experts: integers [P, E], tokens of each expert of the first layer.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(16, 4), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    less, moved, chosen = figure.subplots(1, 3)
    ends = _parts(trace.num_passes, min(trace.num_passes, POINTS))
    parts, iterations = [done.of_passes(*one) for one in ends], [trace.iterations[begin] for begin, _ in ends]
    for plan in ("predicted", "oracle"):
        less.plot(iterations, [part.reduction(plan) for part in parts], marker=".", label=plan)
        for column, what in enumerate(("node", "device")):
            shares = [part.moved[plan][..., column].mean() for part in parts]
            moved.plot(iterations, shares, marker=".", label=f"{plan}, to another {what}")
    tokens = np.array([of_experts[begin:end].sum(axis=0) for begin, end in ends])
    chosen.stackplot(iterations, (tokens / tokens.sum(axis=1, keepdims=True)).T)
    less.set(title="tokens between nodes, less than stock", xlabel="iteration")
    moved.set(title="samples that move", xlabel="iteration")
    chosen.set(title=f"tokens of MoE layer {trace.layers[0]}, by expert", xlabel="iteration", ylim=(0, 1))
    for axis in (less, moved):
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    for axis in (less, moved, chosen):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)
