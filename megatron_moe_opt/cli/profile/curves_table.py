"""The table that `moe-opt profile` prints of what it measured."""

from __future__ import annotations

from rich.table import Table

from megatron_moe_opt.cli.console import table_of
from megatron_moe_opt.planning.costs.cluster import Cluster, Points
from megatron_moe_opt.schedules.schedule import Kind


def curves_table(cluster: Cluster) -> Table:
    """Returns a table with one section a curve. The efficiency is that of the rate, over the best rate of the same
    curve.
    """
    table = table_of("Cost curves", ("op", "size", "ms", "rate", "efficiency"), caption=_between_ops(cluster))
    for name, points in _named_curves(cluster).items():
        rates = [size / seconds for size, seconds in points]
        cells = [(_bytes(size), seconds, f"{size / seconds / 1e9:.3f} GB/s") for size, seconds in points]
        _add_curve(table, name, cells, rates)
    if cluster.expert_gemm is not None:
        gemm = cluster.expert_gemm
        passes = {"": (1, gemm.points), ", forward and backward": (3, gemm.training or ())}
        for name, (times, points) in passes.items():
            rates = [times * gemm.flops(rows) / seconds for rows, seconds in points]
            cells = [
                (f"{rows} rows", seconds, f"{rate / 1e12:.3f} TFLOP/s")
                for (rows, seconds), rate in zip(points, rates, strict=True)
            ]
            _add_curve(table, f"expert {gemm.hidden} x {gemm.ffn_hidden} {gemm.dtype}{name}", cells, rates)
    return table


def _named_curves(cluster: Cluster) -> dict[str, Points]:
    """Returns the curves by name; roles whose groups are the same, and were measured once, share one."""
    groups: dict[tuple[Kind, Points], list[str]] = {}
    for (kind, group), points in cluster.curves.items():
        groups.setdefault((kind, points), []).append(group or "")
    curves = {f"{kind.value} {', '.join(names)}".strip(): points for (kind, points), names in groups.items()}
    of_stock = {f"{kind.value} {group} as stock": points for (kind, group), points in cluster.stock_curves.items()}
    return curves | of_stock | ({} if cluster.saa is None else {"SAA": cluster.saa})


def _add_curve(table: Table, name: str, cells: list[tuple[str, float, str]], rates: list[float]) -> None:
    for index, ((size, seconds, shown), rate) in enumerate(zip(cells, rates, strict=True)):
        cells_of_row = "" if index else name, size, f"{seconds * 1e3:.3f}", shown, f"{rate / max(rates):.0%}"
        table.add_row(*cells_of_row, end_section=index == len(cells) - 1)


def _between_ops(cluster: Cluster) -> str:
    rates = [
        f"{lane.value} beside {' and '.join(other.value for other in others)} {rate:.0%}"
        for (lane, *others), rate in cluster.slowdown.items()
    ]
    beside = f"Pace of a lane while others are busy: {', '.join(rates)}. " if rates else ""
    return (
        f"{beside}An op of a pipeline takes {cluster.overhead * 1e3:.3f} ms besides, a partition of mpmoe "
        f"{cluster.partition_overhead * 1e3:.3f} ms. A rank that computes alone on its node is "
        f"{cluster.compute_sharing:.2f} times as fast as with the others."
    )


def _bytes(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
