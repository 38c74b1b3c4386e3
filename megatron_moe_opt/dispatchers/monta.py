"""MoNTA: all-to-all between nodes and all-gather inside them, one after another or as a pipeline of chunks.

    dispatch   permute -> [ A2A(EP) -> AllGather(expert-TP) -> reorder by local expert ] for each chunk
    combine    [ reorder by source -> ReduceScatter(expert-TP) -> A2A(EP) ] for each chunk -> unpermute

(MoNTA, Figs. 5 to 9.) Every rank sends its own tokens once over the slow links; expert-TP peers share what arrived over
the fast ones, while the next chunk is on the slow ones. A token's probability travels behind its row in the same
message, so that a direction takes one all-to-all where stock Megatron takes two.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, map_rows
from megatron_moe_opt.dispatchers.pipelining import Pipelining
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.rows.own_rows import permuted
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class MontaDispatcher(Dispatcher):
    """Moves tokens at a level, and in chunks, that a Pipelining says."""

    def __init__(self, groups: ExpertGroups, pipelining: Pipelining, wire: Wire = SAME) -> None:
        """
        Args:
            wire: how rows travel.
        """
        self.groups, self.pipelining, self.wire = groups, pipelining, wire

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return f"{self.pipelining.describe()}, tokens and probabilities in one all-to-all"

    def permute(
        self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, **sizes: int | None
    ) -> tuple[torch.Tensor, Dispatched]:
        """Groups this rank's tokens by chunk and expert, each row with its probability behind it."""
        row_map, counts = map_rows(routing_map_TE, self.groups, **sizes)
        level, num_chunks = self.pipelining.current
        packed, own = permuted(tokens_TH, probs_TE, row_map.cut(num_chunks), self.wire)
        return packed, Dispatched(own, counts, self.groups, level)

    def dispatch(
        self, packed: torch.Tensor, dispatched: Dispatched, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Dispatcher; the next pass is pipelined as this one's rows ask for."""
        # host synchronisation: for the counts, which `exchange` then has
        self.pipelining.observe(dispatched.counts.wait())
        return super().dispatch(packed, dispatched, prob_dtype)
