"""A made-up run of `moe-opt bench` with everything that a page can show, and a reader of pages."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from megatron_moe_opt.cli.bench.balance import RoutingBalance
from megatron_moe_opt.cli.bench.link_rates import LinkRates, WireLimit
from megatron_moe_opt.cli.bench.measured_layer import DispatcherResult, LayerReport
from megatron_moe_opt.cli.bench.predicted import Predicted
from megatron_moe_opt.cli.bench.recorded_step import RecordedStep
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.predicting.layer_passes import training_passes
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.runtime.observed.traffic_rows import INTER_NODE, INTRA_NODE, TrafficRow
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.expert_migration import gathered
from megatron_moe_opt.schedules.hops import HopBytes, HopStages, outline
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.schedules.stages import PassInstants
from megatron_moe_opt.topology.nodes import NodeMap

_RATES = {
    (Kind.ALL_TO_ALL, "ep"): 25e6,
    (Kind.ALL_GATHER, "expert-tp"): 120e6,
    (Kind.REDUCE_SCATTER, "expert-tp"): 120e6,
    (Kind.COPY, None): 2e9,
    (Kind.COMPUTE, None): 300e6,
    (Kind.GRADIENT, None): 150e6,
    (Kind.OFFLOAD, None): 1e9,
    (Kind.PREFETCH, None): 1e9,
}
COSTS = Costs({key: CostCurve(((1 << 20, (1 << 20) / rate),)) for key, rate in _RATES.items()}, overhead=1e-4)
ROWS, ROW_BYTES = 1024, 2048
STAGES = (
    PassInstants("forward", 1.0, 1.01, ((1.2, 1.25),), 1.4, 1.42),
    PassInstants("backward", 1.45, 1.46, ((1.6, 1.7),), 1.9, 1.95),
)
"""The stages of a layer without schedules of ours."""
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "send")


def monta_step(level: str, chunks: int) -> RecordedStep:
    """Four pipelines."""
    passes = training_passes(ROWS, ROW_BYTES, ROW_BYTES + 16)
    schedules = [one.schedule(level, even_chunks(one.exchanged, 4, chunks), 2, 4) for one in passes]
    return RecordedStep(3, tuple(simulate(schedule, COSTS) for schedule in schedules))


def mpmoe_step(partitions: int, strategy: str) -> RecordedStep:
    """Two, through the experts."""
    parts = [PartitionRows(ROWS // partitions, ROWS // partitions * 4)] * partitions
    row = RowBytes(ROW_BYTES + 16, ROW_BYTES, 2 * ROW_BYTES)
    schedules = (build(strategy, parts, row, mpmoe.by_rows(2, 4)) for build in (mpmoe.forward, mpmoe.backward))
    return RecordedStep(1, tuple(simulate(schedule, COSTS) for schedule in schedules))


def migration_step() -> RecordedStep:
    """A hop out and back, and experts that travel beside them."""
    seconds = {Kind.ALL_TO_ALL: 2e-3, Kind.ALL_GATHER: 3e-3, Kind.PERMUTE: 1e-3}
    hops = [
        simulate(outline(word, HopStages(1, (0,))).sized([HopBytes({0: ROW_BYTES})]), lambda op: seconds[op.kind])
        for word in ("hop out", "hop back")
    ]
    travel = simulate(gathered({0: 8 * ROW_BYTES}), lambda op: seconds[op.kind])
    begins = (0.5, 0.51, 0.501)
    return RecordedStep(2, tuple(replace(one, began=at) for one, at in zip((*hops, travel), begins, strict=True)))


def _result(dispatcher, milliseconds, stock, megabytes, peak) -> DispatcherResult:
    rows = [
        TrafficRow(collective, link, 48, int(size * 1e6 * share))
        for collective, size in zip(COLLECTIVES, megabytes, strict=True)
        for link, share in ((INTER_NODE, 0.4), (INTRA_NODE, 0.6))
        if size
    ]
    return DispatcherResult(
        dispatcher,
        tuple(value / 1e3 for value in milliseconds),
        tuple(value / other for value, other in zip(milliseconds, stock, strict=True)),
        0.0,
        2.5e-7,
        tuple(rows),
        WireLimit(0.1875, INTER_NODE),
        peak,
    )


def made_report(**changes: object) -> LayerReport:
    """Stock, three of ours and the reference on 2 nodes of 4 ranks; `changes` are fields of the report."""
    stock = (731.0, 702.5, 745.2, 718.1, 790.0)
    results = (
        _result("alltoall", stock, stock, (16.4, 42.0, 42.0, 0.0), 61_400_000),
        _result("monta:O3x4", (401.0, 395.2, 433.3, 412.9, 398.8), stock, (16.3, 41.5, 41.5, 0.0), 48_000_000),
        _result("mpmoe:4:S3", (452.0, 440.9, 471.0, 460.2, 449.8), stock, (20.3, 41.5, 41.5, 0.0), 33_100_000),
        _result("expert-migration", (690.0, 640.9, 671.0, 700.2, 699.8), stock, (24.3, 0.0, 0.0, 3.0), None),
        _result("deepspeed", (1402.0, 1380.2, 1499.1, 1444.4, 1420.0), stock, (66.3, 12.5, 0.0, 0.0), 120_000_000),
    )
    settings = LayerSettings(
        dispatchers=tuple(result.dispatcher for result in results),
        tokens=512,
        hidden=512,
        ffn_hidden=1024,
        experts=8,
        topk=2,
        tp=4,
        ep=None,
        expert_tp=4,
        dtype="fp32",
        routing="zipf",
        capacity_factor=None,
        pad_to_capacity=False,
        steps=5,
        warmup=2,
        seed=1,
        profile=Path("cluster.json"),
    )
    environment = {
        "megatron-moe-opt": "0.1.0",
        "megatron-core": "0.16.1",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu",
        "backend": "gloo",
        "host": "node0",
        "cpus": 2,
        "threads of a rank": 1,
        "world size": 8,
        "ep": 2,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
        "netbox": {"NETBOX_INTER_BITS": "200000000"},
    }
    report = LayerReport(
        settings,
        environment,
        NodeMap((0, 0, 0, 0, 1, 1, 1, 1)),
        LinkRates(24.2e6, 190e6),
        results,
        RoutingBalance((3100, 310, 990, 640, 1500, 420, 700, 532), (5040, 5040, 5040, 5040, 3152, 3152, 3152, 3152)),
        Predicted(
            {"alltoall": 0.744, "monta:O3x4": 0.377, "mpmoe:4:S3": 0.49},
            {"expert-migration": "expert tensor parallelism 4 cuts experts, which do not travel in parts"},
        ),
        {
            "alltoall": RecordedStep(0, (), STAGES),
            "monta:O3x4": monta_step("O3", 4),
            "mpmoe:4:S3": mpmoe_step(4, "S3"),
        },
    )
    return replace(report, **changes)


class Page(HTMLParser):
    """Reads a page strictly: refuses elements that are not closed in order, and collects what there is.

    Raises:
        AssertionError: an end tag without its start tag, or the other way round.
    """

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data):
        self.texts.append(data)
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1] += data
