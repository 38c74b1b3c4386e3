"""How many partitions and which memory reuse: the least of what the simulator says (MPMoE, section IV-B).

Every number of partitions and every strategy is played, forward and backward, on the lanes that training uses, with the
measured piecewise linear curves (Fig. 9) and slowdowns (alpha, section II-C). The paper's three paradigms are what is
left where nothing but S, C, R and M takes time (tools/mpmoe_formulas.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.mpmoe import STRATEGIES, PartitionRows, RowBytes

from .cluster import Cluster
from .equal_times import fewest_of_equal
from .expert_costs import costs_with_experts
from .layer_workload import LayerWorkload
from .memory import expert_middle_width
from .monta import ChoiceByRows
from .partition_search import PARTITIONS
from .simulator import simulate


def row_bytes(layer: LayerWorkload) -> RowBytes:
    """What a row of the layer takes on its way and in its experts, Megatron's own PyTorch ones."""
    middle = layer.element_bytes * layer.ffn * expert_middle_width(layer.gated, layer.fused)
    return RowBytes(layer.packed_row_bytes, layer.row_bytes, middle)


def partitions(layer: LayerWorkload, rows: int, count: int) -> list[PartitionRows]:
    """Equal parts of a rank's rows, where every rank has as many."""
    own = -(-rows // count)
    return [PartitionRows(own, own * layer.etp)] * count


def activation_bytes(layer: LayerWorkload, rows: int, count: int, strategy: str) -> int:
    """What forward and backward hold of T_I, T_DI, T_M, T_DO and T_O (eq. 2; less eq. 5 where memory is reused)."""
    part, row = partitions(layer, rows, count)[0], row_bytes(layer)
    own, gathered = part.own * count * row.token, part.gathered * row.token
    two, one = (min(2, count), 1) if STRATEGIES[strategy].reuses else (count, count)
    return 2 * own + 2 * two * gathered + one * part.gathered * row.middle


@dataclass(frozen=True)
class MpmoeChoice:
    """A number of partitions, a strategy, and what a layer then takes and holds."""

    partitions: int
    strategy: str
    seconds: float
    """Of the forward and backward schedules, predicted, with what each partition takes besides."""
    activation_bytes: int

    def __str__(self) -> str:
        plural = "s" * (self.partitions > 1)
        return f"{self.partitions} partition{plural}, memory reuse {self.strategy}"


_RANGES = ChoiceByRows(lambda rows: rows)


def similar_rows(rows: int) -> int:
    """One number for all that share a choice: the geometric middle of their range."""
    return _RANGES[rows]


def most_rows(rows: int) -> int:
    """The largest number that shares a choice with `rows`: what a budget has to hold."""
    return _RANGES.range_of(rows)[-1]


def predict(
    layer: LayerWorkload,
    rows: int,
    cluster: Cluster,
    counts: Sequence[int] = PARTITIONS,
    strategies: Sequence[str] = tuple(STRATEGIES),
) -> tuple[MpmoeChoice, ...]:
    """Every strategy and, within it, every number of partitions, in the order given.

    Args:
        rows: (token, expert) pairs of each rank. Memory is that of `most_rows`.

    Raises:
        ConfigurationError: a curve is missing.
    """
    costs, most, row = costs_with_experts(layer, cluster), most_rows(rows), row_bytes(layer)
    found = []
    for strategy in strategies:
        for count in counts:
            parts = partitions(layer, rows, count)
            schedules = [build(strategy, parts, row, layer.ep, layer.etp) for build in (mpmoe.forward, mpmoe.backward)]
            seconds = sum(simulate(schedule, costs, cluster.slowdown).seconds for schedule in schedules)
            seconds += (count - 1) * cluster.partition_overhead
            found.append(MpmoeChoice(count, strategy, seconds, activation_bytes(layer, most, count, strategy)))
    return tuple(found)


def choose(candidates: Sequence[MpmoeChoice], budget: int | None = None) -> MpmoeChoice | None:
    """The fastest whose activations fit into `budget` bytes; None where none does.

    Of times within EQUAL_WITHIN of the least, fewer partitions win, then the faster, then the earlier. The same
    candidates give the same choice on every rank.
    """
    fitting = [one for one in candidates if budget is None or one.activation_bytes <= budget]
    if not fitting:
        return None
    return fewest_of_equal([(one.seconds, one.partitions, one) for one in fitting])


def choices(
    layer: LayerWorkload,
    cluster: Cluster,
    counts: Sequence[int] = PARTITIONS,
    strategies: Sequence[str] = tuple(STRATEGIES),
    budget: int | None = None,
) -> ChoiceByRows[tuple[MpmoeChoice, tuple[MpmoeChoice, ...]]]:
    """The choice for every number of rows, and the candidates that it was made from.

    Looking one up raises ConfigurationError where nothing fits into the budget (see `refuse_budget`).
    """

    def choose_for(rows: int) -> tuple[MpmoeChoice, tuple[MpmoeChoice, ...]]:
        candidates = predict(layer, rows, cluster, counts, strategies)
        choice = choose(candidates, budget)
        if choice is None:
            raise refuse_budget(layer, rows, counts, strategies, budget)
        return choice, candidates

    return ChoiceByRows(choose_for)


def least_partitions(
    layer: LayerWorkload, rows: int, strategy: str, counts: Sequence[int] = PARTITIONS, budget: int | None = None
) -> int | None:
    """The fewest partitions whose activations of `most_rows` fit into `budget` bytes; None: no number does."""
    most = most_rows(rows)
    fitting = (n for n in counts if budget is None or activation_bytes(layer, most, n, strategy) <= budget)
    return next(fitting, None)


def refuse_budget(
    layer: LayerWorkload, rows: int, counts: Sequence[int], strategies: Sequence[str], budget: int | None
) -> ConfigurationError:
    """What to say where nothing fits."""
    most = most_rows(rows)
    needs, count, strategy = min(
        (activation_bytes(layer, most, n, strategy), n, strategy) for n in counts for strategy in strategies
    )
    return ConfigurationError(
        f"--moe-opt-activation-budget {budget} is too little for up to {most} rows a rank: {count} partition(s) with "
        f"memory reuse {strategy} take least, {needs} bytes; raise the budget, allow more partitions or reuse, or "
        "train on fewer tokens at once"
    )
