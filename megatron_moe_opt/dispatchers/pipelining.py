"""At which level, and in how many chunks, a dispatcher pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from megatron_moe_opt.dispatchers.say import say_once, say_other_settings
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import MEGATRON_FLAGS, Cluster
from megatron_moe_opt.planning.predicting.monta import CHUNKS, ChoiceByRows, choices
from megatron_moe_opt.runtime.job.agreement import found_by_first
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.group_cache import cached_by_group


class Pipelining(Protocol):
    """Says how the next layer's rows are pipelined. All ranks that share a process group must be told alike."""

    @property
    def current(self) -> tuple[str | None, int]:
        """Level (O1, O2 or O3; None: Parm's one all-to-all, see runtime.ways) and number of chunks."""

    def observe(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        """Learns what is being sent; may change `current` for the next pass.

        Args:
            counts: int64 [ep_size, etp_size, experts] on the CPU, the same on all ranks of the layer's groups.
            packed: this rank's rows; only their width and dtype may be used, which all ranks share.
        """

    def describe(self) -> str:
        """For the line at start."""


def pipelining_of(options: Options, groups: ExpertGroups) -> Pipelining:
    """What the options ask for: fixed, or chosen from a profile.

    Raises:
        ConfigurationError: a profile that cannot be read, or that was measured with groups of other sizes.
    """
    levels, chunks = options.levels, options.chunk_counts
    if chunks is not None and len(levels) == 1:
        return FixedPipelining(levels[0], chunks[0])
    return MeasuredPipelining(options.profile, groups, levels, chunks or CHUNKS)


class FixedPipelining:
    """What the user asked for."""

    def __init__(self, level: str | None, num_chunks: int) -> None:
        self.current = level, num_chunks

    def observe(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        """Changes nothing."""

    def describe(self) -> str:
        """For the line at start."""
        level, num_chunks = self.current
        return f"level {level}" + (f" in {num_chunks} chunks" if num_chunks > 1 else "")


class MeasuredPipelining:
    """The fastest according to a profile, for the number of rows that the last pass had (MoNTA, Algorithm 3).

    The ranks of a layer's groups have one of them read the profile and know each other's counts, so they choose alike.
    The first pass, before which there are no counts, takes the first level and chunk count there are to choose from.
    """

    def __init__(self, profile: Path, groups: ExpertGroups, levels: tuple[str, ...], chunks: tuple[int, ...]) -> None:
        self.profile, self.groups, self.levels, self.chunks = profile, groups, levels, chunks
        self.current = levels[0], 1 if levels[0] == "O1" else chunks[0]
        agreed_cluster(groups, profile)

    def observe(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        """Chooses for the mean number of rows of a rank."""
        rows = int(counts.sum()) // (self.groups.ep_size * self.groups.etp_size)
        packed_row_bytes = packed.size(1) * packed.element_size()
        choice = _choices(self.groups, self.profile, self.levels, self.chunks, packed_row_bytes)[rows]
        if (choice.level, choice.chunks) != self.current:
            self.current = choice.level, choice.chunks
            say_once(
                "monta",
                choice,
                lambda: (
                    f"about {rows} rows a rank: level {choice.level}, {choice.chunks} chunk(s); predicted "
                    f"{choice.seconds * 1e3:.2f} ms a layer for dispatch and combine, forward and backward"
                ),
            )

    def describe(self) -> str:
        """For the line at start."""
        return f"level and chunks chosen from {self.profile}"


@cached_by_group
def agreed_cluster(groups: ExpertGroups, profile: Path) -> Cluster:
    """The profile as the first rank of the joint group reads it. A collective call over that group, once.

    Raises ConfigurationError, on all of them, if it cannot be read or was measured with groups of other sizes.
    """

    def read() -> Cluster:
        cluster = Cluster.load(profile)
        cluster.check_groups(profile, MEGATRON_FLAGS, ep=groups.ep_size, expert_tp=groups.etp_size)
        say_other_settings("profile", profile, cluster.gpu_settings)
        return cluster

    return found_by_first(read, groups.joint)


@cached_by_group
def _choices(
    groups: ExpertGroups, profile: Path, levels: tuple[str, ...], chunks: tuple[int, ...], packed_row_bytes: int
) -> ChoiceByRows:
    """One table for all layers of a process."""
    cluster, row_bytes = agreed_cluster(groups, profile), packed_row_bytes - LANE_BYTES
    return choices(cluster, groups.ep_size, groups.etp_size, row_bytes, packed_row_bytes, levels, chunks)
