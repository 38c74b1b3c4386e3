"""In how many partitions a layer's rows go through its experts, and how partitions share memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_moe_opt.runtime.engine.pass_clock import Finished
from megatron_moe_opt.schedules.mpmoe import NONE


@dataclass(frozen=True)
class Partitions:
    """How one pass of a layer is cut, forward and backward."""

    count: int
    """From 1 on."""
    strategy: str = NONE
    """A key of schedules.mpmoe.STRATEGIES."""
    finished: Finished | None = None
    """Gets the clock of the pass when its backward pass is through. None: the pass is not timed."""


class Partitioning(Protocol):
    """Says how the next pass of a layer is cut. All ranks of the layer's joint group must be told alike."""

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """Called by every rank of the joint group at the start of every forward pass.

        Args:
            rows: returns the mean number of rows that a rank has, the same on all ranks of the layer's joint group; on
                CUDA it waits for the routing to reach the host, which otherwise happens after the rows are packed.
        """

    def describe(self) -> str:
        """For the line at start."""


class FixedPartitioning:
    """What the user asked for."""

    def __init__(self, count: int, strategy: str) -> None:
        self._partitions = Partitions(count, strategy)

    def choose(self, rows: Callable[[], int]) -> Partitions:
        """The same for every pass."""
        return self._partitions

    def describe(self) -> str:
        """For the line at start."""
        count, strategy = self._partitions.count, self._partitions.strategy
        return f"{count} partition{'s' * (count > 1)}, memory reuse {strategy}"
