"""How many partitions and which memory reuse: the least of what the simulator says (MPMoE, section IV-B).

Every number of partitions and every strategy is played, forward and backward, on the lanes that training uses, with the
measured piecewise linear curves (Fig. 9) and slowdowns (alpha, section II-C). The paper's three paradigms are what is
left where nothing but S, C, R and M takes time (tools/mpmoe_formulas.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import PIPELINE, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.monta import ChoiceByRows
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes, partitions, row_bytes
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES


@dataclass(frozen=True)
class MpmoeChoice:
    """A number of partitions, a strategy, and what a layer then takes and holds."""

    partitions: int
    strategy: str
    prediction: Prediction
    """Of the whole layer: the planner's own."""
    compared: float
    """Seconds of the forward and backward schedules, with what each partition takes besides in a small layer. Other
    systems are not compared with that: it would make larger layers too slow beside them."""
    activation_bytes: int
    """For all numbers of rows that share the choice."""

    def __str__(self) -> str:
        plural = "s" * (self.partitions > 1)
        return f"{self.partitions} partition{plural}, memory reuse {self.strategy}"


_RANGES = ChoiceByRows(lambda rows: rows)


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
    """Returns every strategy and, within it, every number of partitions, in the order given.

    Args:
        rows: (token, expert) pairs of each rank. Memory is that of `most_rows`.

    Raises:
        ConfigurationError: a curve is missing.
    """
    tokens = -(-rows // layer.topk) * layer.tp
    on_cluster = LayerOnCluster(replace(layer, tokens=tokens, capacity_factor=None), cluster)
    most, found = most_rows(rows), []
    for strategy in strategies:
        for count in counts:
            prediction = candidate(on_cluster, count, strategy)
            compared = prediction.terms.get(PIPELINE, 0.0) + (count - 1) * cluster.partition_overhead
            held = activation_bytes(layer, most, count, strategy)
            found.append(MpmoeChoice(count, strategy, prediction, compared, held))
    return tuple(found)


def candidate(layer: LayerOnCluster, count: int, strategy: str) -> Prediction:
    """Returns what the layer takes in so many partitions.

    Expert-TP's collectives of each run in a lane of their own beside the all-to-alls, as MoNTA's do.

    Raises:
        ConfigurationError: a curve is missing.
    """
    one, row = layer.workload, row_bytes(layer.workload)
    computed, exchanged = (partitions(one, rows, count) for rows in (layer.computed, layer.exchanged))
    parts = [replace(part, own=other.own) for part, other in zip(computed, exchanged, strict=True)]
    schedules = [build(strategy, parts, row, one.ep, one.etp) for build in (mpmoe.forward, mpmoe.backward)]
    held = activation_bytes(one, one.rows, count, strategy)
    return replace(layer.prediction(f"mpmoe:{setting(count, strategy)}", schedules, layer.edge), activation_bytes=held)


def setting(count: int, strategy: str) -> str:
    """Returns the two in one word, as the variants of mpmoe are written: `4`, or `4:S3` where memory is reused."""
    return str(count) if strategy == NONE else f"{count}:{strategy}"


def choose(candidates: Sequence[MpmoeChoice], budget: int | None = None) -> MpmoeChoice | None:
    """The fastest whose activations fit into `budget` bytes; None where none does.

    Of times within EQUAL_WITHIN of the least, fewer partitions win, then the faster, then the earlier. The same
    candidates give the same choice on every rank.
    """
    fitting = [one for one in candidates if budget is None or one.activation_bytes <= budget]
    if not fitting:
        return None
    return fewest_of_equal([(one.compared, one.partitions, one) for one in fitting])


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
