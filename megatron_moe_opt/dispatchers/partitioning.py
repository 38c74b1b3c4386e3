"""In how many partitions a layer's rows go through its experts, and how partitions share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_moe_opt.dispatchers.pipelining import agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.mpmoe_choice import choices
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.monta import ChoiceByRows
from megatron_moe_opt.schedules.mpmoe import NONE
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.group_cache import cached_by_group


@dataclass(frozen=True)
class Partitions:
    """How one pass of a layer is cut, forward and backward."""

    count: int
    """From 1 on."""
    strategy: str = NONE
    """A key of schedules.mpmoe.STRATEGIES."""


class Partitioning(Protocol):
    """Says how the next pass of a layer is cut. All ranks of the layer's joint group must be told alike."""

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """Called by every rank of the joint group at the start of every forward pass.

        Args:
            rows: returns the mean number of rows that a rank has, the same on all ranks of the layer's joint group; on
                CUDA it waits for the routing to reach the host, which otherwise happens after the rows are packed.
        """

    def describe(self) -> str:
        """For the line at start."""


@dataclass(frozen=True)
class Candidates:
    """What there is to choose from for a layer; the same for all layers that share what they learn."""

    layer: LayerWorkload
    counts: tuple[int, ...]
    strategies: tuple[str, ...]
    budget: int | None = None
    """Bytes of activations."""

    def __str__(self) -> str:
        counts = f"{self.counts[0]} to {self.counts[-1]}" if self.counts == PARTITIONS else _listed(self.counts)
        budget = f" that fit into {self.budget} bytes" if self.budget is not None else ""
        return f"{counts} partitions, memory reuse {_listed(self.strategies)}{budget}"


def partitioning_of(options: Options, groups: ExpertGroups, layer: LayerWorkload) -> Partitioning:
    """What the options ask for: fixed, or chosen.

    Raises:
        ConfigurationError: a profile that cannot be read, or that was measured with groups of other sizes.
    """
    counts, strategies = options.partition_counts, options.memory_strategies
    if not options.tunes_partitions:
        return FixedPartitioning(counts[0], strategies[0])
    return ModelPartitioning(groups, options.profile, Candidates(layer, counts, strategies, options.activation_budget))


class FixedPartitioning:
    """What the user asked for."""

    def __init__(self, count: int, strategy: str) -> None:
        self._partitions = Partitions(count, strategy)

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """The same for every pass."""
        return self._partitions

    def describe(self) -> str:
        """For the line at start."""
        count, strategy = self._partitions.count, self._partitions.strategy
        return f"{count} partition{'s' * (count > 1)}, memory reuse {strategy}"


class ModelPartitioning:
    """The fastest by the model of the measured cluster, for the number of rows that a pass has.

    The ranks of a layer's groups have one of them read the profile, and are told the same number of rows.
    """

    def __init__(self, groups: ExpertGroups, profile: Path, candidates: Candidates) -> None:
        """A collective call over the joint group. Raises ConfigurationError as agreed_cluster does."""
        self.groups, self.profile, self.candidates = groups, profile, candidates
        agreed_cluster(groups, profile)

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """As Partitioning.choose. Raises ConfigurationError where nothing fits into the budget."""
        number = rows()
        choice, candidates = _choices(self.groups, self.profile, self.candidates)[number]
        chosen = Partitions(choice.partitions, choice.strategy)

        def line() -> str:
            by_time = sorted(candidates, key=lambda one: one.prediction.seconds)
            listed = [f"{one.partitions}x{one.strategy} {one.prediction.seconds * 1e3:.2f}" for one in by_time[:8]]
            return (
                f"about {number} rows a rank: {choice}; predicted ms a layer, forward and backward: {', '.join(listed)}"
            )

        say_once("mpmoe", (self.candidates, chosen), line)
        return chosen

    def describe(self) -> str:
        """For the line at start."""
        return f"the fastest of {self.candidates} by the model of {self.profile}"


@cached_by_group
def _choices(groups: ExpertGroups, profile: Path, of: Candidates) -> ChoiceByRows:
    """One table for all layers of a process that have the same candidates."""
    cluster = agreed_cluster(groups, profile)
    return choices(of.layer, cluster, of.counts, of.strategies, of.budget)


def _listed(ones: Sequence[object]) -> str:
    *others, last = map(str, ones)
    return f"{', '.join(others)} or {last}" if others else last
