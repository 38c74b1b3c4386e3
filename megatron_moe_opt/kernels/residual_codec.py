"""The residual codec of expert migration: an expert travels as its largest differences from a shared expert.

Of n elements, in blocks of 65,536 (the last may be shorter), k entries are kept:

    values   [k]        residuals expert - shared in the expert's dtype, in ascending order of their elements
    indices  [2 B + k]  uint16, B = ceil(n / 65536). First, for each block, the number of entries up to its end as two
                        words, the low one first; then the place of every entry inside its block.

An entry is 2 bytes more than an element. The compression ratio counts all bytes on the wire:

    R = dense bytes / sent bytes = n s / (k (s + 2) + 4 B),    s = bytes of an element

so that k = n / 50 is 33x for float32 and 25x for bfloat16, and a wanted R allows k = (n s / R - 4 B) / (s + 2) entries.
The sizes follow from n and k alone: a receiver allocates before anything arrives.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.extension import load_extension

_C = load_extension()

BLOCK_ELEMENTS = 65536


def sr_index_words(numel: int, k: int) -> int:
    """Returns the length of `indices` for k entries of an expert of `numel` elements."""
    return 2 * -(-numel // BLOCK_ELEMENTS) + k


def sr_wire_bytes(numel: int, k: int, dtype: torch.dtype) -> int:
    """Returns the bytes of values and indices together."""
    return k * dtype.itemsize + 2 * sr_index_words(numel, k)


def sr_encode(expert: torch.Tensor, shared: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k residuals expert - shared of largest magnitude: exact, and the same bits on any number of threads.

    Residuals are taken in float32, compared, and rounded once to the dtype. NaN (every NaN alike) ranks above infinity,
    so that neither is lost; among equal magnitudes the lowest index is kept. Where `expert` or `shared` is not finite,
    or the residual overflows, the element is sent whole (docs/residual-codec.md). Not differentiable.

    Args:
        expert: float32, bfloat16 or float16 of any shape, contiguous, at most 2^31 - 1 elements.
        shared: as `expert` in dtype, shape and device.
        k: 0 to expert.numel().

    Returns:
        values [k] of the expert's dtype and indices, uint16 [sr_index_words(expert.numel(), k)].

    Raises:
        ValueError: another dtype, differing or non-contiguous tensors, k out of range, too many elements.

    Source: HybridEP, section IV-B (SR compression).
    """
    return _C.sr_encode(expert, shared, k)


def sr_decode(values: torch.Tensor, indices: torch.Tensor, expert: torch.Tensor) -> None:
    """Turns the shared expert into the expert, as far as it was kept: adds each residual to its element, in place. What
    has no entry is neither read nor written.

    The sum is taken in float32 and rounded once; where it is not finite, the entry stands for a whole element
    (docs/residual-codec.md). Not differentiable.

    Args:
        values, indices: what sr_encode returned.
        expert: the shared expert that the residuals were taken from, contiguous; for example the weight of an expert
            module (under autograd, its `.data`).

    Raises:
        ValueError: tensors that do not fit together, or on CPU, indices that sr_encode cannot have written (then
            `expert` holds nothing useful). On CUDA the latter are not found out; they reach no memory outside of it.
    """
    _C.sr_decode(values, indices, expert)
