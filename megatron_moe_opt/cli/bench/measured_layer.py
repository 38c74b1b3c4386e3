"""What `moe-opt bench` measured, and how it is printed. docs/benchmarking.md defines the columns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from megatron_moe_opt.cli.bench.balance import RoutingBalance
from megatron_moe_opt.cli.bench.link_rates import LinkRates, WireLimit
from megatron_moe_opt.cli.bench.predicted import Predicted
from megatron_moe_opt.cli.bench.recorded_step import RecordedStep
from megatron_moe_opt.cli.console import say, table_of
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.choosing.contenders import median_within
from megatron_moe_opt.runtime.observed.traffic_rows import INTER_NODE, INTRA_NODE, TrafficRow
from megatron_moe_opt.topology.nodes import NodeMap

FASTER, SLOWER, CANNOT_TELL = "faster", "slower", "cannot tell"
SOFTWARE = ("megatron-moe-opt", "megatron-core", "torch")
FACTS = (*SOFTWARE, "world size", "device", "backend", "cpus", "threads of a rank", "ep")
"""What a report's environment must say, since its conditions tell it."""


@dataclass(frozen=True)
class DispatcherResult:
    """What was measured of one dispatcher in a run of `moe-opt bench`."""

    dispatcher: str
    seconds: tuple[float, ...]
    """The seconds of each round: forward and backward on the slowest rank."""
    ratios: tuple[float, ...]
    """The ratio of each round: its seconds over the baseline's in the same round."""
    output_difference: float
    """The difference from the baseline's output over all ranks: norm of the difference over the norm."""
    gradient_difference: float
    """The same difference of the gradient that differs most (input, router, experts)."""
    traffic: tuple[TrafficRow, ...]
    """What all ranks together sent in one step."""
    wire_limit: WireLimit | None
    peak_memory_bytes: int | None
    """The growth of memory over one step (peak_memory_growth) on the rank where it is largest, in bytes."""

    @property
    def median(self) -> float:
        """Median seconds of the rounds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios to the baseline."""
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        """FASTER or SLOWER than the baseline; CANNOT_TELL where the true median may lie on either side of 1."""
        least, most = median_within(self.ratios)
        return FASTER if most < 1 else SLOWER if least > 1 else CANNOT_TELL


