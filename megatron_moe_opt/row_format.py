"""The format of a row on the wire, in bytes: [hidden elements in a wire format | lane]. Planning counts these bytes
without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LANE_BYTES = 16
"""The bytes of the lane behind a row's hidden elements. It keeps rows 16-byte aligned where the hidden size does;
csrc/bindings/permute.cpp holds the same number.
"""

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
"""The bytes of an element of rows and weights, by the word that options and profiles have for its type."""

NOTE_BYTE = 8
"""The byte of the lane at which there is room for a note, an int32, behind the bits of the row's probability."""

PAYLOAD_ALIGNMENT = 16
"""The alignment in bytes of the payload of rows in 8 bits; csrc/kernels/wire_format.h holds the same number."""


class WireFormat(Enum):
    """How the hidden elements of a row travel; the values are the words of --moe-opt-wire.

    In 8 bits a row's payload is [an e4m3 code for each element | zeros up to the alignment of a scale | a scale for
    each block of elements, the last of which may be short | zeros up to PAYLOAD_ALIGNMENT]; the numbers are explained
    in csrc/kernels/wire_format.h.
    """

    SAME = "same"
    """The wire on which rows travel in their own dtype."""
    BF16 = "bf16"
    FP8 = "fp8"
    """The format e4m3 with one float32 scale for 128 elements."""
    MXFP8 = "mxfp8"
    """The format e4m3 with one power of two (e8m0) for 32 elements: OCP's microscaling format."""

    @property
    def block(self) -> int | None:
        """Returns the number of elements that share a scale; None where there are no scales."""
        if self is WireFormat.FP8:
            return 128
        return 32 if self is WireFormat.MXFP8 else None

    @property
    def scale_bytes(self) -> int:
        """Returns the bytes of one scale; 0 where there are none."""
        return {WireFormat.FP8: 4, WireFormat.MXFP8: 1}.get(self, 0)

    def dtype_of(self, rows: torch.dtype) -> torch.dtype:
        """Returns the dtype of the tensor that holds rows on the wire, which are of dtype `rows` elsewhere."""
        import torch

        if self is WireFormat.SAME:
            return rows
        return torch.bfloat16 if self is WireFormat.BF16 else torch.uint8

    def payload_bytes(self, hidden: int, rows: torch.dtype) -> int:
        """Returns the bytes of `hidden` elements and their scales, of rows whose dtype is `rows` elsewhere."""
        if self.block is None:
            return hidden * (rows.itemsize if self is WireFormat.SAME else 2)
        scales = -(-hidden // self.block) * self.scale_bytes
        return _padded(self.first_scale(hidden) + scales, PAYLOAD_ALIGNMENT)

    def first_scale(self, hidden: int) -> int:
        """Returns the byte of a row in 8 bits at which its scales begin."""
        return _padded(hidden, self.scale_bytes)


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class Wire:
    """The formats of rows by their direction, in forward and in backward passes."""

    dispatch: WireFormat = WireFormat.SAME
    """The format of rows to the experts: tokens, and gradients of outputs."""
    combine: WireFormat = WireFormat.SAME
    """The format of rows on the way back: sums of outputs, and of gradients of tokens."""

    @classmethod
    def of(cls, words: str) -> Wire:
        """Returns the wire that one word, or `dispatch=WORD,combine=WORD`, stands for. Raises ValueError for anything
        else.

        One word with 8 bits means sums in bf16: what is added up is rounded once more on its way.
        """
        if "=" not in words:
            out = WireFormat(words)
            return cls(out, out if out.block is None else WireFormat.BF16)
        directions = [part.partition("=")[::2] for part in words.split(",")]
        given = {direction: WireFormat(word) for direction, word in directions}
        if len(given) < len(directions) or not given.keys() <= {"dispatch", "combine"}:
            raise ValueError(words)
        return cls(**given)

    def __str__(self) -> str:
        word = self.dispatch.value
        return word if Wire.of(word) == self else f"dispatch={word},combine={self.combine.value}"

    @property
    def word(self) -> str:
        """Returns the formats in one word without commas, as in a variant's name: `fp8`, or `fp8-same` by direction."""
        word = self.dispatch.value
        return word if Wire.of(word) == self else f"{word}-{self.combine.value}"

    def describe(self) -> str:
        """Returns how rows travel, in words."""
        return f"rows travel in {self.dispatch.value} to the experts and in {self.combine.value} back: lossy"

    def of_rows(self, is_bf16: bool) -> Wire:
        """Returns the same wire for rows that may be bf16 already: bf16 changes nothing of these."""
        if not is_bf16:
            return self
        return Wire(*(WireFormat.SAME if one is WireFormat.BF16 else one for one in (self.dispatch, self.combine)))


SAME = Wire()


def narrower(element_bytes: int) -> tuple[Wire, ...]:
    """Returns the wires on which rows of such elements take fewer bytes; of two formats in 8 bits, which take nearly as
    many, the one that rounds no scale.
    """
    words = ("bf16", "fp8") if element_bytes > 2 else ("fp8",)
    return tuple(map(Wire.of, words))
