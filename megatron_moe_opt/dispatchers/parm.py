"""Parm: one all-to-all over expert and expert-tensor parallelism together, in the place of two collectives.

    dispatch   permute -> EP&ESP-A2A -> reorder by local expert
    combine    reorder by source -> EP&ESP-A2A -> sum of the expert's shards -> unpermute

(Parm, Fig. 4c and d; section III-C.) A row goes to all shards of its expert straight away, and their partial outputs
come straight back. Nothing is copied for it: the same rows are sent several times.

Without sequence parallelism all ranks of a TP group hold the same tokens, and there are two ways to do their work once
(Fig. 3b and c):

    S1   split of the tokens -> gate -> dispatch -> experts -> combine -> AllGather of the tokens
    S2   gate -> permute -> split of the rows -> dispatch -> experts -> combine, AllGather of the rows -> unpermute

S1 is the work of the layer's edge (integration/layer/replicated_tokens.py): the dispatcher sees tokens of its own. S2
is done here. Its AllGather runs beside the combine, which it follows peer by peer (the paper's SAA).
"""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, map_shared_rows
from megatron_moe_opt.dispatchers.parm_schedule import ParmSchedule, ScheduleChoice
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.rows.exchange_plan import Sharing
from megatron_moe_opt.runtime.rows.own_rows import permuted
from megatron_moe_opt.schedules.parm import AAS
from megatron_moe_opt.topology.expert_groups import ExpertGroups, TokenCopies


class ParmDispatcher(Dispatcher):
    """Moves tokens under the schedule that is chosen at the first pass."""

    def __init__(self, groups: ExpertGroups, choice: ScheduleChoice, wire: Wire = SAME) -> None:
        """
        Args:
            wire: how rows travel.
        """
        self.groups, self.choice, self.wire = groups, choice, wire
        self.schedule: ParmSchedule | None = None
        """The schedule, which is chosen at the first pass."""
        self.copies: TokenCopies | None = None
        """The ranks that hold the same tokens and share them out (S2). None: every rank has tokens of its own."""

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        return self.choice.describe()

    def take_copies(self, tp: ProcessGroup, tokens_TH: torch.Tensor) -> bool:
        """Chooses the schedule for such tokens; returns whether it is S2, where the TP group shares them out."""
        self.schedule = self.choice.choose(tokens_TH, tp)
        if self.schedule.name != "S1":
            self.copies = TokenCopies.of(tp, self.groups)
        return self.copies is not None

    def permute(
        self, tokens_TH: torch.Tensor, probs_TE: torch.Tensor, routing_map_TE: torch.Tensor, **sizes: int | None
    ) -> tuple[torch.Tensor, Dispatched]:
        """Groups this rank's tokens by chunk and expert or, under S2, those of the TP group by part and expert."""
        if self.schedule is None:
            self.schedule = self.choice.choose(tokens_TH, None)
        copies = self.copies
        row_map, counts, beyond = map_shared_rows(routing_map_TE, self.groups, copies, **sizes)
        if copies is None:
            packed, own = permuted(tokens_TH, probs_TE, row_map.cut(self.schedule.chunks), self.wire)
            return packed, Dispatched(own, counts, self.groups, self.schedule.level)
        packed, own = permuted(tokens_TH, probs_TE, row_map.cut(copies.group.size()), self.wire)
        payload = own.source.payload
        row_bytes = payload.wire.combine.payload_bytes(payload.hidden, payload.dtype)
        sharing = Sharing(copies, row_bytes, self.schedule.name != AAS, beyond)
        return packed, Dispatched(own, counts, self.groups, None, sharing)
