"""`moe-opt report`: everything that was measured, as one page that needs nothing else.

templates/report.html.j2 is the page; what stands in it is put together here.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_moe_opt.cli.bench.balance import max_over_mean
from megatron_moe_opt.cli.bench.measured_layer import (
    CANNOT_TELL,
    FASTER,
    SLOWER,
    LayerReport,
    ReportTable,
    conditions,
    times_table,
    traffic_table,
)  # fmt: skip
from megatron_moe_opt.cli.bench.recorded_step import RecordedStep
from megatron_moe_opt.cli.bench.saved_report import read_report
from megatron_moe_opt.cli.console import report_console, say_written
from megatron_moe_opt.cli.report import charts
from megatron_moe_opt.cli.report.charts import Bar
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from megatron_moe_opt.runtime.observed.traffic_rows import INTER_NODE, INTRA_NODE
from megatron_moe_opt.schedules.timeline import Timeline, numbered, overlap
from megatron_moe_opt.schedules.trace import trace_of


def write_page(measured: Path, page: Path) -> None:
    """Writes the page of a file of `moe-opt bench -o`, and says so.

    Raises:
        ConfigurationError: the file is none, or the page cannot be written.
    """
    check_output_file("--output", page, others=[("the benchmark", measured)])
    write_text_whole(page, render_page(read_report(measured)))
    say_written(page, report_console())


def render_page(report: LayerReport) -> str:
    """Returns the page as HTML that needs no other file."""
    environment = Environment(
        loader=PackageLoader("megatron_moe_opt.cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sent = any(result.traffic for result in report.results)
    return environment.get_template("report.html.j2").render(
        title="Dispatch and combine" if report.settings.dispatch_only else "One MoE layer",
        headline=headline(report),
        conditions=conditions(report),
        baseline=report.settings.baseline,
        times=times_table(report),
        times_chart=_times_chart(report),
        prediction=_prediction(report) if report.predicted.seconds else None,
        profile=report.settings.profile,
        not_predicted=report.predicted.missing,
        timelines=_timelines(report),
        trace=_trace(report),
        without_schedules=[name for name, step in report.recorded.items() if not step.timelines and not step.stages],
        traffic=traffic_table(report) if sent else None,
        stacks=_stacks(report),
        memory=_memory_chart(report),
        balance=_balance(report),
        capped=report.settings.capacity_factor is not None,
        facts=_facts(report),
    )


def headline(report: LayerReport) -> str:
    """Returns which dispatcher was faster, by how much and how far from its limit; or that none can be said to be."""
    baseline = report.settings.baseline
    of_ours = [result for result in report.results if result.dispatcher != baseline]
    if not of_ours:
        return f"Nothing was compared with {baseline}"
    best = min(of_ours, key=lambda result: (result.verdict != FASTER, result.ratio))
    spread = f"{min(best.ratios):.2f}-{max(best.ratios):.2f}"
    took = f"{best.dispatcher} took {best.ratio:.2f} of {baseline}'s time ({spread})"
    if best.verdict == SLOWER:
        return f"None was faster than {baseline}: {took}"
    if best.verdict == CANNOT_TELL:
        return f"None can be told from {baseline}: {took}; more --steps may tell"
    return took + (f", {best.median / best.wire_limit.seconds:.2f} times its wire limit" if best.wire_limit else "")


def _times_chart(report: LayerReport) -> str:
    bars = [
        Bar(
            result.dispatcher,
            result.median * 1e3,
            f"{result.median * 1e3:.1f} ms, ratio {result.ratio:.3f}",
            tuple(seconds * 1e3 for seconds in result.seconds),
            None if result.wire_limit is None else result.wire_limit.seconds * 1e3,
            result.dispatcher == report.settings.baseline,
        )
        for result in report.results
    ]
    title = "Median time of one step under each dispatcher, with spread and wire limit"
    limit = None if all(bar.mark is None for bar in bars) else "wire limit: the least time for the step's bytes"
    return charts.bars("time-chart", title, bars, "ms", "median of the rounds", limit)


def _prediction(report: LayerReport) -> dict[str, Any]:
    """Returns predicted against measured time, of the dispatchers that a prediction was made for."""
    predictions = report.predicted.seconds
    results = [result for result in report.results if result.dispatcher in predictions]
    rows, data = [], []
    for result in results:
        predicted, measured = predictions[result.dispatcher], result.median
        error = f"{predicted / measured - 1:+.1%}"
        rows.append((result.dispatcher, f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}", error))
        samples = tuple(seconds * 1e3 for seconds in result.seconds)
        baseline = result.dispatcher == report.settings.baseline
        data.append(Bar(result.dispatcher, measured * 1e3, error, samples, predicted * 1e3, baseline))
    fastest = min(results, key=lambda result: predictions[result.dispatcher]).dispatcher
    measured = min(results, key=lambda result: result.ratio).dispatcher  # as the headline ranks them
    title = "Measured and predicted time of one step under each dispatcher"
    return {
        "agreement": f"Predicted to be fastest: {fastest}. Measured to be fastest of those predicted: {measured}.",
        "chart": charts.bars("prediction-chart", title, data, "ms", "measured, median of the rounds", "predicted"),
        "table": ReportTable(
            "Time of one step", ("dispatcher", "predicted ms", "measured median ms", "error"), tuple(rows)
        ),
    }


def _timelines(report: LayerReport) -> list[dict[str, str]]:
    """Returns the recorded steps of all dispatchers, on one scale."""
    joined = _recorded(report)
    longest = max((timeline.seconds for timeline in joined.values()), default=0.0)
    drawn = []
    for number, (name, timeline) in enumerate(joined.items()):
        summary = _summary(report.recorded[name])
        title = f"{name}: ops of one step by lane. {summary}"
        chart = charts.timeline(f"timeline-{number}", title, timeline, longest)
        drawn.append({"name": name, "summary": summary, "chart": chart})
    return drawn


def _recorded(report: LayerReport) -> dict[str, Timeline]:
    """Returns the recorded steps by dispatcher: whole layers, or what there is of their schedules."""
    steps = {name: step.whole(name) for name, step in report.recorded.items()}
    return {name: step for name, step in steps.items() if step is not None}


def _trace(report: LayerReport) -> str | None:
    """Returns the timelines as a file of ui.perfetto.dev to be downloaded, as an address that contains it."""
    joined = _recorded(report)
    if not joined:
        return None
    return f"data:application/json;base64,{b64encode(trace_of(joined).encode()).decode()}"


def _summary(step: RecordedStep) -> str:
    timelines = step.timelines
    lanes = dict.fromkeys(lane for timeline in timelines for lane in timeline.schedule.lanes)
    busy = ", ".join(f"{lane.value} {sum(one.busy(lane) for one in timelines) * 1e3:.1f}" for lane in lanes)
    if step.stages and not timelines:
        return f"Rank {step.rank}: {step.seconds * 1e3:.1f} ms in the layer, by its stages."
    seconds = sum(timeline.seconds for timeline in step.schedules)
    of_layer = f"{step.seconds * 1e3:.1f} ms in the layer, " if step.stages else ""
    names = "; ".join(numbered(step.schedules))
    text = f"Rank {step.rank}: {of_layer}{seconds * 1e3:.1f} ms in {names or 'no schedule'}. Busy ms: {busy or 'none'}."
    hidden = overlap(timelines)
    return text if hidden is None else f"{text} Overlap {hidden:.0%}."


def _stacks(report: LayerReport) -> list[tuple[str, str]]:
    """Returns megabytes by dispatcher and collective, of each link that something is sent over."""
    drawn = []
    for link in (INTER_NODE, INTRA_NODE):
        sent = {
            result.dispatcher: {row.collective: row.bytes / 1e6 for row in result.traffic if row.link == link}
            for result in report.results
        }
        if any(sent.values()):
            title = f"Megabytes sent over {link} links in one step, by collective"
            drawn.append((link, charts.stacks(f"bytes-{link}", title, sent, "MB")))
    return drawn


def _memory_chart(report: LayerReport) -> str | None:
    bars = [
        Bar(
            result.dispatcher,
            result.peak_memory_bytes / 1e6,
            f"{result.peak_memory_bytes / 1e6:.3g} MB",
            is_baseline=result.dispatcher == report.settings.baseline,
        )
        for result in report.results
        if result.peak_memory_bytes is not None
    ]
    title = "Growth of memory during one step under each dispatcher"
    return charts.bars("memory-chart", title, bars, "MB", "growth during a step") if bars else None


def _balance(report: LayerReport) -> list[dict[str, str]]:
    drawn = []
    for what, rows in (("expert", report.balance.of_expert), ("rank", report.balance.of_rank)):
        text = f"largest {max(rows)}, least {min(rows)}, max over mean {max_over_mean(rows):.2f}"
        title = f"Rows of each {what}, the fullest first: {text}"
        drawn.append({"what": what, "text": text, "chart": charts.columns(f"balance-{what}", title, rows, what)})
    return drawn


def _facts(report: LayerReport) -> list[tuple[str, str]]:
    facts = report.environment | asdict(report.settings)
    return [(name.replace("_", " "), _fact(value)) for name, value in facts.items() if value not in (None, {})]


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
