"""Expert parallelism against expert migration over many data centres: the numbers of HybridEP's Figs. 16 and 17.

Level 0 joins the data centres; the levels inside one are the same for all of their numbers. Every GPU brings its tokens
and its experts, so that both grow with the GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.cli.report.timeline_files import check_timeline_files, say_written
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.expert_migration import (
    DomainChoice,
    Link,
    MigrationLayer,
    StreamPass,
    least,
    link_curves,
    predict,
    stock_seconds,
    stock_sent,
)
from megatron_moe_opt.planning.stream_model import attention_seconds, ffn_seconds, pre_expert_seconds
from megatron_moe_opt.schedules.schedule import Kind


@dataclass(frozen=True)
class MigrationSettings:
    """The options of `moe-opt simulate-migration`."""

    data_centres: tuple[int, ...]
    outer: tuple[Link, ...]
    """Between data centres: one line of results each."""
    inner: tuple[tuple[int, Link], ...]
    """Workers and links of each level inside a data centre, the outermost first."""
    tokens: int
    """Of a GPU."""
    hidden: int
    ffn_hidden: int
    topk: int
    experts_per_gpu: int
    gated: bool
    sequence: int
    dense_layers: int
    """Before each MoE layer."""
    element_bytes: int
    """Of tokens, weights and gradients that travel."""
    flops: float
    """A second that a GPU reaches."""
    compression_ratio: float
    """Of experts that travel."""
    gradient_compression_ratio: float
    backward: bool
    """Whether that pass is counted too."""
    domain: int
    """The fixed domain size, of data centres."""
    p: float
    """The fixed proportion, of what leaves a data centre."""

    def workers(self, data_centres: int) -> tuple[int, ...]:
        """Of each level."""
        return (data_centres, *(number for number, _ in self.inner))

    def links(self, outer: Link) -> tuple[Link, ...]:
        """Of each level."""
        return (outer, *(link for _, link in self.inner))

    def layer(self) -> MigrationLayer:
        """Eqs. 1 and 2, and what travels. A backward pass computes twice as much as its forward pass."""
        speed = self.flops / 2  # multiply-adds
        attention = attention_seconds(self.tokens, self.hidden, self.sequence, speed)
        dense = ffn_seconds(self.tokens, self.hidden, self.ffn_hidden, self.gated, speed)
        experts = ffn_seconds(self.tokens * self.topk, self.hidden, self.ffn_hidden, self.gated, speed)
        before = pre_expert_seconds(attention, dense, self.dense_layers)
        matrices = 3 if self.gated else 2
        size = self.experts_per_gpu * matrices * self.hidden * self.ffn_hidden * self.element_bytes
        passes = [StreamPass(before, experts, math.ceil(size / self.compression_ratio))]
        if self.backward:
            gradients = math.ceil(size / self.gradient_compression_ratio)
            passes.append(StreamPass(2 * before, 2 * experts, gradients, Kind.REDUCE_SCATTER))
        return MigrationLayer(
            self.tokens, self.hidden * self.element_bytes, self.topk, self.experts_per_gpu, tuple(passes)
        )


@dataclass(frozen=True)
class Scale:
    """One number of data centres behind one kind of link. Choices of inner domain sizes are the fastest ones."""

    data_centres: int
    stock_seconds: float
    stock_sent: float
    """Bytes of a GPU between data centres."""
    tokens_only: DomainChoice
    """Domain size 1 at every level."""
    fixed_domain: DomainChoice
    fixed_p: DomainChoice
    """With the realisable proportion that is nearest to the one asked for."""
    least: DomainChoice

    def speedup(self, choice: DomainChoice) -> float:
        """Over stock."""
        return self.stock_seconds / choice.seconds


def scale(settings: MigrationSettings, layer: MigrationLayer, outer: Link, data_centres: int) -> Scale:
    """What one row of results is about."""
    workers, links = settings.workers(data_centres), settings.links(outer)
    choices = predict(layer, workers, link_curves(workers, links))
    nearest = min(abs(one.domains.proportion(0) - settings.p) for one in choices)
    return Scale(
        data_centres,
        stock_seconds(layer, workers, links),
        stock_sent(layer, workers, 0),
        choices[0],
        least([one for one in choices if one.domains.sizes[0] == settings.domain]),
        least([one for one in choices if abs(one.domains.proportion(0) - settings.p) == nearest]),
        least(choices),
    )


def report_migration(settings: MigrationSettings, png: Path | None) -> None:
    """Prints a table for every bandwidth between data centres, and draws the picture.

    Raises:
        ConfigurationError: settings that contradict each other, or a file that cannot be written.
    """
    check_timeline_files(None, png)
    _check(settings)
    layer = settings.layer()
    scales = {
        link: [scale(settings, layer, link, number) for number in settings.data_centres] for link in settings.outer
    }
    console = report_console()
    for line in _heading(settings, layer):
        console.print(line, highlight=False, soft_wrap=True)
    for link, rows in scales.items():
        console.print(_table(settings, layer, link, rows))
    if png is not None:
        from megatron_moe_opt.cli.plan.migration_picture import draw_migration

        draw_migration(png, settings, scales, traffic(settings))
        say_written(png, console)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends between data centres, by tokens of a GPU; of the first number of data centres."""

    data_centres: int
    tokens: tuple[int, ...]
    stock: tuple[float, ...]
    migration: dict[Link, tuple[float, ...]]
    """Of the fastest choice."""


