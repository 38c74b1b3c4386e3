"""Expert parallelism against expert migration over many data centres: the numbers of HybridEP's Figs. 16 and 17.

    python -m tools.predictions.data_centres --bandwidth 0.125,1.25 --tokens 8192 --hidden 1024 --ffn-hidden 4096
        --topk 4 --peak-tflops 312 --gemm-efficiency 0.5 --level 8:200:5 --compression-ratio 25
        --gradient-compression-ratio 25

Level 0 joins the data centres; the levels inside one are the same for all of their numbers. Every GPU brings its tokens
and its experts, so that both grow with the GPUs. `moe-opt plan` predicts a model's layer on one cluster; here is how
the gain scales. Neither GPUs nor other ranks are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from megatron_moe_opt.cli.console import report_console, say, say_written, table_of
from megatron_moe_opt.cli.layer_options import FfnHidden, Hidden, TopK
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType, finite, whole_numbers
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_file, written_whole
from megatron_moe_opt.planning.predicting.expert_migration import DomainChoice, MigrationLayer, least
from megatron_moe_opt.schedules.picture import check_picture
from megatron_moe_opt.schedules.schedule import Kind
from tools.papers.formulas.hybridep import attention_seconds, ffn_seconds, pre_expert_seconds
from tools.papers.formulas.hybridep_levels import Link, TimedPass, link_curves, predict, stock_seconds, stock_sent

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def data_centres(
    *,
    bandwidth: Annotated[
        str, typer.Option(help="GB/s of one GPU between data centres, separated by commas: a table and a line each.")
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each GPU in a MoE layer.")],
    hidden: Hidden,
    ffn_hidden: FfnHidden,
    topk: TopK,
    peak_tflops: Annotated[
        float, typer.Option(min=0.001, callback=finite, help="Of a GPU, dense, in the training dtype.")
    ],
    gemm_efficiency: Annotated[
        float,
        typer.Option(min=0.001, max=1.0, callback=finite, help="Part of the peak that the model's compute reaches."),
    ],
    numbers: Annotated[
        str, typer.Option("--data-centres", help="Numbers of data centres, separated by commas.")
    ] = "10,50,100,500,1000",
    latency: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Microseconds that each message between them adds.")
    ] = 0.0,
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="WORKERS:GB/s:MICROSECONDS of a level inside a data centre, such as 8:400:5; the outermost first.",
            show_default="one GPU in each data centre",
        ),
    ] = None,
    experts_per_gpu: Annotated[int, typer.Option(min=1, help="Experts of a layer on each GPU.")] = 1,
    gated: Annotated[bool, typer.Option(help="Experts with SwiGLU or the like.")] = True,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="all tokens of a GPU")
    ] = None,
    dense_layers: Annotated[int, typer.Option(min=0, help="Layers without experts before each MoE layer.")] = 0,
    dtype: Annotated[DType, typer.Option(help="Tokens, weights and gradients that travel.")] = DType.bf16,
    compression_ratio: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Bytes of the experts over bytes that travel for them.")
    ] = 1.0,
    gradient_compression_ratio: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="The same of their gradients.")
    ] = 1.0,
    backward: Annotated[bool, typer.Option(help="Forward and backward pass; else forward alone, as in the paper.")] = (
        True
    ),
    domain: Annotated[int, typer.Option(min=1, help="The fixed domain size: data centres that share experts.")] = 2,
    p: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=finite, help="The fixed proportion that travels as tokens.")
    ] = 0.9,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Draw speed-ups, and traffic at the first number of data centres (.png, .svg or .pdf).",
        ),
    ] = None,
) -> None:
    """Predict a MoE layer under expert parallelism and under expert migration, for up to thousands of data centres."""
    settings = MigrationSettings(
        data_centres=tuple(whole_numbers("--data-centres", numbers)),
        outer=tuple(Link(rate * 1e9, latency * 1e-6) for rate in _bandwidths(bandwidth)),
        inner=tuple(_level(text) for text in level or ()),
        tokens=tokens,
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        topk=topk,
        experts_per_gpu=experts_per_gpu,
        gated=gated,
        sequence=sequence or tokens,
        dense_layers=dense_layers,
        element_bytes={DType.fp32: 4, DType.bf16: 2}[dtype],
        flops=peak_tflops * 1e12 * gemm_efficiency,
        compression_ratio=compression_ratio,
        gradient_compression_ratio=gradient_compression_ratio,
        backward=backward,
        domain=domain,
        p=p,
    )
    report_migration(settings, output)


def _bandwidths(text: str) -> list[float]:
    rates = [_number(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise ConfigurationError(
            f"--bandwidth {text}: write GB/s above 0 of a GPU, separated by commas, such as 0.125,1.25"
        )
    return rates


def _level(text: str) -> tuple[int, Link]:
    workers, *link = (_number(part) for part in text.split(":"))
    if len(link) != 2 or workers < 1 or workers != int(workers) or not (link[0] > 0 and link[1] >= 0):
        raise ConfigurationError(
            f"--level {text}: write workers, GB/s of a GPU and microseconds a message, such as 8:400:5"
        )
    return int(workers), Link(link[0] * 1e9, link[1] * 1e-6)


def _number(text: str) -> float:
    """A finite number; -1 for anything else."""
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


@dataclass(frozen=True)
class MigrationSettings:
    """The model, the GPUs and the links between them."""

    data_centres: tuple[int, ...]
    outer: tuple[Link, ...]
    """The links between data centres: one line of results each."""
    inner: tuple[tuple[int, Link], ...]
    """Workers and links of each level inside a data centre, the outermost first."""
    tokens: int
    """Tokens of a GPU."""
    hidden: int
    ffn_hidden: int
    topk: int
    experts_per_gpu: int
    gated: bool
    sequence: int
    dense_layers: int
    """Dense layers before each MoE layer."""
    element_bytes: int
    """Bytes of an element of tokens, weights and gradients that travel."""
    flops: float
    """Operations a second that a GPU reaches."""
    compression_ratio: float
    """Bytes of experts over bytes that travel of them."""
    gradient_compression_ratio: float
    backward: bool
    """Whether the backward pass is counted too."""
    domain: int
    """The fixed domain size, in data centres."""
    p: float
    """The fixed proportion of what leaves a data centre as tokens."""

    def workers(self, data_centres: int) -> tuple[int, ...]:
        """Returns the workers of each level."""
        return (data_centres, *(number for number, _ in self.inner))

    def links(self, outer: Link) -> tuple[Link, ...]:
        """Returns the link of each level."""
        return (outer, *(link for _, link in self.inner))

    def layer(self) -> MigrationLayer:
        """Returns the layer by eqs. 1 and 2, and what travels. A backward pass computes twice as
        much as its forward pass.
        """
        speed = self.flops / 2  # multiply-adds
        attention = attention_seconds(self.tokens, self.hidden, self.sequence, speed)
        dense = ffn_seconds(self.tokens, self.hidden, self.ffn_hidden, self.gated, speed)
        experts = ffn_seconds(self.tokens * self.topk, self.hidden, self.ffn_hidden, self.gated, speed)
        before = pre_expert_seconds(attention, dense, self.dense_layers)
        matrices = 3 if self.gated else 2
        size = self.experts_per_gpu * matrices * self.hidden * self.ffn_hidden * self.element_bytes
        travels = math.ceil(size / self.compression_ratio)
        passes = [TimedPass(travels, pre_expert_seconds=before, expert_seconds=experts)]
        if self.backward:
            gradients = math.ceil(size / self.gradient_compression_ratio)
            seconds = {"pre_expert_seconds": 2 * before, "expert_seconds": 2 * experts}
            passes.append(TimedPass(gradients, Kind.REDUCE_SCATTER, **seconds))
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
    """The choice with domain size 1 at every level: only tokens travel."""
    fixed_domain: DomainChoice
    fixed_p: DomainChoice
    """The choice with the realisable proportion that is nearest to the one asked for."""
    least: DomainChoice

    def speedup(self, choice: DomainChoice) -> float:
        """Returns the speed-up of a choice over stock."""
        return self.stock_seconds / choice.seconds


def scale(settings: MigrationSettings, layer: MigrationLayer, outer: Link, data_centres: int) -> Scale:
    """Returns what one row of results is about."""
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


def report_migration(settings: MigrationSettings, output: Path | None) -> None:
    """Prints a table for every bandwidth between data centres, and draws the picture.

    Raises:
        ConfigurationError: settings that contradict each other, or a file that cannot be written.
    """
    check_output_file("--output", output)
    if output is not None:
        check_picture(output)
    _check(settings)
    layer = settings.layer()
    scales = {
        link: [scale(settings, layer, link, number) for number in settings.data_centres] for link in settings.outer
    }
    console = report_console()
    for line in _heading(settings, layer):
        say(console, line)
    for link, rows in scales.items():
        console.print(_table(settings, layer, link, rows))
    if output is not None:
        draw_migration(output, settings, scales, traffic(settings))
        say_written(output, console)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends between data centres, by tokens of a GPU; of the first number of data centres."""

    data_centres: int
    tokens: tuple[int, ...]
    stock: tuple[float, ...]
    migration: dict[Link, tuple[float, ...]]
    """The bytes of the fastest choice, by link."""


