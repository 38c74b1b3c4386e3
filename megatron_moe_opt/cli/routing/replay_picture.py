"""The picture of `moe-opt replay-routing`: reductions and moved samples over training, as in NetMoE's Fig. 10."""

from __future__ import annotations

from pathlib import Path

from megatron_moe_opt.output_file import written_whole
from megatron_moe_opt.planning.routing_replay import Replay
from megatron_moe_opt.planning.routing_trace import RoutingTrace


def draw_replay(path: Path, trace: RoutingTrace, done: Replay) -> None:
    """Two panels side by side, one line a placement; the file's format follows from its suffix.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    less, moved = figure.subplots(1, 2)
    stock = done.volumes["stock"][..., 0].sum(axis=1).clip(1)
    for plan in ("predicted", "oracle"):
        reduction = 1 - done.volumes[plan][..., 0].sum(axis=1) / stock
        less.plot(trace.iterations, reduction, marker=".", label=plan)
        for column, what in enumerate(("node", "device")):
            shares = done.moved[plan][..., column].mean(axis=1)
            moved.plot(trace.iterations, shares, marker=".", label=f"{plan}, to another {what}")
    less.set(title="tokens between nodes, less than stock", xlabel="iteration")
    moved.set(title="samples that move", xlabel="iteration")
    for axis in (less, moved):
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    with written_whole(path) as partial:
        figure.savefig(partial, dpi=150)
