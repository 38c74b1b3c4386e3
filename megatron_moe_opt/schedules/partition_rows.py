"""What moves of a partition: its rows, what they take at each place, and what the buffers on their way are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

from megatron_moe_opt.schedules.pipeline import ChunkBytes, Stage, base_name
from megatron_moe_opt.schedules.schedule import Kind


class Partition(Protocol):
    """What a schedule has to know of the rows of one partition on this rank."""

    @property
    def own(self) -> int:
        """Returns the number of the partition's rows that this rank sends out."""

    @property
    def packed(self) -> int:
        """Returns the number of rows that are packed here: its own; or all that it gets back, its own among them."""

    @property
    def returned(self) -> int:
        """Returns the number of rows that this rank gets back: those that it has sent; or, where a TP group has shared
        its rows out, those of all ranks of that group.
        """

    @property
    def own_place(self) -> int:
        """Returns the place of this rank's own rows among those that it gets back: the number of the first one."""

    @property
    def gathered(self) -> int:
        """Returns the number of the partition's rows that the experts of this rank get."""

    def bytes(self, row_bytes: int) -> Any:
        """Returns the bytes that move of rows of so many bytes each, in the form that the way's stages take them."""


@dataclass(frozen=True)
class PartitionRows:
    """Rows of one partition on this rank, by_rows."""

    own: int
    """Number of rows that its all-to-all carries."""
    gathered: int
    """Number of rows of all expert-TP peers, after the all-gather."""
    of_tp: tuple[int, ...] = ()
    """Rows of each rank of the TP group that has shared out its rows; empty: they are this rank's own."""
    tp_rank: int = 0

    @property
    def returned(self) -> int:
        """Returns the number of rows that come back to this rank."""
        return sum(self.of_tp) if self.of_tp else self.own

    packed = returned  # each rank packs the rows of the whole TP group

    @property
    def own_place(self) -> int:
        """Returns where its own rows begin among them."""
        return sum(self.of_tp[: self.tp_rank])

    def bytes(self, row_bytes: int) -> ChunkBytes:
        """Returns what moves of rows of so many bytes."""
        return ChunkBytes(self.own * row_bytes, self.gathered * row_bytes, self.returned * row_bytes)


@dataclass(frozen=True, eq=False)
class Move:
    """What travels, on one way or the other."""

    source: str
    is_out: bool
    sorted: str = ""
    """The name of rows that are sorted by expert."""
    prefix: str = ""
    """The prefix of the names of all other buffers."""

    def names(self, stages: Sequence[Stage], lies_in: Mapping[str, str]) -> dict[str, str]:
        """Returns what the buffers of a way's stages are called here.

        What may lie in another buffer does, under its own name. What is summed in the lane that brings it has one
        buffer for all partitions: each follows the other.
        """
        inner = {outer: name for name, outer in lies_in.items()}
        names = {stage.writes: self.prefix + inner.get(stage.writes, stage.writes) for stage in stages}
        for brought, following in pairwise(stages):
            if following.kind is Kind.SUM and following.lane is brought.lane:
                names[brought.writes] += ".0"
        return names | {"sorted": self.sorted}


INPUTS = Move("rows", True, "tokens")
OUTPUTS = Move("output", False)
OUTPUT_GRADIENTS = Move("grad_combined", True, "grad_output", "grad_")
INPUT_GRADIENTS = Move("grad_tokens", False, prefix="grad_")
_ON_THE_WAY_OUT = ("copies", "arrived", "gathered")


@cache
def place_of(buffer: str) -> tuple[Move, str]:
    """Returns whose rows are in a buffer that a way writes, and what the way calls it."""
    name = base_name(buffer)
    for move, sorted_or_back in (
        (INPUTS, {"tokens": "sorted"}),
        (OUTPUT_GRADIENTS, {"grad_output": "sorted"}),
        (OUTPUTS, {"combined": "rows"}),
        (INPUT_GRADIENTS, {"grad_rows": "rows"}),
    ):
        if name in sorted_or_back:
            return move, sorted_or_back[name]
    own = name.removeprefix("grad_")
    moves = (INPUTS, OUTPUT_GRADIENTS) if own.startswith(_ON_THE_WAY_OUT) else (OUTPUTS, INPUT_GRADIENTS)
    return moves[own != name], own


@dataclass(frozen=True)
class RowBytes:
    """The bytes of one row at each place that MPMoE's pipeline moves it through."""

    packed: int
    """Bytes of a token with its probability, on the way to the experts."""
    token: int
    """Bytes of a token as the experts have it."""
    middle: int = 0
    """Bytes of the part that is offloaded of what experts save for backward (T_M)."""
    returned: int | None = None
    """Bytes of a token's gradient with that of its probability, on the way back; None: as much as `packed`."""
    outputs: int | None = None
    """Bytes of an output on the way back; None: as much as `token`."""
    output_gradients: int | None = None
    """Bytes of the gradient of an output, on the way to the experts; None: as much as `token`."""
    activations: int = 0
    """Bytes of what experts save besides `middle` and is computed again from it, where that was offloaded."""

    def of(self, move: Move) -> int:
        """Returns the bytes of a row on the way of this move."""
        own, other = {
            INPUTS: (self.packed, 0),
            INPUT_GRADIENTS: (self.returned, self.packed),
            OUTPUTS: (self.outputs, self.token),
            OUTPUT_GRADIENTS: (self.output_gradients, self.token),
        }[move]
        return other if own is None else own


@dataclass(frozen=True)
class Moved:
    """What moves of one partition: its rows, and what they take."""

    rows: Partition
    row: RowBytes
    shared: int = 0
    """Bytes of the tokens that shared experts take, which are all of a rank's in whichever partition."""
    _known: dict[Move, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def bytes(self, move: Move) -> Any:
        """Returns the bytes of its rows on the way of a move, in the form that the way's stages take them."""
        if move not in self._known:  # each stage of the way asks
            self._known[move] = self.rows.bytes(self.row.of(move))
        return self._known[move]
