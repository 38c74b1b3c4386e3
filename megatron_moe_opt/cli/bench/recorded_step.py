"""One step of a layer, recorded op by op on all ranks: the step and the rank that are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_moe_opt.schedules.stages import PassInstants, whole_step
from megatron_moe_opt.schedules.timeline import Timeline, as_they_ran, numbered, one_after_another

if TYPE_CHECKING:
    import torch

    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest


@dataclass(frozen=True)
class RecordedStep:
    """The schedules that one rank ran in a step, in their order; none where its dispatcher runs no schedules."""

    rank: int
    timelines: tuple[Timeline, ...]
    """The recorded timelines; those that ran beside the others come last."""
    stages: tuple[PassInstants, ...] = ()
    """The stages of the layer, forward and backward; empty where they were not observed."""

    @property
    def schedules(self) -> tuple[Timeline, ...]:
        """The timelines of schedules, without what ran beside them."""
        return tuple(one for one in self.timelines if not one.is_beside)

    def whole(self, name: str) -> Timeline | None:
        """Returns the whole layer's step; without its stages `joined`; None where there is nothing to show."""
        if self.stages:
            return whole_step(name, self.stages, self.timelines)
        return self.joined(name) if self.timelines else None

    @property
    def seconds(self) -> float:
        """Returns the seconds from the layer's first stage to its last; those of its schedules
        without observed stages.
        """
        if self.stages:
            return max(one.end for one in self.stages) - min(one.begin for one in self.stages)
        return sum(one.seconds for one in self.schedules)

    def joined(self, name: str) -> Timeline:
        """Returns them one after another; what ran between them is left out, unless something ran beside them: then
        each is where it ran. A part is named by its number and schedule.
        """
        parts = numbered(self.timelines)
        return (one_after_another if len(self.schedules) == len(parts) else as_they_ran)(name, parts)


def record_step(
    layer: LayerUnderTest, steps: int, device: torch.device, rank: int | None = None, whole: bool = False
) -> RecordedStep:
    """Returns the median of `steps` recorded steps. A collective call over the world; the same answer on every rank.

    A step counts with the rank that took longest in it: for the layer, or where that is not known for its schedules.

    Args:
        rank: whose timelines; None: that of the rank that took longest in the median step.
        whole: whether the layer's stages are observed too.
    """
    import torch
    import torch.distributed as dist

    if whole:
        layer.watch()
    own = dist.get_rank()
    recorded = [RecordedStep(own, *map(tuple, layer.observed_step())) for _ in range(steps)]
    seconds = torch.zeros(dist.get_world_size(), steps, dtype=torch.float64)
    seconds[own] = torch.tensor([step.seconds for step in recorded])
    seconds = seconds.to(device)
    dist.all_reduce(seconds)
    median = int(seconds.amax(0).argsort()[(steps - 1) // 2])
    if rank is None:
        rank = int(seconds[:, median].argmax())
    shown = [recorded[median]]
    dist.broadcast_object_list(shown, src=rank, device=device)
    return shown[0]
