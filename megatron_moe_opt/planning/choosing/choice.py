"""What a system runs where its options leave a choice: of its record's candidates the one that takes least.

All systems choose so, by the predictions that plans, timelines and `auto` show. Of a layer's time only that of its
schedules is compared: what else a layer does is the same for all candidates of a system.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import DISPATCH, PIPELINE, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal, nothing_left

if TYPE_CHECKING:
    from megatron_moe_opt.systems.system import System

    Asked = Sequence[tuple[System, Any]]
    """Systems, each with options that say what of it there is to choose from."""

ONE_CHUNK = 0.95
"""The part of a single chunk's predicted time that is compared with several chunks: ranks that are out of step overlap
stages by themselves, and the simulator plays them in step.
"""
_RATIO = 2**0.5
"""The upper over the lower end of a range of row counts that share a choice."""
_MOST_ROWS = 2**40


@dataclass(frozen=True)
class Choice:
    """The variant that was chosen, and the candidates that it was chosen from."""

    chosen: Prediction
    among: tuple[Prediction, ...]


def choose(
    asked: Asked, layer: LayerWorkload, cluster: Cluster, budget: int | None = None, most: LayerWorkload | None = None
) -> Choice:
    """Returns the candidate that takes least. The same inputs give the same choice on every rank.

    Of times within EQUAL_WITHIN of the least fewer chunks or partitions win, then the faster, then the earlier.

    Args:
        budget: bytes of activations that the choice may hold.
        most: the layer with as many tokens as the budget has to hold; None: with those of `layer`.

    Raises:
        ConfigurationError: nothing can run or fits into the budget, or the cluster lacks a curve.
    """
    found = fitting = tuple(_candidates(asked, layer, cluster))
    if budget is not None:
        held = {one.variant: one.activation_bytes for one in _candidates(asked, most or layer, cluster)}
        fitting = tuple(one for one in found if held[one.variant] <= budget)
        if not fitting:
            least = min(held, key=held.__getitem__)
            raise ConfigurationError(
                f"--moe-opt-activation-budget {budget} is too little for up to {(most or layer).rows} rows a rank: "
                f"{least} takes least, {held[least]} bytes; raise the budget, allow more partitions or reuse, or train "
                "on fewer tokens at once"
            )
    return Choice(fewest_of_equal([(_compared(one), one.parts, one) for one in fitting]), found)


def check_choice(asked: Asked, layer: LayerWorkload, cluster: Cluster) -> None:
    """Raises the ConfigurationError that `choose` would."""
    for _ in _candidates(asked, layer, cluster):
        pass


def schedule_seconds(one: Prediction) -> float:
    """Returns the part of a layer's time that its schedules take, in which candidates of a system differ."""
    return one.terms[PIPELINE] if PIPELINE in one.terms else one.terms.get(DISPATCH, 0.0)


def with_rows(layer: LayerWorkload, rows: int) -> LayerWorkload:
    """Returns the layer with as many tokens as make so many rows on each rank, where all are kept."""
    return replace(layer, tokens=-(-rows // layer.topk) * layer.tp, capacity_factor=None)


def _candidates(asked: Asked, layer: LayerWorkload, cluster: Cluster) -> Iterator[Prediction]:
    on_cluster, refused, found = LayerOnCluster(layer, cluster), [], False
    for system, options in asked:
        for one in system.candidates(on_cluster, options):
            if isinstance(one, Refusal):
                refused.append(one)
            else:
                found = True
                yield one
    if not found:
        raise nothing_left(refused)


def _compared(one: Prediction) -> float:
    """Returns the schedules' seconds as they are compared within a system."""
    return schedule_seconds(one) * (ONE_CHUNK if one.parts == 1 and PIPELINE not in one.terms else 1.0)


C = TypeVar("C")


class ChoiceByRows(Generic[C]):
    """A choice for every range of row counts, made once: a count that leaves a range gets the choice of the range that
    it enters.

    Ranges are the same for every rank and run; the choice of a range is that of its geometric middle. Row counts
    must be agreed by the ranks of a layer before they are looked up.
    """

    def __init__(self, choose_for: Callable[[int], C]) -> None:
        """`choose_for` gives the choice for a row count."""
        self._choose_for = choose_for
        self._begins = [0, 1]
        while self._begins[-1] < _MOST_ROWS:
            self._begins.append(max(self._begins[-1] + 1, round(self._begins[-1] * _RATIO)))
        self._choices: dict[int, C] = {}

    def range_of(self, rows: int) -> range:
        """Returns the range of row counts that share the choice of `rows`.

        Raises:
            ValueError: a row count that is negative or beyond the last range.
        """
        if not 0 <= rows < self._begins[-1]:
            raise ValueError(f"{rows} rows are not between 0 and {self._begins[-1] - 1}")
        index = bisect_right(self._begins, rows)
        return range(self._begins[index - 1], self._begins[index])

    def __getitem__(self, rows: int) -> C:
        """Returns the choice for `rows`. Raises ValueError as `range_of` does."""
        span = self.range_of(rows)
        if span.start not in self._choices:
            self._choices[span.start] = self._choose_for(math.isqrt(span.start * span[-1]))
        return self._choices[span.start]


def choices(asked: Asked, layer: LayerWorkload, cluster: Cluster, budget: int | None = None) -> ChoiceByRows[Choice]:
    """Returns the choice for every number of rows of a rank. A range's largest number has to fit into the budget.

    Looking one up raises ConfigurationError as `choose` does.
    """

    def choose_for(rows: int) -> Choice:
        most = with_rows(layer, table.range_of(rows)[-1])
        return choose(asked, with_rows(layer, rows), cluster, budget, most)

    table = ChoiceByRows(choose_for)
    return table
