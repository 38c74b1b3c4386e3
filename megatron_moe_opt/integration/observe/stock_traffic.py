"""What Megatron's own alltoall dispatcher sends in a pass, from the counts that it keeps.

    forward    A2A(EP) of tokens, and of probabilities; AllGather(expert-TP) of both; ReduceScatter(expert-TP), in the
               dtype of the probabilities; A2A(EP)
    backward   the same rows the other way

In messages of the direct algorithms, as runtime/observed/traffic.py counts them, and without the few bytes of the
counts themselves, which are sent for every pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class StockTraffic:
    """Counts what one pass of stock's all-to-all dispatcher sends, which reports nothing itself."""

    def __init__(self, dispatcher: Any, prob_dtype: torch.dtype) -> None:
        self._dispatcher, self._prob_dtype = dispatcher, prob_dtype
        self._num_sent = self._row_bytes = 0

    @classmethod
    def of(cls, dispatcher: Any, prob_dtype: torch.dtype) -> StockTraffic | None:
        """Returns the traffic of a pass to be counted; None for a dispatcher that is not Megatron's
        MoEAlltoAllTokenDispatcher.
        """
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        return cls(dispatcher, prob_dtype) if isinstance(dispatcher, MoEAlltoAllTokenDispatcher) else None

    def note_dispatched(self, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Takes what the first all-to-alls get: tokens [R, H] and probabilities [R]."""
        self._num_sent = tokens.size(0)
        self._row_bytes = tokens.size(1) * tokens.element_size() + probs.element_size()

    def sent(self, outputs: torch.Tensor) -> tuple[Counter[int], Counter[int]]:
        """Returns the bytes of this rank to each global rank, forward and backward.

        Args:
            outputs: [N, H] what the last all-to-all gets.
        """
        own, row, prob = self._dispatcher, self._row_bytes, self._prob_dtype.itemsize
        ep, tp = own.ep_group, own.tp_group
        output = outputs.size(1) * outputs.element_size()
        to_experts = _counts(own.input_splits, self._num_sent, ep.size())
        from_sources = _counts(own.output_splits, outputs.size(0), ep.size())
        forward, backward = Counter[int](), Counter[int]()
        _add(forward, ep, [rows * row for rows in to_experts])
        _add(forward, ep, [rows * output for rows in from_sources])
        _add(backward, ep, [rows * output for rows in to_experts])
        _add(backward, ep, [rows * row for rows in from_sources])
        if tp.size() > 1:
            arrived = sum(from_sources)
            of_peers = _counts(own.output_splits_tp, arrived * tp.size(), tp.size())
            summed = outputs.size(1) * prob
            _add(forward, tp, [arrived * row] * tp.size())
            _add(forward, tp, [rows * summed for rows in of_peers])
            _add(backward, tp, [rows * row for rows in of_peers])
            _add(backward, tp, [arrived * summed] * tp.size())
        return forward, backward


def _counts(splits: Any, rows: int, size: int) -> list[int]:
    """Returns the rows for each peer: the splits or, without any, equal parts."""
    return [rows // size] * size if splits is None else [int(split) for split in splits]


def _add(sent: Counter[int], group: dist.ProcessGroup, bytes_to: Sequence[int]) -> None:
    own = group.rank()
    for peer, (rank, num_bytes) in enumerate(zip(dist.get_process_group_ranks(group), bytes_to, strict=True)):
        if peer != own:
            sent[rank] += num_bytes
