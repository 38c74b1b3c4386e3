"""At which level, and in how many chunks, a dispatcher pipelines."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.planning.monta import CHUNKS, Choice, ChoiceByRows, choose, training_passes
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class Pipelining(Protocol):
    """Says how the next layer's rows are pipelined. All ranks that share a process group must be told alike."""

    @property
    def current(self) -> tuple[str, int]:
        """Level (O1, O2 or O3) and number of chunks."""

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

    def __init__(self, level: str, num_chunks: int) -> None:
        self.current = level, num_chunks

    def observe(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        """Changes nothing."""

    def describe(self) -> str:
        """For the line at start."""
        level, num_chunks = self.current
        return f"level {level}" + (f" in {num_chunks} chunks" if num_chunks > 1 else "")


class MeasuredPipelining:
    """The fastest according to a profile, for the number of rows that the last pass had (MoNTA, Algorithm 3).

    The ranks of a layer's groups know each other's counts, so they choose alike. The first pass, before which there
    are none, takes the first level and chunk count there are to choose from.
    """

    def __init__(self, profile: Path, groups: ExpertGroups, levels: tuple[str, ...], chunks: tuple[int, ...]) -> None:
        _cluster(profile).check_groups(profile, ep=groups.ep_size, expert_tp=groups.etp_size)
        self.profile, self.levels, self.chunks = profile, levels, chunks
        self.current = levels[0], chunks[0]

    def observe(self, counts: torch.Tensor, packed: torch.Tensor) -> None:
        """Chooses for the mean number of rows of a rank."""
        ep_size, etp_size, _ = counts.shape
        packed_row_bytes = packed.size(1) * packed.element_size()
        table = _choices(self.profile, self.levels, self.chunks, ep_size, etp_size, packed_row_bytes)
        choice = table[int(counts.sum()) // (ep_size * etp_size)]
        self.current = choice.level, choice.chunks

    def describe(self) -> str:
        """For the line at start."""
        return f"level and chunks chosen from {self.profile}"


@functools.cache
def _cluster(profile: Path) -> Cluster:
    return Cluster.load(profile)


@functools.cache
def _choices(
    profile: Path, levels: tuple[str, ...], chunks: tuple[int, ...], ep_size: int, etp_size: int, packed_row_bytes: int
) -> ChoiceByRows:
    """One table for all layers of a process; says on rank 0 what it chooses."""
    cluster = _cluster(profile)
    costs = cluster.costs()

    def choose_for(rows: int) -> Choice:
        passes = training_passes(rows, packed_row_bytes - LANE_BYTES, packed_row_bytes)
        choice = choose(passes, ep_size, etp_size, costs, cluster.slowdown, levels, chunks)
        if dist.get_rank() == 0:
            print(
                f"moe-opt: monta: about {rows} rows a rank: level {choice.level}, {choice.chunks} chunk(s); predicted "
                f"{choice.seconds * 1e3:.2f} ms a layer for dispatch and combine, forward and backward",
                flush=True,
            )
        return choice

    return ChoiceByRows(choose_for)
