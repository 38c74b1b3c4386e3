"""What one candidate would take for a layer, as every report, plan and trial has it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.timeline import Timeline

ALLTOALL = "alltoall"
"""Stock's dispatcher, the only candidate that is no system of ours."""


@dataclass(frozen=True)
class HeldMore:
    """What a layer holds on a GPU besides what stock's does, in bytes; below 0: what stock's holds and it does not."""

    of_pass: int = 0
    """Bytes kept from the forward pass of a micro-batch to its backward pass."""
    at_work: int = 0
    """Bytes of buffers in which a layer has, while it runs, what it has not kept: one layer at a time does."""
    of_others: int = 0
    """Bytes of other ranks' experts and of sums of their gradients, however many micro-batches are under way."""


@dataclass(frozen=True)
class Prediction:
    """What one candidate would take for a layer, forward and backward of one micro-batch."""

    variant: str
    """The name of the variant, as `moe-opt bench --dispatchers` takes it."""
    seconds: float
    exposed: float
    """Seconds in which a collective runs and no expert computes."""
    inter_bytes: float
    """Bytes that a rank sends over links between nodes."""
    intra_bytes: float
    """Bytes that a rank sends inside its node."""
    activation_bytes: int
    """Bytes that forward and backward hold of rows and of what experts save (MPMoE, eq. 2), and of others' experts."""
    terms: dict[str, float] = field(default_factory=dict)
    """The seconds of each term, of which `seconds` is the sum."""
    hidden: float = field(default=0.0, compare=False)
    """Seconds of communication beside which another micro-batch computes, neither in `seconds` nor in `exposed`."""
    held_more: HeldMore = field(default=HeldMore(), compare=False)
    """Of which a GPU's memory is made; a prediction that was read from a file has `of_others` alone."""
    parts: int = field(default=1, compare=False)
    """Chunks or partitions that its rows are cut into."""
    timelines: tuple[Timeline, ...] = field(default=(), compare=False, repr=False)
    """The predicted times op by op, in the order in which the layer does it: schedules as they were played, and what a
    model adds to them. Empty where the prediction was read from a file, or is a mean.
    """

    @property
    def family(self) -> str:
        """The dispatcher type of the variant: `monta` of `monta:O3x4`."""
        return self.variant.partition(":")[0]


@dataclass(frozen=True)
class Refusal:
    """A candidate that cannot run or be predicted here, and why."""

    variant: str
    reason: str


def told_together(refused: Iterable[Refusal]) -> list[tuple[str, str]]:
    """Returns (candidates, why), one for all refusals of a system that differ in their numbers alone."""
    alike: dict[tuple[str, str], list[Refusal]] = {}
    for one in refused:
        alike.setdefault((one.variant.partition(":")[0], re.sub(r"[0-9]+", "", one.reason)), []).append(one)
    return [
        (first.variant + (f" and {len(others)} more" if others else ""), first.reason)
        for first, *others in alike.values()
    ]


def nothing_left(refused: Iterable[Refusal]) -> ConfigurationError:
    """Returns the error of a layer that no candidate can run: why, once for all refusals that are alike."""
    return ConfigurationError("; ".join(f"{variants}: {why}" for variants, why in told_together(refused)))
