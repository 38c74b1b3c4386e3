"""Partitions and memory reuse of `mpmoe`, chosen: by a model of the cluster, or by passes of the layers themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.partitioning import FixedPartitioning, Partitioning, Partitions
from megatron_moe_opt.dispatchers.pipelining import agreed_cluster
from megatron_moe_opt.dispatchers.say import say, say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.configuration_search import Configuration, ConfigurationSearch
from megatron_moe_opt.planning.choosing.mpmoe_choice import choices, least_partitions, refuse_budget, similar_rows
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.monta import ChoiceByRows
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.engine.pass_clock import PassClock
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing, saved_tensors_are_hooked
from megatron_moe_opt.systems.system import PREFIX
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.group_cache import cached_by_group

TURNS = 4
"""Passes of each configuration of a trial, forward and backward. Its first trial has one more, which does not count:
buffers are new in it."""
STEPS = 1000
"""What the time of trials is compared with."""


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
    candidates = Candidates(layer, counts, strategies, options.activation_budget)
    if options.partition_tuner == "model":
        return ModelPartitioning(groups, options.profile, candidates)
    return MeasuredPartitioning(groups, candidates)


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
        chosen = choice.partitions, choice.strategy

        def line() -> str:
            times = {(one.partitions, one.strategy): one.prediction.seconds for one in candidates}
            return _line(number, chosen, "predicted", times)

        say_once("mpmoe", (self.candidates, chosen), line)
        return Partitions(*chosen)

    def describe(self) -> str:
        """For the line at start."""
        return f"the fastest of {self.candidates} by the model of {self.profile}"


class MeasuredPartitioning:
    """The fastest of a few that the layers' own first passes try (MPMoE, Algorithm 1).

    All ranks of the joint group take part in every pass, in the same order, and so have as many timed passes whenever
    they begin one: that number decides when a trial ends. Its times are the largest that any of them had. They are
    told the same number of rows, too, and so try, and choose, alike.
    """

    def __init__(self, groups: ExpertGroups, candidates: Candidates) -> None:
        self.groups = groups
        self.chosen: Configuration | None = None
        """What the last pass ran with, where that is the choice; None: it was a trial."""
        self._tuner = _tuner(groups, candidates)

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """As Partitioning.choose. Ends a trial that has had its passes, with a collective call over the joint group.

        Raises:
            ConfigurationError: nothing fits into the budget; or the pass repeats one whose graph is used, and must be
                cut as that was.
        """
        if saved_tensors_are_hooked() and is_recomputing():
            raise ConfigurationError(
                f"{PREFIX}partitions and {PREFIX}memory-reuse are chosen by trials, in which no pass is cut like the "
                "one before it, and torch.utils.checkpoint with use_reentrant=False repeats passes as they were: name "
                f"what the log shows as chosen, use {PREFIX}tuner model, or use_reentrant=True"
            )
        partitions = self._tuner.choose(rows(), self.groups)
        self.chosen = None if partitions.finished is not None else (partitions.count, partitions.strategy)
        return partitions

    def describe(self) -> str:
        """For the line at start."""
        return f"the fastest of {self._tuner.candidates} in trials of the first passes"


@dataclass
class _Tuner:
    """One for all layers that choose from the same candidates: what one measures, the others need not."""

    candidates: Candidates
    trials: dict[int, _Trial] = field(default_factory=dict)
    """By number of rows, the one that is under way."""
    ended: dict[int, list[_Trial]] = field(default_factory=dict)
    deciding: float = 0.0
    """Seconds spent on agreeing."""

    def __post_init__(self) -> None:
        of = self.candidates
        self.search = ConfigurationSearch(
            of.strategies,
            lambda rows, strategy: least_partitions(of.layer, rows, strategy, of.counts, of.budget),
            of.counts,
        )

    def choose(self, rows: int, groups: ExpertGroups) -> Partitions:
        rows = similar_rows(rows)  # a number that changes a little is not searched for anew
        trial = self.trials.get(rows)
        if trial is None or trial.has_ended:
            trial = self._next_trial(rows, trial, groups)
        if trial is None:
            return Partitions(*self.search.chosen[rows])
        return trial.next_pass()

    def _next_trial(self, rows: int, ended: _Trial | None, groups: ExpertGroups) -> _Trial | None:
        """The one that is run from now on; None: the choice is made."""
        if ended is not None:
            start = time.perf_counter()
            ended.agree(groups)
            self.deciding += time.perf_counter() - start
            for configuration, seconds in ended.seconds.items():
                self.search.measured(rows, configuration, seconds[ended.skipped(configuration) :])
            self.ended.setdefault(rows, []).append(ended)
            del self.trials[rows]
        if not self.search.allowed(rows):
            of = self.candidates
            raise refuse_budget(of.layer, rows, of.counts, of.strategies, of.budget)
        configurations = self.search.trial(rows)
        if not configurations:
            if ended is not None:
                self._report(rows)
            return None
        new = [one for one in configurations if one not in self.search.seconds(rows)]
        self.trials[rows] = _Trial(configurations, frozenset(new))
        return self.trials[rows]

    def _report(self, rows: int) -> None:
        times = self.search.seconds(rows)
        chosen = self.search.chosen[rows]
        passes = [seconds for trial in self.ended.pop(rows) for of in trial.seconds.values() for seconds in of]
        took, self.deciding = self.deciding + sum(passes), 0.0
        if chosen in times:
            lost = took - len(passes) * times[chosen]
            overhead = (
                f"{len(passes)} passes of trials took {lost * 1e3:.1f} ms more than they would have as chosen, "
                f"{lost / (STEPS * times[chosen]):.2%} of {STEPS} passes"
            )
        else:  # meanwhile other numbers of rows have settled it
            overhead = f"{len(passes)} passes of trials ended when it was the choice for more and for fewer rows"
        say("mpmoe", f"{_line(rows, chosen, 'measured', times)}; {overhead}")


class _Trial:
    """Passes of several configurations in turns, timed."""

    def __init__(self, configurations: Sequence[Configuration], new: frozenset[Configuration]) -> None:
        self.seconds: dict[Configuration, list[float]] = {one: [] for one in configurations}
        """Of passes that have ended, in the order in which they did; before `agree` only of this rank's."""
        self._new = new
        self._clocks: dict[Configuration, list[PassClock]] = {one: [] for one in configurations}
        self._begun = dict.fromkeys(configurations, 0)

    @property
    def has_ended(self) -> bool:
        """Every configuration has had its passes."""
        return all(len(clocks) >= TURNS + self.skipped(one) for one, clocks in self._clocks.items())

    def skipped(self, configuration: Configuration) -> int:
        """The number of its passes that do not count."""
        return int(configuration in self._new)

    def next_pass(self) -> Partitions:
        """Of the configuration that has ended fewest, then begun fewest: passes without a backward pass never end."""
        one = min(self._begun, key=lambda one: (len(self._clocks[one]), self._begun[one]))
        self._begun[one] += 1
        return Partitions(*one, self._clocks[one].append)

    def agree(self, groups: ExpertGroups) -> None:
        """A pass takes as long as on its slowest rank. A collective call over the joint group."""
        own = [clock.seconds for clocks in self._clocks.values() for clock in clocks]
        times = torch.tensor(own, dtype=torch.float64, device=device_of(groups.joint))
        dist.all_reduce(times, dist.ReduceOp.MAX, group=groups.joint)
        counts = [len(clocks) for clocks in self._clocks.values()]
        parts = times.cpu().split(counts)
        self.seconds = {one: part.tolist() for one, part in zip(self._clocks, parts, strict=True)}


@cached_by_group
def _tuner(groups: ExpertGroups, candidates: Candidates) -> _Tuner:
    return _Tuner(candidates)


@cached_by_group
def _choices(groups: ExpertGroups, profile: Path, of: Candidates) -> ChoiceByRows:
    """One table for all layers of a process that have the same candidates."""
    cluster = agreed_cluster(groups, profile)
    return choices(of.layer, cluster, of.counts, of.strategies, of.budget)


def _listed(ones: Sequence[object]) -> str:
    *others, last = map(str, ones)
    return f"{', '.join(others)} or {last}" if others else last


def _line(rows: int, chosen: Configuration, how: str, times: dict[Configuration, float]) -> str:
    partitions, strategy = chosen
    by_time = sorted(times, key=lambda configuration: times[configuration])
    listed = ", ".join(f"{n}x{strategy} {times[n, strategy] * 1e3:.2f}" for n, strategy in by_time[:8])
    return (
        f"about {rows} rows a rank: {partitions} partition{'s' * (partitions > 1)}, memory reuse {strategy}; {how} ms "
        f"a layer, forward and backward: {listed}"
    )
