"""MPMoE: the rows in n partitions, and dispatch, experts and combine of the partitions as one pipeline.

    permute -> [ S0 | S1 | R0 | S2 | R1 | ... ]  -> unpermute        S: dispatch, R: combine, alternating
                    [ C0 | C1 | C2 ... ]                             C: experts

(MPMoE, Fig. 4b.) By rows, each expert's rows are cut into n parts, and partition j is part j of all experts: the
partitions are equal to a row whatever the routing. They go over EP and then over expert-TP or, jointly, over both in
one all-to-all (Parm's). By hops, a row is a token with all of its experts, which crosses a link once (hop_way.py):
partition j is part j of this rank's tokens, one after another, those at both ends smaller than the others. What each of
them has for a rank differs as the tokens' experts do. Partitions may share buffers; backward restores what is
overwritten (Table II).

Without sequence parallelism all ranks of a TP group hold the same tokens. By hops, and where rows are to be shared,
they share out each partition (Parm's S2, after the gate), and its AllGather over TP runs beside the experts of the next
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.dispatcher import Dispatcher, check_routed, map_shared_rows
from megatron_moe_opt.dispatchers.hopping_tokens import HoppingTokens
from megatron_moe_opt.dispatchers.partitioning import FixedPartitioning, Partitioning, Partitions
from megatron_moe_opt.row_format import SAME, Wire
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing, saved_tensors_are_hooked
from megatron_moe_opt.runtime.hops.token_hops import TokenHops
from megatron_moe_opt.runtime.rows.exchange_plan import plan_partitions, plan_shared_partitions
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.own_rows import OwnRows, permuted
from megatron_moe_opt.runtime.rows.ways import EpThenExpertTp, EpWithExpertTp
from megatron_moe_opt.runtime.through_experts.expert_call import Experts
from megatron_moe_opt.runtime.through_experts.expert_pipeline import through_experts
from megatron_moe_opt.runtime.through_experts.shared_call import SharedExperts
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts
from megatron_moe_opt.schedules.mpmoe import HOPS, JOINT, ROWS, SHARED_ROWS, token_shares
from megatron_moe_opt.topology.expert_groups import ExpertGroups, TokenCopies


@dataclass(frozen=True)
class PartitionedRows:
    """The rows of a pass whose partitions go by rows: a token has one for each of its experts."""

    partitions: Partitions
    own: OwnRows
    """This rank's own rows, before they are sent."""
    counts: HostCopy
    """The rows of every rank for each expert, [ep_size, etp_size, experts], on their way to the host."""
    groups: ExpertGroups
    copies: TokenCopies | None = None
    """The TP group that shares out its rows; None: every rank has rows of its own."""
    beyond: HostCopy | None = None
    """What `counts_beyond` returns of this pass; None: the counts tell."""

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Returns who sends what to whom in each partition; the first use waits for the counts."""
        groups, source = self.groups, self.own.source
        device = source.row_map.rows.device
        # host synchronisation: for the counts, the only one of a forward pass
        counts, ranks, number = self.counts.wait(), (groups.ep_rank, groups.etp_rank), self.partitions.count
        check_routed(source.row_map, counts[ranks])
        if self.copies is not None:
            plans = plan_shared_partitions(counts, *ranks, self.copies, self.beyond, number, device)
        else:
            plans = plan_partitions(counts, *ranks, number, device, self.partitions.chunks)
        if self.partitions.way == JOINT:
            way = EpWithExpertTp(groups, source.payload)
        else:
            tp = None if self.copies is None else self.copies.group
            way = EpThenExpertTp(groups, "O1", source.payload, tp, self.partitions.chunks)
        return tuple(Exchange(way, plan) for plan in plans)


@dataclass(frozen=True)
class Partitioned:
    """What permute learnt and the pipeline needs; one object a forward pass."""

    partitions: Partitions
    prob_dtype: torch.dtype
    rows: PartitionedRows | HoppingTokens
    """The rows, which know who sends what to whom in each partition."""


class MpmoeDispatcher(Dispatcher):
    """Moves tokens to their experts, runs the experts, and moves the results back."""

    def __init__(
        self,
        groups: ExpertGroups,
        partitioning: Partitioning,
        wire: Wire = SAME,
        shares_tokens: bool = False,
        is_recomputed: bool = False,
    ) -> None:
        """
        Args:
            wire: how rows travel.
            is_recomputed: whether forward passes are repeated in backward passes, in the partitions that they had: then
                partitions are chosen once an optimizer step (`begin_step`).
            shares_tokens: a TP group whose ranks hold the same tokens shares them out here, or their rows.
        """
        self.groups, self.partitioning, self.wire = groups, partitioning, wire
        self.hops: TokenHops | None = None
        """Where the layer's tokens hop, in groups that live as long as this dispatcher; None: partitions go by rows."""
        self._shares_tokens, self._is_recomputed = shares_tokens, is_recomputed
        self._copies: TokenCopies | None = None
        """The TP group that shares out its tokens; None: every rank has tokens of its own."""
        self.migrated: MigratedExperts | None = None
        """The experts of this layer that travel, where tokens hop between their domains; None where none does."""
        self._rows: HostCopy | None = None
        """The rows that the experts of each rank got when partitions were last chosen, on their way to the host: the
        next ones are chosen by them.
        """
        self._of_step: Partitions | None = None
        """The partitions of all passes of an optimizer step, where passes are repeated; None: not chosen yet."""
        self._step_has_begun = False

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        what = self.partitioning.describe()
        if self._shares_tokens:
            what += "; tokens of a TP group shared out after the router, and gathered partition by partition"
        return what if self.migrated is None else f"{what}; {self.migrated.describe()}"

    @property
    def chooses_once_a_step(self) -> bool:
        """Whether partitions may be chosen for all passes of an optimizer step, at whose begin `begin_step` is called.

        So it is where passes are repeated, by Megatron or by torch.utils.checkpoint. Which one a repetition repeats is
        not known, and it must be cut alike: experts may draw random numbers, and Transformer Engine keeps scales of
        each call of them.
        """
        return not isinstance(self.partitioning, FixedPartitioning)

    def begin_step(self) -> None:
        """Has partitions chosen anew in the next pass that repeats none."""
        self._step_has_begun = True

    def take_copies(self, tp: ProcessGroup, tokens_TH: torch.Tensor) -> bool:
        """Returns whether a TP group shares out its tokens here, and gets back all of them."""
        if self._shares_tokens:
            way = SHARED_ROWS if self.hops is None else HOPS
            self._copies = TokenCopies.of(tp, self.groups, f"--moe-opt-way {way}", f"--moe-opt-way {ROWS}")
        return self._shares_tokens

    def permute(
        self,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        routing_map_TE: torch.Tensor,
        *,
        capacity: int | None = None,
        num_rows: int | None = None,
    ) -> tuple[torch.Tensor, Partitioned]:
        """Groups this rank's tokens by partition and, where each expert of a token has a row, by expert; each row has
        its probabilities behind it.
        """
        groups, copies = self.groups, self._copies
        tp = None if copies is None else copies.group

        def rows_of_ranks() -> list[int]:
            if capacity is not None:
                return [routing_map_TE.size(1) * capacity] * groups.ep_size
            rows = routing_map_TE.sum(0).view(groups.ep_size, -1).sum(1)
            dist.all_reduce(rows, group=groups.joint)
            before, self._rows = self._rows, HostCopy(rows)
            holders = groups.etp_size * (1 if tp is None else tp.size())
            # host synchronisation: where partitions depend on rows, in the first pass; later ones go by earlier rows
            return [of_rank // holders for of_rank in (before or self._rows).wait().tolist()]

        # Without gradients a pass is of an evaluation, or the first one of a re-entrant checkpoint, which repeats it.
        may_be_repeated = self.chooses_once_a_step and (saved_tensors_are_hooked() or not torch.is_grad_enabled())
        partitions = self._of_step
        if partitions is None or (self._step_has_begun and not is_recomputing()):
            partitions, self._step_has_begun = self.partitioning.choose(rows_of_ranks), False
            self._of_step = partitions if self._is_recomputed or may_be_repeated else None
        if partitions.way == HOPS:
            is_padded = capacity is not None
            shares = token_shares(partitions.count, partitions.strategy)
            rows = self.hops.rows(tokens_TH, probs_TE, routing_map_TE, shares, is_padded, tp)
            tokens = HoppingTokens.tell(self.hops, rows, routing_map_TE, self.migrated, copies)
            return self.hops.pack(tokens_TH, probs_TE, rows), Partitioned(partitions, probs_TE.dtype, tokens)
        sizes = {"capacity": capacity, "num_rows": num_rows}
        row_map, counts, beyond = map_shared_rows(routing_map_TE, groups, copies, **sizes)
        parts = partitions.count * partitions.chunks * (1 if tp is None else tp.size())
        packed, own = permuted(tokens_TH, probs_TE, row_map.cut(parts), self.wire)
        rows = PartitionedRows(partitions, own, counts, groups, copies, beyond)
        return packed, Partitioned(partitions, probs_TE.dtype, rows)

    def dispatch(
        self, packed: torch.Tensor, partitioned: Partitioned, prob_dtype: torch.dtype
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Returns the rows as they are, with their probabilities behind them: `through_experts` sends them."""
        return packed, None, packed.new_empty(0)

    def through_experts(
        self,
        packed: torch.Tensor,
        partitioned: Partitioned,
        experts: Experts,
        shared: tuple[SharedExperts, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs dispatch, experts and combine: takes what stands for packed rows, and returns what stands for their
        outputs, back at the source.

        Given the shared experts and their tokens, it runs them beside, and returns their outputs, too.
        """
        return through_experts(
            packed,
            partitioned.rows.own.wire,
            experts,
            partitioned.rows.exchanges,
            partitioned.partitions.strategy,
            partitioned.prob_dtype,
            shared,
        )

    def combine(self, returned: torch.Tensor, partitioned: Partitioned) -> torch.Tensor:
        """Returns the rows as they are, for they are back already."""
        return returned

    def unpermute(self, returned: torch.Tensor, partitioned: Partitioned) -> torch.Tensor:
        """Returns the outputs [T, H]: the sums of each token's rows; where tokens hop, their only rows."""
        return partitioned.rows.own.unpermute(returned)
