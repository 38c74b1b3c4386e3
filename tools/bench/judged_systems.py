"""What tools/bench/choice.py judges: the candidates of each system, and how it comes to choose among them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatron_moe_opt.cli.bench.balance import routing_balance
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.timing import slowest
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.choosing.choice import Choice, choose, schedule_seconds, with_rows
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes
from megatron_moe_opt.planning.predicting.skew import rows_as_even
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES
from megatron_moe_opt.schedules.mpmoe import PARTITIONS
from megatron_moe_opt.schedules.parm import SCHEDULES
from megatron_moe_opt.systems.monta import MONTA, MontaOptions
from megatron_moe_opt.systems.mpmoe import MPMOE, MpmoeOptions
from megatron_moe_opt.systems.parm import PARM
from megatron_moe_opt.systems.system import SharedOptions, System

if TYPE_CHECKING:
    from megatron_moe_opt.integration.auto.controller import Controller

CHUNKS = (2, 4, 8, 16)
STEPS = 1000
"""The number of steps that the time of choosing is compared with."""


@dataclass(frozen=True)
class Chosen:
    """What one way to choose has led to."""

    by: str
    candidate: str
    predicted: float | None = None
    """Seconds of the schedules of a step; of parm, with the AllGathers at the layer's edge; of auto, of the layer."""
    overhead: float | None = None
    """Seconds that choosing took, or that trials took longer than as many steps of the chosen one."""
    predictions: Mapping[str, float] = field(default_factory=dict)
    """The same as `predicted`, of all candidates that it was chosen from; empty where they are not handed on."""


class Chooser(ABC):
    """A system with something to choose, as tools/bench/choice.py asks it."""

    dispatch_only = False
    """Whether its candidates differ in dispatch and combine alone."""
    recorded = False
    """Whether all that `predicted` counts is recorded as schedules."""
    whole_layer = False
    """Whether `predicted` counts all that a step of the layer does."""
    candidates: tuple[str, ...]
    """Its variants, as `moe-opt bench` takes them."""

    def measured(self, settings: LayerSettings, device: torch.device) -> tuple[str, ...]:
        """Returns the candidates to measure for the settings' tokens. A collective call."""
        return self.candidates

    def allowed(self, settings: LayerSettings) -> tuple[str, ...]:
        """Returns the candidates among which a choice for the settings' tokens is made."""
        return self.candidates

    @abstractmethod
    def choose(
        self, settings: LayerSettings, cluster: Cluster, seconds: Mapping[str, float], device: torch.device
    ) -> list[Chosen]:
        """Returns what it chooses for the settings' tokens, by each way that it has. A collective call.

        Args:
            seconds: that a step of each candidate was measured to take, to tell what trials cost; not to choose by.
        """


class ProfileChooser(Chooser):
    """Chooses among the candidates of systems by the profile."""

    recorded = True

    def __init__(self, asked: Sequence[tuple[System, SharedOptions]], candidates: Sequence[str]) -> None:
        """
        Args:
            asked: see planning.choosing.choice.choose.
        """
        self.asked, self.candidates = asked, tuple(candidates)

    def choose(
        self, settings: LayerSettings, cluster: Cluster, seconds: Mapping[str, float], device: torch.device
    ) -> list[Chosen]:
        """Returns the choice that the profile's predictions lead to."""
        start = time.perf_counter()
        chosen = self._choice(settings, cluster, device).chosen
        (took,) = slowest([time.perf_counter() - start], device)
        return [Chosen("model", self._as_measured(chosen.variant), schedule_seconds(chosen), took)]

    def _choice(self, settings: LayerSettings, cluster: Cluster, device: torch.device) -> Choice:
        return choose(self.asked, settings.workload(), cluster)

    def _as_measured(self, variant: str) -> str:
        """Returns the name that a variant has among the candidates."""
        return variant


class MontaChooser(ProfileChooser):
    """Chooses monta's level and chunk count."""

    dispatch_only = True

    def __init__(self, chunks: Sequence[int] = CHUNKS) -> None:
        several = [(level, count) for level in ("O2", "O3") for count in chunks if count > 1]
        options = [MontaOptions(monta_level="O1"), *(MontaOptions(monta_level=one, chunks=n) for one, n in several)]
        super().__init__([(MONTA, one) for one in options], [MONTA.variant(one) for one in options])


class ParmChooser(MontaChooser):
    """Chooses parm's schedule, or one of monta's levels behind the split, for tokens that all TP ranks hold."""

    dispatch_only = recorded = False

    def __init__(self, chunks: Sequence[int] = CHUNKS) -> None:
        super().__init__(chunks)
        self.asked = [(PARM, PARM.open_options), *self.asked]
        self.candidates += tuple(f"parm:{schedule}" for schedule in SCHEDULES)


