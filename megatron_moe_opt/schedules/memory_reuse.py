"""MPMoE's memory reuse: partitions that share buffers, and how backward gets back what was overwritten (Table II)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Restore(Enum):
    """How backward comes by a tensor of the forward pass."""

    KEEP = "keep"  # it is still there
    OFFLOAD = "offload"
    COMMUNICATE = "communicate"  # T_DI only
    RECOMPUTE = "recompute"  # T_M only


@dataclass(frozen=True)
class Strategy:
    """A strategy of sharing memory between partitions (MPMoE, Table II)."""

    inputs: Restore
    """What becomes of T_DI, the rows that experts take."""
    middle: Restore
    """What becomes of T_M, what experts save for their backward pass."""

    @property
    def reuses(self) -> bool:
        """Whether partitions share buffers, so that what backward needs of them has to be restored."""
        return self.inputs is not Restore.KEEP

    @property
    def middle_buffers(self) -> int:
        """Returns the number of partitions whose T_M is on the device at once, where they share memory.

        Two where it is offloaded: the paper allocates one (section III-C, eq. 5), but has its copy beside the next
        partition's experts (Fig. 8b and c), which fill another one.
        """
        return 2 if self.middle is Restore.OFFLOAD else 1


NONE = "none"
STRATEGIES = {
    NONE: Strategy(Restore.KEEP, Restore.KEEP),
    "S1": Strategy(Restore.OFFLOAD, Restore.OFFLOAD),
    "S2": Strategy(Restore.COMMUNICATE, Restore.OFFLOAD),
    "S3": Strategy(Restore.OFFLOAD, Restore.RECOMPUTE),
    "S4": Strategy(Restore.COMMUNICATE, Restore.RECOMPUTE),
}