def traffic(settings: MigrationSettings) -> Traffic:
    """Returns the traffic from a sixteenth to 16 times the tokens of a GPU, with the computation of each."""
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
    table = table_of(
        f"{link.bandwidth / 1e9:g} GB/s of a GPU between data centres, {link.latency * 1e6:g} us a message",
        ("data centres", "", "domain", "p", "ms", "speed-up", "sent (MB)", "held"),
        names=2,
        caption="domain: workers that share experts, at each level; p: proportion, between data centres, that travels "
        "as tokens; sent: by a GPU between data centres; held: experts on a GPU",
    )
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


def draw_migration(
    path: Path, settings: MigrationSettings, scales: Mapping[Link, Sequence[Scale]], traffic: Traffic
) -> None:
    """Three panels side by side, one line a bandwidth; the file's format follows from its suffix.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    sent, fixed_domain, fixed_p = figure.subplots(1, 3)
    sent.plot(traffic.tokens, [size / 1e6 for size in traffic.stock], "k--", label="stock alltoall")
    for link, sizes in traffic.migration.items():
        sent.plot(traffic.tokens, [size / 1e6 for size in sizes], marker=".", label=_name(link))
    sent.set(
        title=f"sent between {traffic.data_centres} data centres, fastest domains",
        xlabel="tokens of a GPU",
        ylabel="MB of a GPU",
        xscale="log",
        yscale="log",
    )
    for axis, title, choice in (
        (fixed_domain, f"domains of {settings.domain} data centres", lambda one: one.fixed_domain),
        (fixed_p, f"proportion p near {settings.p:g}", lambda one: one.fixed_p),
    ):
        for link, rows in scales.items():
            rows = sorted(rows, key=lambda one: one.data_centres)
            numbers = [one.data_centres for one in rows]
            axis.plot(numbers, [one.speedup(choice(one)) for one in rows], marker=".", label=_name(link))
        axis.axhline(1.0, color="grey", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="data centres", ylabel="speed-up over stock alltoall", xscale="log", yscale="log")
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(LogFormatter())  # leaves out what would crowd
    for axis in (sent, fixed_domain, fixed_p):
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)


def _name(link: Link) -> str:
    return f"{link.bandwidth / 1e9:g} GB/s"


if __name__ == "__main__":
    main(app, "tools.predictions.data_centres")
