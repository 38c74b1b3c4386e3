"""What `moe-opt bench layer` measured, and how it is printed. docs/benchmarking.md defines the columns."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.layer_settings import LayerSettings
from megatron_moe_opt.cli.links import LinkRates, WireLimit
from megatron_moe_opt.runtime.traffic import INTER_NODE, INTRA_NODE, TrafficRow
from megatron_moe_opt.topology.nodes import NodeMap


@dataclass(frozen=True)
class DispatcherResult:
    """What was measured of one dispatcher."""

    dispatcher: str
    seconds: tuple[float, ...]
    """Of each round: forward and backward on the slowest rank."""
    ratios: tuple[float, ...]
    """Of each round: seconds over the baseline's in the same round."""
    output_difference: float
    """From the baseline's output, over all ranks: norm of the difference over the norm."""
    gradient_difference: float
    """The same of the gradient that differs most (input, router, experts)."""
    traffic: tuple[TrafficRow, ...]
    """Sent by all ranks in one step."""
    wire_limit: WireLimit | None
    peak_memory_bytes: int | None
    """Growth over one step (peak_memory.peak_memory_growth) on the rank where it is largest."""

    @property
    def median(self) -> float:
        """Median of `seconds`."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class LayerReport:
    """A whole run."""

    settings: LayerSettings
    environment: dict[str, Any]
    nodes: NodeMap
    rates: LinkRates
    results: tuple[DispatcherResult, ...]


def as_json(report: LayerReport) -> dict[str, Any]:
    """All fields, and the medians that the table shows."""
    content = asdict(report)
    for entry, result in zip(content["results"], report.results, strict=True):
        entry |= {"median_seconds": result.median, "median_ratio": result.ratio}
    return content


def print_report(report: LayerReport, console: Console) -> None:
    """Conditions, then times, then traffic."""
    for line in _conditions(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_times(report))
    if any(result.traffic for result in report.results):
        console.print(_traffic(report))


def _conditions(report: LayerReport) -> list[str]:
    environment = report.environment
    software = ", ".join(f"{name} {environment[name]}" for name in ("megatron-moe-opt", "megatron-core", "torch"))
    machine = (
        f"{environment['world size']} ranks on {report.nodes.num_nodes} node(s), {environment['device']}, "
        f"{environment['backend']}, {environment['cpus']} CPUs, {environment['threads of a rank']} thread(s) a rank"
    )
    settings = report.settings
    what = "Dispatch and combine alone" if settings.dispatch_only else "MoE layer"
    return [
        f"{what}, forward + backward. {shape_of(settings, environment['ep'])}",
        f"{software}; {machine}",
        f"seed {settings.seed}, {settings.warmup} warm-up and {settings.steps} timed rounds, interleaved; a round's "
        "time is the slowest rank's",
        f"links: {_links(report.rates)}",
    ]


def shape_of(settings: LayerSettings, ep: int) -> str:
    """The workload and the layout in one line."""
    capacity = ""
    if settings.capacity_factor is not None:
        capacity = f", capacity factor {settings.capacity_factor:g}" + ", padded" * settings.pad_to_capacity
    held = ", all TP ranks hold the same tokens" if settings.replicated else ""
    expert_hidden = "" if settings.dispatch_only else f"expert hidden {settings.ffn_hidden}, "
    return (
        f"{settings.tokens} tokens a rank, hidden {settings.hidden}, {expert_hidden}{settings.experts} experts, "
        f"top-{settings.topk}, {settings.dtype}, TP {settings.tp}, EP {ep}, expert-TP {settings.expert_tp}, "
        f"routing {settings.routing}{capacity}{held}"
    )


def _links(rates: LinkRates) -> str:
    """Measured rates of a node, beside those that netbox shaped."""
    described = []
    for link, rate, variable in (
        (INTER_NODE, rates.inter_node, "NETBOX_INTER_BITS"),
        (INTRA_NODE, rates.intra_node, "NETBOX_INTRA_BITS"),
    ):
        if rate is not None:
            shaped = f" (shaped to {float(os.environ[variable]) / 1e6:.0f})" if variable in os.environ else ""
            described.append(f"{link} {rate * 8 / 1e6:.0f} Mbit/s a node{shaped}")
    return ", ".join(described) or "none between ranks"


def _times(report: LayerReport) -> Table:
    table = Table(title="Time of one step")
    table.add_column("dispatcher")
    for header in (
        "median ms",
        "min-max ms",
        f"ratio to {report.settings.baseline}",
        "ratio min-max",
        "wire limit ms",
        "set by",
        "median / limit",
        "peak memory MB",
        "output diff",
        "worst grad diff",
    ):
        table.add_column(header, justify="right")
    for result in report.results:
        table.add_row(result.dispatcher, *_cells(result))
    return table


def _cells(result: DispatcherResult) -> list[str]:
    limit = result.wire_limit
    return [
        f"{result.median * 1e3:.1f}",
        f"{min(result.seconds) * 1e3:.1f}-{max(result.seconds) * 1e3:.1f}",
        f"{result.ratio:.3f}",
        f"{min(result.ratios):.3f}-{max(result.ratios):.3f}",
        f"{limit.seconds * 1e3:.1f}" if limit else "-",
        limit.link if limit else "-",
        f"{result.median / limit.seconds:.2f}" if limit else "-",
        "-" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 1e6:.0f}",
        f"{result.output_difference:.1e}",
        f"{result.gradient_difference:.1e}",
    ]


def _traffic(report: LayerReport) -> Table:
    """Messages and bytes of one step by collective and link, and their sums by link."""
    table = Table(title="Sent by all ranks in one step: messages / MB")
    table.add_column("collective")
    table.add_column("link")
    sent: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for result in report.results:
        table.add_column(result.dispatcher, justify="right")
        for row in result.traffic:
            for collective in (row.collective, "total"):
                by_dispatcher = sent.setdefault((collective, row.link), {})
                messages, num_bytes = by_dispatcher.get(result.dispatcher, (0, 0))
                by_dispatcher[result.dispatcher] = (messages + row.messages, num_bytes + row.bytes)
    for key in sorted(sent, key=lambda key: (key[0] == "total", key)):
        cells = [sent[key].get(result.dispatcher) for result in report.results]
        table.add_row(*key, *(f"{cell[0]} / {cell[1] / 1e6:.2f}" if cell else "-" for cell in cells))
    return table
