"""Unfused attention without CUDA kernels, with context parallelism.

Megatron's `DotProductAttention` is the attention that runs without Transformer Engine; it refuses context parallelism.
Here keys and values are gathered over the context-parallel group and each rank's queries attend to all of them.

Layout. Context parallelism over n ranks cuts the sequence into 2n chunks; rank r holds chunks r and 2n-1-r, so that
causal work is even. Gathered in rank order the chunks come as 0, 2n-1, 1, 2n-2, ...; they are put back in order before
they are attended to. Shapes below: s local tokens, S = n s tokens of the sequence, b batch, g key-value
heads, d head size.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe_opt.integration.patching import replace


def zigzag_positions(tokens: int, rank: int, size: int) -> torch.Tensor:
    """Returns the positions in the sequence of a context-parallel rank's tokens: int64 [tokens // size].

    Args:
        tokens: length of the whole sequence, a multiple of 2 * size.
        rank: rank in the context-parallel group.
        size: ranks in the context-parallel group.
    """
    chunks = torch.arange(tokens).view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def _gather_sequence(local: torch.Tensor, order: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers each rank's [s, b, g, d] to [S, b, g, d] in the order of the sequence; gradients are summed back."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gathered = mappings.gather_from_sequence_parallel_region(local, group=group)
    return gathered.index_select(0, order)


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts the constructor: builds as without context parallelism, and refuses what the gathered form does not do."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1:
            original(self, config, *args, **kwargs)
            return
        if config.window_size is not None:
            raise ValueError(
                f"window_size {config.window_size} with context_parallel_size {config.context_parallel_size} is not"
                f" supported on a host without a GPU: leave --window-size out or set --context-parallel-size 1"
            )
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)
        self.config = config

    return init


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adapts forward: attends to the whole sequence's keys and values, under the causal mask
    of this rank's positions.
    """

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        group = getattr(self.pg_collection, "cp", None) or _context_parallel_group()
        size, rank = group.size(), group.rank()
        tokens = size * key.shape[0]
        positions = [zigzag_positions(tokens, r, size).to(key.device) for r in range(size)]
        order = torch.cat(positions).argsort()
        key, value = _gather_sequence(key, order, group), _gather_sequence(value, order, group)
        # A mask from the data, [b, 1, s, S], is already cut to this rank's rows and in the sequence's order.
        if attention_mask is None and self.attn_mask_type.name == "causal":
            keys = torch.arange(tokens, device=key.device)
            attention_mask = (keys[None, :] > positions[rank][:, None])[None, None]
        return original(self, query, key, value, attention_mask, *args, **kwargs)

    return forward


def _context_parallel_group() -> Any:
    return importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()


def use_host_attention() -> None:
    """Let the unfused attention serve all that Transformer Engine's would, with torch's own softmax."""
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    replace(attention, "__init__", _init)
    replace(attention, "forward", _forward)
    # Decides by shape and dtype whether to call a CUDA extension; it is never there.
    softmax = importlib.import_module("megatron.core.fusions.fused_softmax").FusedScaleMaskSoftmax
    replace(softmax, "is_kernel_available", lambda original: lambda self, mask, b, np, sq, sk: False)
