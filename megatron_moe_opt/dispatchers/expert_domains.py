"""Which expert domains a layer has: as the user says, or by a profile."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.pipelining import agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.expert_migration import (
    MigrationLayer,
    least,
    measured_curves,
    predict,
)
from megatron_moe_opt.topology.domains import ExpertDomains, realisable
from megatron_moe_opt.topology.expert_groups import ExpertGroups


@dataclass(frozen=True)
class Volumes:
    """What decides between tokens and experts, of one rank."""

    tokens: int
    row_bytes: int
    """Of a token as it travels."""
    topk: int
    local_experts: int
    expert_bytes: int
    """Of all experts of a rank, as they travel."""
    gradient_bytes: int
    """Of their gradients."""

    def layer(self) -> MigrationLayer:
        """See MigrationLayer.alone."""
        return MigrationLayer.alone(**asdict(self))


class Choosing(Protocol):
    """Says what a layer's domains are. All ranks of an expert-parallel group must be told alike."""

    fixed: ExpertDomains | None
    """The domains, where they need not be chosen."""

    def choose(self, volumes: Volumes, device: torch.device) -> ExpertDomains:
        """The domains for all passes of a layer; asked once, at the first, where they are not fixed."""

    def describe(self) -> str:
        """For the line at start."""


class FixedDomains:
    """What the user asked for."""

    def __init__(self, domains: ExpertDomains) -> None:
        self.fixed = domains

    def choose(self, volumes: Volumes, device: torch.device) -> ExpertDomains:
        """The same for all layers."""
        return self.fixed

    def describe(self) -> str:
        """For the line at start."""
        return describe_domains(self.fixed)


def describe_domains(domains: ExpertDomains) -> str:
    """In words."""
    return f"{_times(domains.workers)} ranks in expert domains of {_times(domains.sizes)}"


def _times(numbers: tuple[int, ...]) -> str:
    return " x ".join(map(str, numbers))


class MeasuredDomains:
    """The fastest according to a profile, for as many tokens as the first pass has."""

    fixed = None

    def __init__(self, profile: Path, groups: ExpertGroups, workers: tuple[int, ...]) -> None:
        """A collective call over the groups.

        Raises:
            ConfigurationError: a profile of groups of other sizes, or without the curves of these levels.
        """
        self.profile, self.groups, self.workers = profile, groups, workers
        curves = measured_curves(agreed_cluster(profile, groups).costs(), workers)
        try:
            predict(Volumes(1, 1, 1, 1, 1, 1).layer(), workers, curves)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--moe-opt-profile {profile}: {error}; measure levels of {_times(workers)} ranks with moe-opt profile "
                "--domains, or give --moe-opt-domain-sizes"
            ) from error
        self._curves = curves

    def choose(self, volumes: Volumes, device: torch.device) -> ExpertDomains:
        """By the greatest number of tokens that a rank has. A collective call over the expert-parallel group."""
        tokens = torch.tensor(volumes.tokens, device=device)
        dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self.groups.ep)
        number = int(tokens)
        choice = least(predict(replace(volumes, tokens=number).layer(), self.workers, self._curves))
        say_once(
            "expert-migration",
            (number, choice),
            lambda: (
                f"{number} tokens a rank: {describe_domains(choice.domains)}; predicted {choice.seconds * 1e3:.2f} ms "
                "a layer for tokens and experts, forward and backward"
            ),
        )
        return choice.domains

    def describe(self) -> str:
        """For the line at start."""
        number = sum(1 for _ in realisable(self.workers))
        return f"{_times(self.workers)} ranks in expert domains chosen from {self.profile} among {number}"