class MpmoeChooser(ProfileChooser):
    """Chooses partitions and memory reuse.

    Raises:
        ConfigurationError: an unknown strategy, or nothing to choose from.
    """

    def __init__(self, counts: Sequence[int] = PARTITIONS, reuse: str = NONE, budget: int | None = None) -> None:
        if reuse not in (*STRATEGIES, AUTO):
            raise ConfigurationError(f"--reuse {reuse}: choose one of {', '.join(STRATEGIES)}, or {AUTO}")
        options = MpmoeOptions(partitions=tuple(sorted(set(counts))), memory_reuse=reuse)
        self.counts, self.strategies, self.budget = options.partition_counts, options.memory_strategies, budget
        named = [f"mpmoe:{count}:{strategy}" for strategy in self.strategies for count in self.counts]
        super().__init__([(MPMOE, options)], named)

    def allowed(self, settings: LayerSettings) -> tuple[str, ...]:
        """Returns what fits into the budget."""
        layer = settings.workload()
        return tuple(
            f"mpmoe:{count}:{strategy}"
            for strategy in self.strategies
            for count in self.counts
            if self.budget is None or activation_bytes(layer, layer.rows, count, strategy) <= self.budget
        )

    def _choice(self, settings: LayerSettings, cluster: Cluster, device: torch.device) -> Choice:
        layer = settings.workload()
        if settings.capacity_factor is None:  # as the dispatcher goes by the rows of a pass
            of_world = routing_balance(settings, device).of_rank
            rows = [of_world[rank] // settings.expert_tp for rank in cluster.world.layout.groups("ep")[0]]
            layer = with_rows(layer, rows_as_even(rows, cluster))
        return choose(self.asked, layer, cluster, self.budget)

    def _as_measured(self, variant: str) -> str:
        return variant if variant.count(":") == 2 else f"{variant}:{NONE}"


class AutoChooser(Chooser):
    """Chooses among all systems: as planned from the profile, and as kept after trials."""

    whole_layer = True
    candidates = (AUTO,)
    of_each_system = 2
    """How many variants are measured besides what auto tries, those with the least predictions: of each system, and as
    many of each whose tokens hop.
    """
    hopeless = 3.0
    """The multiple of the fastest prediction above which a variant is not measured, unless auto tried it."""

    def __init__(self, besides: Sequence[str] = ()) -> None:
        """
        Args:
            besides: variants that are measured whatever is predicted for them.
        """
        self._controller: Controller | None = None
        self._besides = besides
        self._measured: tuple[str, ...] = ()

    def measured(self, settings: LayerSettings, device: torch.device) -> tuple[str, ...]:
        """Has auto choose, and returns what it tried, what was predicted to be fast, and what is measured besides."""
        from megatron_moe_opt.integration.auto.auto_layer import current_controller
        from megatron_moe_opt.integration.measuring.under_test import layer_under_test

        layer_under_test(settings, AUTO, device)
        self._controller = current_controller()
        predicted, trials = self._controller.turns.alike.predicted, self._controller.turns.trials
        of_families: dict[tuple[str, bool], list[str]] = {}
        for one in predicted:
            if one.seconds <= self.hopeless * predicted[0].seconds:
                is_hopping = "hops" in one.variant
                of_families.setdefault((one.family, is_hopping), []).append(one.variant)
        fastest = [variant for variants in of_families.values() for variant in variants[: self.of_each_system]]
        self._measured = tuple(dict.fromkeys([*trials.times, *fastest, *self._besides]))
        return self._measured

    def allowed(self, settings: LayerSettings) -> tuple[str, ...]:
        """Returns what is measured, stock too."""
        return self._measured

    def choose(
        self, settings: LayerSettings, cluster: Cluster, seconds: Mapping[str, float], device: torch.device
    ) -> list[Chosen]:
        """Returns what auto planned and kept when `measured` was called."""
        controller, alike = self._controller, self._controller.turns.alike
        predictions = {one.variant: one.seconds for one in alike.predicted if one.variant in seconds}
        planned, kept = alike.planned, controller.layers.current
        return [
            Chosen("plan", planned, predictions[planned], None, predictions),
            Chosen("auto", kept, None, controller.overhead),
        ]


def chooser_of(
    system: str | None, counts: Sequence[int] | None = None, reuse: str = NONE, budget: int | None = None
) -> Chooser:
    """Returns the chooser that the options of tools/bench/choice.py ask for.

    Args:
        system: whose option was given: --replicated (parm's), --mpmoe or --auto; None: monta's choice.
        counts: of chunks or partitions; None for the system's own.

    Raises:
        ConfigurationError: options that contradict each other.
    """
    if system == "--auto":
        if counts is not None or reuse != NONE or budget is not None:
            raise ConfigurationError("--auto chooses from all: drop --chunks, --reuse and --activation-budget")
        return AutoChooser()
    if system == "--mpmoe":
        return MpmoeChooser(PARTITIONS if counts is None else counts, reuse, budget)
    if reuse != NONE or budget is not None:
        raise ConfigurationError("--reuse and --activation-budget are mpmoe's: add --mpmoe, or drop them")
    return (ParmChooser if system == "--replicated" else MontaChooser)(CHUNKS if counts is None else counts)
