"""Chooses the expert domains of a layer by a profile, and says domains in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_moe_opt.dispatchers.agreed_profile import agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.predicting.expert_migration import DomainChoice
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.schedule import CODEC
from megatron_moe_opt.systems.expert_migration import fastest_domains
from megatron_moe_opt.topology.agreement import largest_of_ranks
from megatron_moe_opt.topology.domains import ExpertDomains, realisable
from megatron_moe_opt.topology.expert_groups import ExpertGroups

_GUESS = "; the profile has not measured the codec, which is counted as copies: measure again with moe-opt profile"


def describe_domains(domains: ExpertDomains) -> str:
    """Returns the ranks and domain sizes of every level in words, for the log."""
    return f"{_times(domains.workers)} ranks in expert domains of {_times(domains.sizes)}"


def _times(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


class MeasuredDomains:
    """Chooses the domains and chunks that are fastest by a profile, for as many tokens as the first pass has."""

    def __init__(
        self, profile: Path, groups: ExpertGroups, workload: LayerWorkload, counts: tuple[int, ...] | None = None
    ) -> None:
        """Reads the profile on one rank for all. A collective call over the groups.

        Args:
            workload: of a layer, of which all but the tokens is known.
            counts: the numbers of chunks to choose from; None: all.

        Raises:
            ConfigurationError: a profile of groups of other sizes, or without the curves of these levels.
        """
        self.profile, self.groups, self.workload, self._counts = profile, groups, workload, counts
        self._cluster = agreed_cluster(groups, profile, workload)
        is_coded = max(workload.compression, workload.gradient_compression) > 1
        self._guess = _GUESS if is_coded and CODEC - {kind for kind, _ in self._cluster.curves} else ""
        try:
            fastest_domains(replace(workload, tokens=1), self._cluster)
        except ConfigurationError as error:
            levels = _times(workload.workers)
            raise ConfigurationError(
                f"--moe-opt-profile {profile}: {error}; measure levels of {levels} ranks with moe-opt profile, "
                "or give --moe-opt-domain-sizes"
            ) from error

    def choose(self, tokens: int, device: torch.device) -> DomainChoice:
        """Chooses for the most tokens that a rank has, in replicas too: where experts travel, weights are gathered in
        another order. A collective call over the expert-parallel group and that of replicas.
        """
        number = largest_of_ranks(tokens, (self.groups.ep, self.groups.replicas), device)
        choice = fastest_domains(replace(self.workload, tokens=number), self._cluster, self._counts)
        say_once(
            "expert-migration",
            (number, choice),
            lambda: (
                f"{number} tokens a rank: {describe_domains(choice.domains)}, {choice.chunks} chunk(s) of tokens; "
                f"predicted {choice.seconds * 1e3:.2f} ms a layer, forward and backward{self._guess}"
            ),
        )
        return choice

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        workers = self.workload.workers
        number = sum(1 for _ in realisable(workers))
        return f"{_times(workers)} ranks in expert domains chosen from {self.profile} among {number}"
