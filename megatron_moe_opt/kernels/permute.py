"""Token permutation with the interface of Megatron-Core's `moe_utils.permute` and `moe_utils.unpermute` (0.16.1).

Shapes: T tokens, E experts, H hidden size, R permuted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.row_map import RowMap, build_row_map, row_map_from_sources
from megatron_moe_opt.kernels.streams import require

_C = load_extension()


class _Permute(torch.autograd.Function):
    """Copies each token's row to its permuted rows; backward sums them up again."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, probs: torch.Tensor | None, row_map: RowMap) -> Any:
        ctx.set_materialize_grads(False)
        ctx.row_map = row_map
        ctx.hidden = tokens.size(1)
        ctx.prob_dtype = None if probs is None else probs.dtype
        return _C.permute_rows(row_map.tensors, tokens, None if probs is None else probs.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_permuted: torch.Tensor | None, grad_permuted_probs: torch.Tensor | None) -> Any:
        grad_tokens = grad_probs = None
        if ctx.needs_input_grad[0] and grad_permuted is not None:
            grad_tokens = _C.unpermute_rows(ctx.row_map.tensors, grad_permuted.contiguous(), ctx.hidden, None)
        if ctx.needs_input_grad[1] and grad_permuted_probs is not None:
            grad_probs = _C.unpermute_probs(ctx.row_map.tensors, grad_permuted_probs.contiguous(), 0, ctx.prob_dtype)
        return grad_tokens, grad_probs, None


class _UnpermuteRows(torch.autograd.Function):
    """Sums each token's permuted rows; backward copies the sum's gradient to each of them."""

    @staticmethod
    def forward(ctx: Any, permuted: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        """Sums permuted rows [R, H] to tokens [T, H]."""
        ctx.row_map = row_map
        return _C.unpermute_rows(row_map.tensors, permuted, permuted.size(1), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Copies gradients of tokens [T, H] to those of permuted rows [R, H]."""
        grad_permuted, _ = _C.permute_rows(ctx.row_map.tensors, grad_tokens.contiguous(), None)
        return grad_permuted, None


class _UnpermuteWeighted(torch.autograd.Function):
    """Sums each token's permuted rows, weighted by their probabilities, in float32."""

    @staticmethod
    def forward(ctx: Any, permuted: torch.Tensor, probs: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        ctx.row_map = row_map
        ctx.prob_dtype = probs.dtype
        weights = probs.float().contiguous()
        ctx.save_for_backward(permuted, weights)
        return _C.unpermute_rows(row_map.tensors, permuted, permuted.size(1), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        permuted, weights = ctx.saved_tensors
        grad_permuted, grad_probs = _C.unpermute_rows_backward(
            ctx.row_map.tensors, grad_tokens.contiguous(), permuted, weights
        )
        return grad_permuted, grad_probs.to(ctx.prob_dtype), None


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Copies every token once for each expert it is routed to, grouped by expert, in token order inside an expert.

    Args:
        tokens: [T, H], contiguous; float32, bfloat16 or float16.
        routing_map: [T, E]; nonzero = routed.
        probs: [T, E], or None; float32, bfloat16, float16 or float64, whatever the tokens' dtype.
        num_out_tokens: with `drop_and_pad`, E times the capacity of an expert. Otherwise the number of routed pairs,
            which on CUDA spares a host synchronisation and must be right, and on CPU is not read, as in Megatron-Core.
        fused: accepted for the sake of the signature; the kernel is always fused.
        drop_and_pad: every expert gets exactly num_out_tokens // E rows: over-full experts are cut, the others padded
            with the lowest tokens that are not routed to them.

    Returns:
        permuted tokens [R, H]; permuted probs [R], or None; sorted_indices int64 [R], the token of each row.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, non-contiguous tokens, a capacity above T.
    """
    if tokens.dim() != 2 or routing_map.dim() != 2 or routing_map.size(0) != tokens.size(0):
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} and routing_map of shape {tuple(routing_map.shape)} do not fit: "
            "they must be [tokens, hidden] and [tokens, experts]"
        )
    capacity = None
    if drop_and_pad and num_out_tokens is not None:
        capacity = int(num_out_tokens) // routing_map.size(1) if routing_map.size(1) > 0 else 0
    row_map = build_row_map(routing_map, capacity, num_out_tokens)
    permuted, permuted_probs = _Permute.apply(tokens, probs, row_map)
    return permuted, permuted_probs, row_map.sources


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """Adds the permuted rows of each token up, each weighted by its probability where `probs` are given.

    Sums are taken in float32 in ascending row order and rounded once to the tokens' dtype.

    Args:
        permuted_tokens: [R, H], contiguous; float32, bfloat16 or float16.
        sorted_indices: int64 [R], the token of each row, as `permute` returns it.
        restore_shape: (T, H).
        probs: [T, E], or None.
        routing_map: [T, E], the map given to `permute`; needed with `probs`.
        fused: accepted for the sake of the signature; the kernel is always fused.
        drop_and_pad: as given to `permute`.

    Returns:
        [T, H] in the dtype of permuted_tokens; zero for a token without rows.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, non-contiguous rows, probs without a routing map, an
            index outside [0, T), or sorted_indices that are not those of the routing map.
    """
    num_tokens, hidden = restore_shape
    if permuted_tokens.dim() != 2 or permuted_tokens.size(1) != hidden:
        raise ValueError(
            f"permuted_tokens of shape {tuple(permuted_tokens.shape)} do not fit restore_shape {tuple(restore_shape)}"
        )
    if probs is None:
        return _UnpermuteRows.apply(permuted_tokens, row_map_from_sources(sorted_indices.contiguous(), num_tokens))
    if routing_map is None:
        raise ValueError("unpermute with probs needs the routing_map that was given to permute")
    if drop_and_pad:
        row_map = row_map_from_sources(sorted_indices.contiguous(), num_tokens, routing_map.size(1))
    else:
        row_map = build_row_map(routing_map, num_out_tokens=sorted_indices.numel())
        _require_same_indices(row_map.sources, sorted_indices)
    return _UnpermuteWeighted.apply(permuted_tokens, probs, row_map)


def _require_same_indices(expected: torch.Tensor, sorted_indices: torch.Tensor) -> None:
    if expected.shape != sorted_indices.shape:
        raise ValueError(
            f"sorted_indices have {sorted_indices.numel()} rows, but the routing_map has {expected.numel()} routed "
            "pairs: pass the map that was given to permute"
        )
    is_same = (expected == sorted_indices).all()
    require(is_same, "sorted_indices are not those that permute returns for this routing_map")
