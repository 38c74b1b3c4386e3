"""The picture of `moe-opt simulate-migration`: traffic over tokens, speed-ups over data centres.

The panels are HybridEP's Figs. 16, 17(a) and 17(b).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_moe_opt.cli.plan.migration_report import MigrationSettings, Scale, Traffic
from megatron_moe_opt.output_file import written_whole
from megatron_moe_opt.planning.expert_migration import Link


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
