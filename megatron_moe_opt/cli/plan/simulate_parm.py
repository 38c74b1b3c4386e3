"""`moe-opt simulate`: what `parm` would take, its tokens split or replicated over TP, and the paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rich.table import Table

from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.planning.curves import AlphaBeta
from megatron_moe_opt.planning.monta import AS_IN_TRAINING
from megatron_moe_opt.planning.parm import ParmChoice, ParmFits, ParmLayer, algorithm_1, choose, predict


def parm_report(layer: ParmLayer, tokens: int, cluster: Cluster) -> Iterator[Table | str]:
    """What to print.

    Args:
        layer: with the TP size of the model.
        tokens: of a rank under sequence parallelism; without it every rank of a TP group has all of theirs.

    Raises:
        ConfigurationError: a curve is missing.
    """
    yield _candidates_table(layer, tokens, cluster)
    if layer.tp > 1:
        fits = ParmFits.of(cluster)
        yield _fits_table(fits)
        t_d1, t_d2 = fits.seconds(layer, tokens * layer.tp)
        yield (
            f"Parm's Algorithm 1, without sequence parallelism: t_D1 {t_d1 * 1e3:.3f} ms, t_D2 {t_d2 * 1e3:.3f} ms: "
            f"{algorithm_1(layer, tokens * layer.tp, fits)}"
        )


def _candidates_table(layer: ParmLayer, tokens: int, cluster: Cluster) -> Table:
    ways = {"sequence parallel (ms)": (replace(layer, tp=1), tokens)}
    if layer.tp > 1:
        ways["replicated tokens (ms)"] = layer, tokens * layer.tp
    found = {way: predict(*of_way, cluster) for way, of_way in ways.items()}
    chosen = {way: choose(*of_way, cluster, **AS_IN_TRAINING) for way, of_way in ways.items()}
    by_name = {way: {str(one): one for one in candidates} for way, candidates in found.items()}
    table = Table(
        title="Dispatch and combine of a layer, forward and backward",
        caption="replicated tokens: with the AllGather over TP of the output, and of the input's gradient",
    )
    table.add_column("parm")
    for way in ways:
        table.add_column(way, justify="right")
        table.add_column("")
    for name in {name: None for names in by_name.values() for name in names}:
        table.add_row(name, *_cells(name, by_name, chosen))
    return table


def _cells(
    name: str, by_name: Mapping[str, Mapping[str, ParmChoice]], chosen: Mapping[str, ParmChoice]
) -> Iterator[str]:
    for way, candidates in by_name.items():
        yield f"{candidates[name].seconds * 1e3:.3f}" if name in candidates else "-"
        yield "chosen" if name == str(chosen[way]) else ""


def _fits_table(fits: ParmFits) -> Table:
    table = Table(title="Lines of Algorithm 1: alpha + beta * bytes")
    table.add_column("collective")
    for header in ("alpha (ms)", "beta (ms/MB)", "R²", "largest error"):
        table.add_column(header, justify="right")
    lines: dict[str, AlphaBeta] = {
        "EP&ESP-AlltoAll": fits.all_to_all,
        "MP-AllGather": fits.all_gather,
        "SAA": fits.saa,
    }
    for name, line in lines.items():
        table.add_row(
            name,
            f"{line.alpha * 1e3:.4f}",
            f"{line.beta * 1e9:.4f}",
            f"{line.r_squared:.4f}",
            f"{line.largest_error:.1%}",
        )
    return table
