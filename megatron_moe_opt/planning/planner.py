"""What every system would take for a MoE layer, in one table, and which of them to run.

None of the five papers compares itself with the others. Here each says, with its own model, what it would do with the
same layer on the same measured cluster (`candidates` of its record in systems/); what is common to all, the experts and
the rows' handling on the rank itself, is added to those whose model leaves it out (layer_on_cluster.py). So they can be
ranked. Stock is the ops of MoNTA's O1 one after another, and stock's own handling of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import OURS, STOCK, Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, HeldMore, Prediction, Refusal, nothing_left
from megatron_moe_opt.planning.training.pipeline import OVERLAP
from megatron_moe_opt.row_format import Wire
from megatron_moe_opt.systems import SYSTEMS
from megatron_moe_opt.systems.system import PREFIX, System
from megatron_moe_opt.variants import kind_of

Beside = Callable[[Prediction], Prediction]
"""A function that returns what a candidate takes where it runs beside another micro-batch."""
WINS_BY = 0.03
"""The part of stock's time by which a candidate must be faster: less cannot be told from it, and stock is taken."""


def candidates(
    workload: LayerWorkload,
    cluster: Cluster,
    budget: int | None = None,
    wires: Sequence[Wire] = (),
    below: float = math.inf,
    has_room: Callable[[HeldMore], bool] | None = None,
    beside: Beside | None = None,
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Returns every candidate that the cluster's measurements cover, the fastest first, and what is left out.

    The same inputs give the same answer on every rank.

    Args:
        budget: bytes of activations. What holds more is refused; stock is not.
        wires: formats of rows on the wire that are predicted besides the rows' own. Each system that can send them is
            also a candidate with each of these.
        below: seconds. A candidate that is known to take as long as that, or longer, is left out.
        has_room: whether a GPU can hold so much more of each layer than stock's. With it only the `best` of those that
            fit is asked for: what is known not to be that one is left out.
        beside: micro-batches overlap: what is asked for are those candidates that Megatron can run so, all of them,
            since it is not known what they hide.

    Raises:
        ConfigurationError: the cluster has no expert measured, or lacks what all candidates need; or all that could run
            hold more than the budget.
    """
    cluster.check_expert()  # whole layers are compared
    if beside is not None:
        below, has_room = math.inf, None
    layer = LayerOnCluster(workload, cluster, below, has_room or (lambda more: True))
    found: list[Prediction] = []
    systems, refused = _asked(beside)
    too_large: list[Prediction] = []
    asked = [(system.name, system.candidates(layer, system.open_options)) for system in systems]
    for wire in wires:
        narrowed = LayerOnCluster(replace(workload, wire=wire), cluster, below)
        asked += [(f"{one.name}:{wire.word}", _narrowed(one, narrowed)) for one in systems if one.reads_option("wire")]
    for name, of_system in ((ALLTOALL, _stock(layer)), *asked):
        try:
            for one in of_system:
                if isinstance(one, Refusal):
                    refused.append(one)
                elif budget is not None and one.activation_bytes > budget and one.variant != ALLTOALL:
                    reason = f"holds {one.activation_bytes} bytes of activations, more than the budget of {budget}"
                    refused.append(Refusal(one.variant, reason))
                    too_large.append(one)
                else:
                    found.append(beside(one) if beside else one)
                    if has_room is not None and has_room(one.held_more):
                        layer.below = min(layer.below, one.seconds * (1 - WINS_BY * (one.variant == ALLTOALL)))
        except ConfigurationError as error:
            refused.append(Refusal(name, str(error)))
    if too_large and not found:
        least = min(too_large, key=lambda one: one.activation_bytes)
        raise ConfigurationError(
            f"--activation-budget {budget} (in training {PREFIX}activation-budget) is too little: {least.variant} "
            f"holds least, {least.activation_bytes} bytes of activations; raise it to that, or leave it out"
        )
    if not found:
        raise nothing_left(refused)
    return tuple(sorted(found, key=lambda one: one.seconds)), tuple(refused)


def fastest_narrowed(
    workload: LayerWorkload,
    cluster: Cluster,
    budget: int | None,
    wires: Sequence[Wire],
    beside: Beside | None = None,
) -> dict[Wire, Prediction]:
    """Returns the fastest candidate with each of these formats of rows, as `candidates` has them; no others are asked
    for, nor what is known not to be the fastest.
    """
    fastest: dict[Wire, Prediction] = {}
    systems = [system for system in _asked(beside)[0] if system.reads_option("wire")]
    for wire in wires:
        layer, least = LayerOnCluster(replace(workload, wire=wire), cluster), math.inf
        for system in systems:
            with suppress(ConfigurationError):  # what it needs was not measured
                for alone in _narrowed(system, layer):
                    one = beside(alone) if beside else alone
                    if one.seconds < least and (budget is None or one.activation_bytes <= budget):
                        fastest[wire], least = one, one.seconds
                        if beside is None:
                            layer.below = least
    return fastest


def _asked(beside: Beside | None) -> tuple[list[System], list[Refusal]]:
    """Returns the systems that are asked for candidates, and refusals of those that run beside no other micro-batch."""
    planned = [system for system in SYSTEMS if system.candidates]
    asked = [system for system in planned if beside is None or system.overlaps_batches]
    why = f"does not run with {OVERLAP}, which calls dispatch and combine by themselves"
    return asked, [Refusal(system.name, why) for system in planned if system not in asked]


def _narrowed(system: System, layer: LayerOnCluster) -> Iterator[Prediction]:
    """Yields the candidates of a system whose rows are narrower on the wire, under names that say so."""
    for one in system.candidates(layer, system.open_options):
        if not isinstance(one, Refusal):  # what is refused is so whatever the wire
            yield replace(one, variant=f"{one.variant}:{layer.workload.wire.word}")


def bound_and_stock(
    workload: LayerWorkload, cluster: Cluster, budget: int | None = None, beside: Beside | None = None
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Returns two predictions of stock, and no refusals: a lower bound for every candidate (experts and work on the
    rank, no communication), then stock as it is, or beside another micro-batch.

    Raises ConfigurationError where stock does not train.
    """
    layer = LayerOnCluster(workload, cluster)
    (stock,) = _stock(layer)
    if isinstance(stock, Refusal):
        raise ConfigurationError(f"{stock.variant}: {stock.reason}")
    alone = layer.local_timeline(OURS, -(-workload.tokens // workload.tp))
    least = alone.seconds + sum(layer.seconds_of_experts(workload.rows_of(1.0)))
    bound = replace(stock, seconds=min(least, stock.seconds), exposed=0.0)
    return (bound, beside(stock) if beside else stock), ()


def best(
    predictions: Sequence[Prediction], seconds: Callable[[Prediction], float] = lambda one: one.seconds
) -> Prediction:
    """Returns the fastest; stock, where it is among them and nothing is faster by WINS_BY of its time.

    Args:
        seconds: that are compared.
    """
    fastest = min(predictions, key=seconds)
    stock = next((one for one in predictions if one.variant == ALLTOALL), None)
    if stock is not None and seconds(fastest) > seconds(stock) * (1 - WINS_BY):
        return stock
    return fastest


def in_fewest_parts(chosen: Prediction, predictions: Sequence[Prediction]) -> Prediction:
    """Returns, of the candidates of the chosen one's kind that are predicted to take as long, that in the fewest chunks
    or partitions, to begin trials with: predictions are no better, and trials go on from there.
    """
    kind = kind_of(chosen.variant)
    return fewest_of_equal([(one.seconds, one.parts, one) for one in predictions if kind_of(one.variant) == kind])


def _stock(layer: LayerOnCluster) -> Iterator[Prediction | Refusal]:
    if layer.workload.tp > 1:
        yield Refusal(ALLTOALL, "stock Megatron does not train MoE layers under TP without sequence parallelism")
        return
    yield layer.played(ALLTOALL, layer.stock_timelines(), STOCK)
