"""The level and the number of chunks in which a dispatcher pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from megatron_moe_opt.dispatchers.agreed_profile import agreed_choices, agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.choice import schedule_seconds
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.variants import split_variant


class Pipelining(Protocol):
    """Says how the next layer's rows are pipelined. All ranks that share a process group must be told alike."""

    @property
    def current(self) -> tuple[str, int]:
        """Returns the level (O1, O2 or O3) and the number of chunks."""

    def observe(self, counts: torch.Tensor) -> None:
        """Learns what is being sent; may change `current` for the next pass.

        Args:
            counts: int64 [ep_size, etp_size, experts] on the CPU, the same on all ranks of the layer's groups.
        """

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""


def pipelining_of(options: Options, groups: ExpertGroups, layer: LayerWorkload) -> Pipelining:
    """Returns the pipelining that the options ask for: fixed, or chosen by a profile.

    Raises:
        ConfigurationError: a profile that cannot be read, or that was measured with groups of other sizes.
    """
    levels, chunks = options.levels, options.chunk_counts
    if chunks is not None and len(levels) == 1:
        return FixedPipelining(levels[0], chunks[0])
    return MeasuredPipelining(options, groups, replace(layer, tp=1))  # it gets tokens that are split


class FixedPipelining:
    """Chooses the level and the chunks that the user asked for."""

    def __init__(self, level: str, num_chunks: int) -> None:
        self.current = level, num_chunks

    def observe(self, counts: torch.Tensor) -> None:
        """Takes no notice of the pass, as level and chunks are fixed."""

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        level, num_chunks = self.current
        return f"level {level}" + (f" in {num_chunks} chunks" if num_chunks > 1 else "")


class MeasuredPipelining:
    """Chooses the pipelining that is fastest according to a profile, for the number of rows that the last pass had
    (MoNTA, Algorithm 3).

    The ranks of a layer's groups have one of them read the profile and know each other's counts, so they choose alike.
    The first pass, before which there are no counts, takes the first level and chunk count there are to choose from.
    """

    def __init__(self, options: Options, groups: ExpertGroups, layer: LayerWorkload) -> None:
        self.options, self.groups, self.layer, self.profile = options, groups, layer, options.profile
        first = options.levels[0]
        self.current = first, 1 if first == "O1" else (options.chunk_counts or (1,))[0]
        agreed_cluster(groups, self.profile, layer)

    def observe(self, counts: torch.Tensor) -> None:
        """Chooses for the mean number of rows of a rank."""
        rows = int(counts.sum()) // (self.groups.ep_size * self.groups.etp_size)
        chosen = agreed_choices(self.groups, "monta", self.options, self.layer)[rows].chosen
        _, options = split_variant(chosen.variant, None)
        pipeline = options.levels[0], options.chunk_counts[0]
        if pipeline != self.current:
            self.current = pipeline
            say_once(
                "monta",
                pipeline,  # not its rows, which differ from pass to pass: a run would say it, and keep it, as often
                lambda: (
                    f"about {rows} rows a rank: level {pipeline[0]}, {pipeline[1]} chunk(s); predicted "
                    f"{schedule_seconds(chosen) * 1e3:.2f} ms a layer for dispatch and combine, forward and backward"
                ),
            )

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return f"level and chunks chosen from {self.profile}"
