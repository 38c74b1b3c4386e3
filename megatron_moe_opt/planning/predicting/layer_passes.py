"""What one MoE layer sends in a training step, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_moe_opt.schedules import monta
from megatron_moe_opt.schedules.pipeline import ChunkBytes
from megatron_moe_opt.schedules.schedule import Schedule

PASSES = ("forward dispatch", "forward combine", "backward of combine", "backward of dispatch")
"""The names of what `training_passes` returns, in its order."""


@dataclass(frozen=True)
class Pass:
    """A move of rows, once to their experts ("dispatch") or back ("combine")."""

    direction: str
    exchanged: int
    """Bytes of this rank's own rows: I / t in the paper's terms."""

    def schedule(self, level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
        """Returns the schedule that runs this pass."""
        return monta.outline(self.direction, level, len(chunks), ep_size, etp_size).sized(chunks)


def training_passes(
    rows: int, row_bytes: int, packed_row_bytes: int, homebound_bytes: int | None = None
) -> tuple[Pass, ...]:
    """Returns dispatch and combine, forward and backward, of one layer and micro-batch, in the order of PASSES.

    Args:
        rows: (token, expert) pairs that this rank exchanges.
        row_bytes: of a row on its way to the experts, without its probability.
        packed_row_bytes: of a row of dispatch, which carries its probability. Its gradient does too.
        homebound_bytes: of a row on its way back, without; None: as much as `row_bytes`.
    """
    back = row_bytes if homebound_bytes is None else homebound_bytes
    return (
        Pass("dispatch", rows * packed_row_bytes),
        Pass("combine", rows * back),
        Pass("dispatch", rows * row_bytes),  # backward of combine
        Pass("combine", rows * (back + packed_row_bytes - row_bytes)),  # backward of dispatch
    )
