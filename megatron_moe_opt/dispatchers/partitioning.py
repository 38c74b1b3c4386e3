"""The number of partitions in which a layer's rows go through its experts, and how partitions share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_moe_opt.dispatchers.agreed_profile import agreed_choices, agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.skew import rows_as_even
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.mpmoe import HOPS, JOINT, PARTITIONS, ROWS, SHARED_ROWS
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.variants import split_variant


@dataclass(frozen=True)
class Partitions:
    """How one pass of a layer is cut, forward and backward."""

    count: int
    """Number of partitions, 1 or more."""
    strategy: str = NONE
    """The strategy by which partitions share memory: a key of schedules.memory_reuse.STRATEGIES."""
    way: str = ROWS
    """The way that the partitions take to their experts: one of the options' ways."""
    chunks: int = 1
    """The number of chunks in which each partition goes, by rows."""

    def __str__(self) -> str:
        chunks = f" in {self.chunks} chunks each" if self.chunks > 1 else ""
        count = f"{self.count} partition{'s' * (self.count > 1)}{chunks}"
        return f"{count}, memory reuse {self.strategy}{_IN_WORDS[self.way]}"

    @classmethod
    def of(cls, options: Options) -> Partitions:
        """Returns the first partitioning among those that options leave to choose from."""
        chunks = options.partition_chunks[0]
        return cls(options.partition_counts[0], options.memory_strategies[0], options.ways[0], chunks)


_IN_WORDS = {
    ROWS: "",
    HOPS: ", a token once over every link",
    JOINT: ", in one all-to-all to all shards of an expert",
    SHARED_ROWS: ", rows shared out over TP",
}


class Partitioning(Protocol):
    """Says how the next pass of a layer is cut. All ranks of the layer's joint group must be told alike."""

    def choose(self, rows: Callable[[], Sequence[int]]) -> Partitions:
        """Returns how the pass that begins is cut, and all later ones until the next call. Every rank of the joint
        group calls it at the start of the same forward passes.

        Args:
            rows: returns how many rows the experts of each rank of the expert-parallel group got in the pass for which
                it was called last (in the first, that they get), a row for each expert of a token, before expert-TP
                peers have gathered them: the same on all ranks of the layer's joint group. A collective call.
        """

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""


def partitioning_of(options: Options, groups: ExpertGroups, layer: LayerWorkload) -> Partitioning:
    """Returns the partitioning that the options ask for: fixed, or chosen by a profile.

    Raises:
        ConfigurationError: a profile that cannot be read, or that was measured with groups of other sizes.
    """
    if not options.tunes_partitions:
        return FixedPartitioning(Partitions.of(options))
    return MeasuredPartitioning(groups, options, layer)


class FixedPartitioning:
    """Chooses the partitioning that the user asked for."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    def choose(self, rows: Callable[[], Sequence[int]]) -> Partitions:
        """Returns the fixed partitioning, whatever the pass."""
        return self._partitions

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return str(self._partitions)


class MeasuredPartitioning:
    """Chooses the partitioning that is fastest according to a profile, for the number of rows that it is told of.

    The ranks of a layer's groups have one of them read the profile, and are told the same number of rows.
    """

    def __init__(self, groups: ExpertGroups, options: Options, layer: LayerWorkload) -> None:
        """Reads the profile on one rank for all. A collective call over the joint group; raises
        ConfigurationError as agreed_cluster does.
        """
        self.groups, self.options, self.layer = groups, options, layer
        self._cluster = agreed_cluster(groups, options.profile, layer)

    def choose(self, rows: Callable[[], Sequence[int]]) -> Partitions:
        """Chooses as Partitioning.choose says. Raises ConfigurationError where nothing fits into the budget."""
        number = rows_as_even(rows(), self._cluster)
        choice = agreed_choices(self.groups, "mpmoe", self.options, self.layer)[number]
        _, options = split_variant(choice.chosen.variant, None)
        chosen = Partitions.of(options)

        def line() -> str:
            by_time = sorted(choice.among, key=lambda one: one.seconds)
            listed = ", ".join(f"{one.variant} {one.seconds * 1e3:.2f}" for one in by_time[:8])
            return f"about {number} rows a rank: {chosen}; predicted ms a layer, forward and backward: {listed}"

        say_once("mpmoe", (self.layer, chosen), line)
        return chosen

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        counts, strategies, budget = (
            self.options.partition_counts, self.options.memory_strategies, self.options.activation_budget
        )  # fmt: skip
        numbers = f"{counts[0]} to {counts[-1]}" if counts == PARTITIONS else _listed(counts)
        fitting = f" that fit into {budget} bytes" if budget is not None else ""
        what = f"{numbers} partitions, memory reuse {_listed(strategies)}, by {_listed(self.options.ways)}{fitting}"
        return f"the fastest of {what} by the profile {self.options.profile}"


def _listed(ones: Sequence[object]) -> str:
    *others, last = map(str, ones)
    return f"{', '.join(others)} or {last}" if others else last
