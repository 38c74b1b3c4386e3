"""The DeepSpeed-MoE schedule: the baseline of the papers, for benchmarks and tests.

    dispatch   AllGather(expert-TP) -> permute -> A2A(EP) -> reorder by local expert
    combine    AllReduce(expert-TP) -> reorder by source -> A2A(EP) -> unpermute -> split

(Parm, Fig. 3a; MoNTA, Fig. 4.) Expert-TP peers gather each other's tokens first, so that every one of them sends,
computes and receives all of them: expert-TP times the bytes of `monta` on the slow links. Without sequence parallelism
the ranks of a TP group do it all once more each, for the same tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, map_rows
from megatron_moe_opt.runtime.engine.collectives import all_gather_rows, reduce_scatter_rows
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.rows.own_rows import permuted
from megatron_moe_opt.topology.expert_groups import ExpertGroups


def _gather(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns the rows of all ranks; the gradients of the gathered rows are summed back to their owners."""
    return linear(rows, lambda rows: all_gather_rows(rows, group), lambda grad: reduce_scatter_rows(grad, group))


def _split(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns this rank's share of rows that all ranks hold; their gradients are gathered from all ranks."""
    own = group.rank()
    return linear(rows, lambda rows: rows.chunk(group.size())[own].clone(), lambda grad: all_gather_rows(grad, group))


def _all_reduce(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns the sum over the group. Every rank continues with the same rows, so each part gets the whole gradient."""

    def reduce(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        dist.all_reduce(rows, group=group)
        return rows

    return linear(rows, reduce, lambda grad: grad)


def _scale_gradient(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the rows as they are, and multiplies their gradient by a factor."""
    return linear(rows, lambda rows: rows.view_as(rows), lambda grad: grad * factor)


class DeepSpeedDispatcher(Dispatcher):
    """Moves tokens as DeepSpeed-MoE does: each expert-TP peer carries the tokens of all of them.

    To the exchange plan the expert-TP peers are one rank, because they hold the same rows.
    """

    def __init__(self, groups: ExpertGroups) -> None:
        self.groups = groups
        self.num_copies = 1
        """The number of ranks that hold the same tokens. Experts learn from all copies, and so a share from each."""

    def take_copies(self, tp: ProcessGroup, tokens_TH: torch.Tensor) -> bool:
        """Takes tokens that all TP ranks hold, and moves every rank's copy of them."""
        self.num_copies = tp.size()
        return True

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return "the DeepSpeed-MoE reference schedule, for comparison only"

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Dispatched]:
        """Gathers tokens, probabilities and routing over expert-TP, then permutes them."""
        ep, etp = self.groups.ep, self.groups.etp
        if self.groups.etp_size > 1:
            tokens_TH, probs_TE = _gather(tokens_TH, etp), _gather(probs_TE, etp)
            routing_map_TE = all_gather_rows(routing_map_TE.contiguous().view(torch.uint8), etp).bool()
            capacity = None if capacity is None else capacity * etp.size()
            num_rows = None if num_rows is None else num_rows * etp.size()
        groups = ExpertGroups(ep=ep, etp=None, joint=ep)
        row_map, counts = map_rows(routing_map_TE, groups, capacity=capacity, num_rows=num_rows)
        packed, own = permuted(tokens_TH, probs_TE, row_map)
        return packed, Dispatched(own, counts, groups)

    def dispatch(
        self, packed: torch.Tensor, dispatched: Dispatched, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Dispatcher; each copy of a token gets its whole gradient back."""
        tokens_NH, tokens_per_expert, probs_N = super().dispatch(packed, dispatched, prob_dtype)
        tokens_NH, probs_N = (_scale_gradient(rows, self.num_copies) for rows in (tokens_NH, probs_N))
        return tokens_NH, tokens_per_expert, probs_N

    def combine(self, rows_NH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sums the partial outputs over expert-TP (AllReduce), then sends them back to the ranks of their tokens."""
        rows_NH = _scale_gradient(rows_NH, 1 / self.num_copies)
        if self.groups.etp_size > 1:
            rows_NH = _all_reduce(rows_NH, self.groups.etp)
        return super().combine(rows_NH, dispatched)

    def unpermute(self, returned: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Sums each token's rows, then keeps this rank's tokens."""
        tokens_TH = super().unpermute(returned, dispatched)
        return _split(tokens_TH, self.groups.etp) if self.groups.etp_size > 1 else tokens_TH