def traffic(settings: MigrationSettings) -> Traffic:
    """Over a sixteenth to 16 times the tokens of a GPU, with the computation of each."""
    number = settings.data_centres[0]
    tokens = sorted({max(settings.tokens * 2**power // 16, 1) for power in range(9)})
    layers = [replace(settings, tokens=count).layer() for count in tokens]
    stock = tuple(stock_sent(one, settings.workers(number), 0) for one in layers)
    migration = {}
    for link in settings.outer:
        choices = (scale(settings, one, link, number).least for one in layers)
        migration[link] = tuple(one.sent(choice.domains, 0) for one, choice in zip(layers, choices, strict=True))
    return Traffic(number, tuple(tokens), stock, migration)


def _check(settings: MigrationSettings) -> None:
    for number in settings.data_centres:
        if number < 2:
            raise ConfigurationError(f"--data-centres {number} has no links between data centres: give 2 or more")
        if number % settings.domain:
            raise ConfigurationError(
                f"--domain {settings.domain} does not divide --data-centres {number}: choose a common divisor of all"
            )
        experts = settings.experts_per_gpu * math.prod(settings.workers(number))
        if settings.topk > experts:
            raise ConfigurationError(
                f"--topk {settings.topk} is more than the {experts} experts of --data-centres {number}: choose at most "
                "that, or more --experts-per-gpu"
            )


def _heading(settings: MigrationSettings, layer: MigrationLayer) -> list[str]:
    inside = " x ".join(str(number) for number, _ in settings.inner) or "1"
    passes = "forward and backward" if settings.backward else "forward"
    forward = layer.passes[0]
    return [
        f"{inside} GPU(s) in a data centre; of each, {settings.tokens} tokens of {layer.row_bytes} bytes for "
        f"{settings.topk} experts each, and {forward.expert_bytes / 1e6:.3f} MB of experts that travel",
        f"One MoE layer, {passes}; before the experts {forward.pre_expert_seconds * 1e3:.3f} ms, in them "
        f"{forward.expert_seconds * 1e3:.3f} ms (forward)",
    ]


def _table(settings: MigrationSettings, layer: MigrationLayer, link: Link, scales: list[Scale]) -> Table:
    table = Table(
        title=f"{link.bandwidth / 1e9:g} GB/s of a GPU between data centres, {link.latency * 1e6:g} us a message",
        caption="domain: workers that share experts, at each level; p: proportion, between data centres, that travels "
        "as tokens; sent: by a GPU between data centres; held: experts on a GPU",
    )
    for header, justify in (
        ("data centres", "right"), ("", "left"), ("domain", "right"), ("p", "right"), ("ms", "right"),
        ("speed-up", "right"), ("sent (MB)", "right"), ("held", "right"),
    ):  # fmt: skip
        table.add_column(header, justify=justify)
    for one in scales:
        stock = f"{one.stock_seconds * 1e3:.3f}", "1.00x", f"{one.stock_sent / 1e6:.2f}", f"{layer.local_experts}"
        table.add_row(str(one.data_centres), "stock alltoall", "-", "-", *stock)
        for name, choice in (
            ("tokens only", one.tokens_only),
            ("fixed domain", one.fixed_domain),
            ("fixed p", one.fixed_p),
            ("least time", one.least),
        ):
            table.add_row(
                "",
                name,
                " x ".join(map(str, choice.domains.sizes)),
                f"{choice.domains.proportion(0):.4f}",
                f"{choice.seconds * 1e3:.3f}",
                f"{one.speedup(choice):.2f}x",
                f"{layer.sent(choice.domains, 0) / 1e6:.2f}",
                f"{choice.holds * layer.local_experts}",
            )
        table.add_section()
    return table