@dataclass(frozen=True)
class ReportTable:
    """A table as text, for the terminal and the page alike."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    """The number of columns on the left that name the row; the others hold numbers."""


@dataclass(frozen=True)
class LayerReport:
    """All that a run of `moe-opt bench` has measured and predicted."""

    settings: LayerSettings
    """What the command was asked for: `ep` may be None, and is among the facts of the environment."""
    environment: dict[str, Any]
    nodes: NodeMap
    rates: LinkRates
    results: tuple[DispatcherResult, ...]
    balance: RoutingBalance
    predicted: Predicted
    recorded: Mapping[str, RecordedStep]
    """A recorded step of each dispatcher, by its name; empty where none was asked for."""


def print_report(report: LayerReport, console: Console) -> None:
    """Prints the conditions, then the times, then the traffic."""
    for line in conditions(report):
        say(console, line)
    tables = [times_table(report), *([traffic_table(report)] if any(one.traffic for one in report.results) else [])]
    for content in tables:
        console.print(table_of(content.title, content.headers, content.rows, content.names))


def conditions(report: LayerReport) -> list[str]:
    """Returns what ran, where and how, a sentence each."""
    environment = report.environment
    software = ", ".join(f"{name} {environment[name]}" for name in SOFTWARE)
    machine = (
        f"{environment['world size']} ranks on {report.nodes.num_nodes} node(s), {environment['device']}, "
        f"{environment['backend']}, {environment['cpus']} CPUs, {environment['threads of a rank']} thread(s) a rank"
    )
    settings = replace(report.settings, ep=environment["ep"])
    what = "Dispatch and combine alone" if settings.dispatch_only else "MoE layer"
    return [
        f"{what}, forward + backward. {shape_of(settings)}",
        f"{software}; {machine}",
        f"seed {settings.seed}, {settings.warmup} warm-up and {settings.steps} timed rounds, interleaved; a round's "
        "time is the slowest rank's",
        f"links: {_links(report.rates)}",
    ]


def shape_of(settings: LayerSettings) -> str:
    """Returns the workload and the layout in one line."""
    capacity = ""
    if settings.capacity_factor is not None:
        capacity = f", capacity factor {settings.capacity_factor:g}" + ", padded" * settings.pad_to_capacity
    held = ", all TP ranks hold the same tokens" if settings.replicated else ""
    expert_hidden = "" if settings.dispatch_only else f"expert hidden {settings.ffn_hidden}, "
    return (
        f"{settings.tokens} tokens a rank, hidden {settings.hidden}, {expert_hidden}{settings.experts} experts, "
        f"top-{settings.topk}, {settings.dtype}, TP {settings.tp}, EP {settings.ep}, expert-TP {settings.expert_tp}, "
        f"routing {settings.routing}{capacity}{held}"
    )


def _links(rates: LinkRates) -> str:
    """Returns the measured rates of a node, beside those that netbox shaped."""

    def mbits(rate: float) -> str:
        return f"{rate * 8 / 1e6:.0f}"

    def shaped(variable: str) -> str:
        return f" (shaped to {float(os.environ[variable]) / 1e6:.0f})" if variable in os.environ else ""

    described = []
    if rates.inter_node is not None:
        one_way = "" if rates.inter_node_one_way is None else f", {mbits(rates.inter_node_one_way)} one way alone"
        shape = shaped("NETBOX_INTER_BITS")
        described.append(f"{INTER_NODE} {mbits(rates.inter_node)} Mbit/s a node each way, both at once{one_way}{shape}")
    if rates.intra_node is not None:
        shape = shaped("NETBOX_INTRA_BITS")
        described.append(f"{INTRA_NODE} {mbits(rates.intra_node)} Mbit/s a node{shape}")
    return "; ".join(described) or "none between ranks"


def times_table(report: LayerReport) -> ReportTable:
    """Returns a row for each dispatcher: times, the limit, memory and differences from the baseline."""
    headers = (
        "dispatcher", "median ms", "min-max ms", f"ratio to {report.settings.baseline}", "ratio min-max",
        "verdict", "wire limit ms", "set by", "median / limit", "peak memory MB", "output diff", "worst grad diff",
    )  # fmt: skip
    return ReportTable(
        "Time of one step",
        headers,
        tuple(_cells(result, result.dispatcher == report.settings.baseline) for result in report.results),
    )


def _cells(result: DispatcherResult, is_baseline: bool) -> tuple[str, ...]:
    limit = result.wire_limit
    return (
        result.dispatcher, f"{result.median * 1e3:.1f}",
        f"{min(result.seconds) * 1e3:.1f}-{max(result.seconds) * 1e3:.1f}", f"{result.ratio:.3f}",
        f"{min(result.ratios):.3f}-{max(result.ratios):.3f}", "-" if is_baseline else result.verdict,
        f"{limit.seconds * 1e3:.1f}" if limit else "-",
        limit.link if limit else "-", f"{result.median / limit.seconds:.2f}" if limit else "-",
        "-" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 1e6:.0f}",
        f"{result.output_difference:.1e}", f"{result.gradient_difference:.1e}",
    )  # fmt: skip


def traffic_table(report: LayerReport) -> ReportTable:
    """Returns messages and bytes of one step by collective and link, and their sums by link."""
    sent: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for result in report.results:
        for row in result.traffic:
            for collective in (row.collective, "total"):
                by_dispatcher = sent.setdefault((collective, row.link), {})
                messages, num_bytes = by_dispatcher.get(result.dispatcher, (0, 0))
                by_dispatcher[result.dispatcher] = (messages + row.messages, num_bytes + row.bytes)
    dispatchers = [result.dispatcher for result in report.results]
    rows = []
    for key in sorted(sent, key=lambda key: (key[0] == "total", key)):
        cells = [sent[key].get(dispatcher) for dispatcher in dispatchers]
        rows.append((*key, *(f"{cell[0]} / {cell[1] / 1e6:.2f}" if cell else "-" for cell in cells)))
    title = "Sent by all ranks in one step: messages / MB"
    return ReportTable(title, ("collective", "link", *dispatchers), tuple(rows), names=2)
