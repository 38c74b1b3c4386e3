"""One step of a layer, recorded op by op on all ranks: the step and the rank that are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_moe_opt.schedules.timeline import Timeline, as_they_ran, one_after_another

if TYPE_CHECKING:
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest


@dataclass(frozen=True)
class RecordedStep:
    """The schedules that one rank ran in a step, in their order; none where its dispatcher runs no schedules."""

    rank: int
    timelines: tuple[Timeline, ...]
    """Those that ran beside the others last."""

    @property
    def schedules(self) -> tuple[Timeline, ...]:
        """The timelines of schedules, without what ran beside them."""
        return tuple(one for one in self.timelines if not one.is_beside)

    def joined(self, name: str) -> Timeline:
        """Returns them one after another; what ran between them is left out, unless something ran beside them: then
        each is where it ran. A part is named by its number and schedule.
        """
        parts = {f"{number}. {one.schedule.name}": one for number, one in enumerate(self.timelines, start=1)}
        return (one_after_another if len(self.schedules) == len(parts) else as_they_ran)(name, parts)


def record_step(layer: LayerUnderTest, steps: int, device: torch.device, rank: int | None = None) -> RecordedStep:
    """Returns the median of `steps` recorded steps. A collective call over the world; the same answer on every rank.

    A step counts with the rank whose schedules took longest in it.

    Args:
        rank: whose timelines; None: that of the rank whose schedules took longest in the median step.
    """
    recorded = [layer.recorded_step() for _ in range(steps)]
    seconds = torch.zeros(dist.get_world_size(), steps, dtype=torch.float64)
    seconds[dist.get_rank()] = torch.tensor(
        [sum(timeline.seconds for timeline in step if not timeline.is_beside) for step in recorded]
    )
    seconds = seconds.to(device)
    dist.all_reduce(seconds)
    median = int(seconds.amax(0).argsort()[(steps - 1) // 2])
    if rank is None:
        rank = int(seconds[:, median].argmax())
    shown = [recorded[median]]
    dist.broadcast_object_list(shown, src=rank, device=device)
    return RecordedStep(rank, tuple(shown[0]))
