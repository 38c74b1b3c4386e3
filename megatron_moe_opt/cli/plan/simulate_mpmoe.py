"""`moe-opt simulate`: what `mpmoe` would take and hold, by number of partitions and memory reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.planning.mpmoe_choice import MpmoeChoice, MpmoeLayer, choose, predict
from megatron_moe_opt.schedules.mpmoe import STRATEGIES


def mpmoe_report(layer: MpmoeLayer, rows: int, cluster: Cluster) -> Iterator[Table | str]:
    """What to print.

    Args:
        rows: (token, expert) pairs of each rank.

    Raises:
        ConfigurationError: no expert was measured, or a curve is missing.
    """
    candidates = predict(layer, rows, cluster)
    chosen = choose(candidates)
    yield _candidates_table(candidates, chosen)
    yield f"mpmoe, without a budget: {chosen}"


def _candidates_table(candidates: Sequence[MpmoeChoice], chosen: MpmoeChoice) -> Table:
    table = Table(
        title="mpmoe: ms of dispatch, experts and combine of a layer, forward and backward",
        caption="by memory reuse; MB: activations, of as many rows as share a choice",
    )
    for header in ("partitions", *STRATEGIES, "MB", "reused"):
        table.add_column(header, justify="right")
    for count in dict.fromkeys(one.partitions for one in candidates):
        of_count = [one for one in candidates if one.partitions == count]
        table.add_row(
            str(count),
            *(f"{one.seconds * 1e3:.3f}" for one in of_count),
            *(_megabytes(of_count, reuses) for reuses in (False, True)),
            style="bold" if chosen in of_count else None,
        )
    return table


def _megabytes(candidates: Sequence[MpmoeChoice], reuses: bool) -> str:
    most = max(one.activation_bytes for one in candidates if STRATEGIES[one.strategy].reuses is reuses)
    return f"{most / 1e6:.1f}"
