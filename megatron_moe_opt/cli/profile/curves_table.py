"""The table that `moe-opt profile` prints of what it measured."""

from __future__ import annotations

from rich.table import Table

from megatron_moe_opt.cli.console import table_of
from megatron_moe_opt.planning.costs.bus_bandwidth import Bus, bus_of
from megatron_moe_opt.planning.costs.cluster import Cluster, Points
from megatron_moe_opt.schedules.schedule import Kind, Lane


def curves_table(cluster: Cluster) -> Table:
    """Returns a table with one section a curve: algbw and busbw as nccl-tests defines them, and busbw over the best
    rate of sends over the slowest links of the group. The efficiency is that of the rate, over the best rate of the
    same curve.
    """
    headers = ("op", "size", "ms", "algbw", "busbw", "of link peak", "efficiency")
    table = table_of("Cost curves", headers, caption=_between_ops(cluster))
    for name, (points, bus) in _named_curves(cluster).items():
        rates = [size / seconds for size, seconds in points]
        cells = [
            (_bytes(size), seconds, f"{size / seconds / 1e9:.3f} GB/s", *_of_bus(bus, size, seconds))
            for size, seconds in points
        ]
        _add_curve(table, name, cells, rates)
    if cluster.expert_gemm is not None:
        gemm = cluster.expert_gemm
        passes = {"": (1, gemm.points), ", forward and backward": (3, gemm.training or ())}
        for name, (times, points) in passes.items():
            rates = [times * gemm.flops(rows) / seconds for rows, seconds in points]
            cells = [
                (f"{rows} rows", seconds, f"{rate / 1e12:.3f} TFLOP/s", "", "")
                for (rows, seconds), rate in zip(points, rates, strict=True)
            ]
            _add_curve(table, f"expert {gemm.hidden} x {gemm.ffn_hidden} {gemm.dtype}{name}", cells, rates)
    return table


def interference_table(cluster: Cluster) -> Table:
    """Returns the pace that the lane of a row keeps while that of a column is busy: what the simulator plays."""
    lanes = [lane for lane in Lane if any(lane in key for key in cluster.slowdown)]
    several = [
        f"{lane.value} beside {' and '.join(other.value for other in others)} {rate:.0%}"
        for (lane, *others), rate in cluster.slowdown.items()
        if len(others) > 1
    ]
    table = table_of(
        "Interference: the pace that a lane keeps while another is busy",
        ("lane", *(f"beside {lane.value}" for lane in lanes)),
        caption=f"Beside several at once: {', '.join(several)}." if several else None,
    )
    for lane in lanes:
        rates = (cluster.slowdown.get((lane, other)) for other in lanes)
        table.add_row(lane.value, *("-" if rate is None else f"{rate:.0%}" for rate in rates))
    return table


def _named_curves(cluster: Cluster) -> dict[str, tuple[Points, Bus | None]]:
    """Returns the curves by name; roles whose groups are the same, and were measured once, share one."""
    groups: dict[tuple[Kind, Points], list[str | None]] = {}
    for (kind, group), points in cluster.curves.items():
        groups.setdefault((kind, points), []).append(group)
    curves = {
        f"{kind.value} {', '.join(name or '' for name in names)}".strip(): (points, bus_of(cluster, kind, names[0]))
        for (kind, points), names in groups.items()
    }
    return curves | ({} if cluster.saa is None else {"SAA": (cluster.saa, None)})


def _of_bus(bus: Bus | None, size: int, seconds: float) -> tuple[str, str]:
    """Returns the bus bandwidth and the part of the link's peak that it reaches, as texts; empty where not known."""
    if bus is None:
        return "", ""
    rate = bus.bandwidth(size, seconds)
    return f"{rate / 1e9:.3f} GB/s", "" if bus.peak is None else f"{rate / bus.peak:.0%}"


def _add_curve(table: Table, name: str, cells: list[tuple[str, float, str, str, str]], rates: list[float]) -> None:
    for index, ((size, seconds, *shown), rate) in enumerate(zip(cells, rates, strict=True)):
        cells_of_row = "" if index else name, size, f"{seconds * 1e3:.3f}", *shown, f"{rate / max(rates):.0%}"
        table.add_row(*cells_of_row, end_section=index == len(cells) - 1)


def _between_ops(cluster: Cluster) -> str:
    return (
        f"An op of a pipeline takes {cluster.overhead * 1e3:.3f} ms besides. A rank that computes alone on its node is "
        f"{cluster.compute_sharing:.2f} times as fast as with the others."
    )


def _bytes(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
