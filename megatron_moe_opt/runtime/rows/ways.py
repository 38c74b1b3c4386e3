"""Ways of rows between the ranks of groups: what each op of a way does with the buffers that it touches.

The stages of a way, and so its schedules, are those of schedules/monta.py and schedules/parm.py. Rows of the buffers:

    rows                    this rank's own                          [num_sent, W]
    arrived, gathered       of the experts here, as they arrive      [num_gathered, W]
    unsorted                the same, back in that order
    parts                   what other shards have for a sum here    [num_rows("parts"), W]
    summed                  the sums                                 [num_received, W]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.steps import Blocks, Steps, blocks_of
from megatron_moe_opt.runtime.rows.exchange_plan import ChunkPlan, ExchangePlan, Parts
from megatron_moe_opt.runtime.rows.row_layout import AtExperts, Layout, Payload, RowLayout
from megatron_moe_opt.schedules import monta, mpmoe, parm
from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.schedules.partition_rows import Partition, PartitionRows
from megatron_moe_opt.schedules.pipeline import Stages
from megatron_moe_opt.schedules.schedule import Kind, MovingSchedule, Op, Outline
from megatron_moe_opt.topology.expert_groups import ExpertGroups

Plan = TypeVar("Plan", contravariant=True)


class Way(Protocol[Plan]):
    """How rows reach the ranks of their experts and come back, by a plan of counts that all ranks agree on: an
    ExchangePlan for the ways here, a HopPlan for hops (hop_way.py). A tensor holds the rows of all chunks of a plan.
    """

    @property
    def groups(self) -> Any:
        """Returns the groups between whose ranks rows move: ExpertGroups, or DomainGroups of hops."""

    @property
    def lies_in(self) -> Mapping[str, str]:
        """Returns the buffers that are in the memory of another one, by name."""

    def dispatch(self, plan: Plan, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows to their experts, chunk by chunk."""

    def combine(self, plan: Plan, row_bytes: int) -> MovingSchedule:
        """Returns the schedule of rows back to their sources."""

    @property
    def stages(self) -> Stages:
        """Returns the stages of a partition that goes through its experts in a pipeline with others."""

    def rows_of(self, plan: Plan) -> Partition:
        """Returns the rows of a plan, as those stages take them."""

    def num_rows(self, buffer: str, plan: Plan, chunk: int) -> int:
        """Returns the number of rows that a buffer has to hold; of `parts`, for one chunk."""

    def outbound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows [R, W] to the experts: packed ones or, without prob_dtype, output gradients."""

    def homebound(self, prob_dtype: torch.dtype | None) -> Layout:
        """Returns the layout of rows back: sums of outputs or, with prob_dtype, of gradients of packed rows."""

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: Plan) -> Steps:
        """Returns what an op does on the way to the experts, but for the one that sorts by expert."""

    def sort(self, here: AtExperts[Plan]) -> Steps:
        """Returns what the op does that sorts by expert: rows as they arrived become tokens,
        probabilities and notes.
        """

    def unsort(self, here: AtExperts[Plan]) -> Steps:
        """Returns what the op does that sorts by source: outputs or gradients get the order in
        which their rows arrived.
        """

    def step_back(self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: Plan, layout: Any) -> Steps:
        """Returns what any op does on the way back, but for the one that sorts by source.

        Args:
            reads: the tensors behind `op.reads`.
            layout: of the rows, see `homebound`.
        """


class _RowForEveryExpert:
    """What those ways have in common on which a token makes a row for each of its experts."""

    payload: Payload

    def rows_of(self, plan: ExchangePlan) -> PartitionRows:
        """Returns the rows of a plan, as the stages take them."""
        return PartitionRows(plan.num_sent, plan.num_gathered, plan.of_tp, plan.tp_rank)

    def outbound(self, prob_dtype: torch.dtype | None) -> RowLayout:
        """Returns the layout of rows [R, W] on their way to the experts."""
        return RowLayout(self.payload, self.payload.wire.dispatch, prob_dtype)

    def homebound(self, prob_dtype: torch.dtype | None) -> RowLayout:
        """Returns the layout of rows on their way back."""
        return RowLayout(self.payload, self.payload.wire.combine, prob_dtype)

    def sort(self, here: AtExperts[ExchangePlan]) -> Steps:
        """Returns the steps that make tokens, probabilities and notes of rows as they arrived."""
        return here.layout.split(here, here.plan.chunk(here.chunk))

    def unsort(self, here: AtExperts[ExchangePlan]) -> Steps:
        """Returns the steps that put outputs or gradients in the order in which their rows arrived."""
        return here.layout.join(here, here.plan.chunk(here.chunk))


@dataclass(frozen=True)
class EpThenExpertTp(_RowForEveryExpert):
    """MoNTA's way: all-to-all over EP, then all-gather over expert-TP; back, reduce-scatter and all-to-all.

    Of rows that all ranks of a TP group have, each sends its part of a partition, and they gather the sums.
    """

    groups: ExpertGroups
    level: str
    """The level of MoNTA's pipeline of chunks, which decides the lanes."""
    payload: Payload
    tp: ProcessGroup | None = None
    """The group whose ranks have shared out the rows of a partition, and get back all of them; None: they are this
    rank's own.
    """
    chunks: int = 1
    """The chunks of a partition that goes through its experts in a pipeline with others."""

    lies_in: ClassVar[Mapping[str, str]] = monta.AllToAllAndGather.lies_in

    def dispatch(self, plan: ExchangePlan, row_bytes: int) -> MovingSchedule:
        """Returns MoNTA's schedule of rows to their experts, chunk by chunk, at this level."""
        return self._outline("dispatch", plan).moving(lambda: plan.chunk_bytes(row_bytes))

    def combine(self, plan: ExchangePlan, row_bytes: int) -> MovingSchedule:
        """Returns MoNTA's schedule of rows back to their sources, chunk by chunk, at this level."""
        return self._outline("combine", plan).moving(lambda: plan.chunk_bytes(row_bytes))

    def _outline(self, direction: str, plan: ExchangePlan) -> Outline:
        return monta.outline(direction, self.level, len(plan.chunks), self.groups.ep_size, self.groups.etp_size)

    @property
    def stages(self) -> monta.AllToAllAndGather:
        """Returns the stages of one partition in a pipeline with the experts."""
        groups, tp_size = self.groups, 1 if self.tp is None else self.tp.size()
        return mpmoe.by_rows(groups.ep_size, groups.etp_size, tp_size, self.chunks)

    def num_rows(self, buffer: str, plan: ExchangePlan, chunk: int) -> int:
        """Returns the rows that a buffer of this way has to hold; of `parts`, for one chunk."""
        if buffer == "parts":
            return (self.groups.etp_size - 1) * plan.chunk(chunk).num_received
        if buffer == "rows":
            return plan.num_sent
        return plan.num_received if buffer == "summed" else plan.num_gathered

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: ExchangePlan) -> Steps:
        """Returns the all-to-all over EP, or the all-gather over expert-TP, of one chunk on the way to the experts."""
        chunk, groups = plan.chunk(op.chunk), self.groups
        own = arrived.narrow(0, chunk.first_own, chunk.num_received)
        if op.kind is Kind.ALL_TO_ALL:
            return steps.all_to_all(_sent(rows, chunk), chunk.send_counts, own, chunk.receive_counts, groups.ep)
        own = own if groups.ep_size > 1 else _sent(rows, chunk)
        return steps.all_gather(own, _gathered(arrived, chunk), chunk.gather_counts, groups.etp)

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: ExchangePlan, layout: RowLayout
    ) -> Steps:
        """Returns the exchange over expert-TP, the sum, or the all-to-all over EP, of one chunk on the way back."""
        chunk, groups = plan.chunk(op.chunk), self.groups
        if op.group == TP:
            return steps.all_gather(reads[0], written, plan.of_tp, self.tp)
        if op.kind is Kind.REDUCE_SCATTER:
            return steps.scatter(_gathered(reads[0], chunk), written, chunk.gather_counts, groups.etp)
        if op.kind is Kind.SUM:
            parts, of_peers, summed = reads[0], _gathered(reads[1], chunk), _received(written, chunk)
            return steps.sum_scattered(of_peers, parts, summed, chunk.gather_counts, groups.etp, layout.columns)
        summed = _received(reads[0], chunk)
        return steps.all_to_all(summed, chunk.receive_counts, _sent(written, chunk), chunk.send_counts, groups.ep)


@dataclass(frozen=True)
class EpWithExpertTp(_RowForEveryExpert):
    """Parm's way: one all-to-all over both groups, to all shards of an expert at once; back, all their parts and their
    sum.

    Rows that all ranks of a TP group have go to their experts once: each rank sends its part of them, and they come
    back to all ranks, in one chunk, whose ops are numbered by phase. Ranks of the joint group are in the order of (EP
    rank, expert-TP rank).
    """

    groups: ExpertGroups
    payload: Payload
    parts: Parts | None = None
    """How a TP group shares out its rows; None: every rank has rows of its own."""

    @property
    def lies_in(self) -> Mapping[str, str]:
        """Returns where a sum lies: it is this rank's own part of what all ranks get."""
        return {"summed": "rows"}

    def dispatch(self, plan: ExchangePlan, row_bytes: int) -> MovingSchedule:
        """Returns Parm's schedule of rows to all shards of their experts at once."""
        outline = parm.outline("dispatch", len(plan.chunks), self.groups.etp_size)
        return outline.moving(lambda: plan.chunk_bytes(row_bytes))

    def combine(self, plan: ExchangePlan, row_bytes: int) -> MovingSchedule:
        """Returns Parm's schedule of rows back to their sources; of shared rows, to all ranks of the TP group."""
        parts, etp_size = self.parts, self.groups.etp_size
        if parts is None:
            return parm.outline("combine", len(plan.chunks), etp_size).moving(lambda: plan.chunk_bytes(row_bytes))
        return parm.outline_and_gather(parts.num_phases, etp_size).moving(
            lambda: parm.sizes_of_phases(plan.num_gathered * row_bytes, parts.phase_bytes(row_bytes), etp_size)
        )

    @property
    def stages(self) -> parm.JointAllToAll:
        """Returns the stages of one partition in a pipeline with the experts."""
        return mpmoe.jointly(self.groups.etp_size)

    def num_rows(self, buffer: str, plan: ExchangePlan, chunk: int) -> int:
        """Returns the rows that a buffer of this way has to hold; of `parts`, for one chunk."""
        if buffer == "parts":
            return self.groups.etp_size * sum(self._brought(plan.chunk(chunk), chunk)[1])
        if buffer == "rows":
            return plan.num_sent if self.parts is None else self.parts.num_rows
        return plan.num_gathered

    def step_out(self, op: Op, rows: torch.Tensor, arrived: torch.Tensor, plan: ExchangePlan) -> Steps:
        """Returns the one all-to-all to all shards of the experts."""
        chunk, groups = plan.chunk(op.chunk), self.groups
        blocks = blocks_of(chunk.send_counts, self._first_own(chunk))
        sent = [block for block in blocks for _ in range(groups.etp_size)]
        return steps.exchange(rows, sent, arrived, self._arrivals(chunk), groups.joint, "all_to_all")

    def step_back(
        self, op: Op, reads: Sequence[torch.Tensor], written: torch.Tensor, plan: ExchangePlan, layout: RowLayout
    ) -> Steps:
        """Returns the all-to-all, the sum of its parts, or a phase of what is shared over TP, on the way back."""
        chunk, groups, parts = plan.chunk(op.chunk), self.groups, self.parts
        if op.group == TP:
            blocks = [parts.block(rank, op.chunk) for rank in range(parts.group.size())]
            own = [blocks[parts.group.rank()]] * len(blocks)
            return steps.exchange(reads[0], own, written, blocks, parts.group, "all_gather")
        first, counts = self._brought(chunk, op.chunk)
        num_rows, arrivals = sum(counts), self._arrivals(chunk)
        if op.group is None:
            target = written.narrow(0, first, num_rows)
            if op.kind is Kind.COPY:  # the rows of this rank alone
                added = [reads[0].narrow(0, *arrivals[groups.ep_rank * groups.etp_size])]
            else:
                added = reads[0].split(num_rows) if num_rows else [target]
            return steps.sum_parts(added, target, layout.columns)
        by_shard = [blocks_of(counts, shard * num_rows) for shard in range(groups.etp_size)]
        from_ = [by_shard[shard][ep_rank] for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]
        if op.group == parm.JOINT_GROUP:
            receivers = self._peers(-op.chunk)
            to = [block if joint // groups.etp_size in receivers else (0, 0) for joint, block in enumerate(arrivals)]
            return steps.exchange(reads[0], to, written, from_, groups.joint, "all_to_all")
        own = slice(groups.ep_rank * groups.etp_size, (groups.ep_rank + 1) * groups.etp_size)  # joint ranks
        return steps.exchange(reads[0], arrivals[own], written, from_[own], groups.etp, "reduce_scatter")

    def _peers(self, phase: int) -> range:
        """Returns the EP ranks from which rows come back in a phase; of phase -p: those that get theirs in p."""
        everybody = range(self.groups.ep_size)
        return everybody if self.parts is None else self.parts.peers(self.groups.ep_rank, phase)

    def _brought(self, chunk: ChunkPlan, phase: int) -> tuple[int, list[int]]:
        """Returns the first of the own rows that come back in a phase, and how many come from each EP rank."""
        senders = self._peers(phase)
        counts = [count if peer in senders else 0 for peer, count in enumerate(chunk.send_counts)]
        return self._first_own(chunk) + sum(chunk.send_counts[: senders.start]), counts

    def _first_own(self, chunk: ChunkPlan) -> int:
        return chunk.first_sent + (0 if self.parts is None else self.parts.first_own)

    def _arrivals(self, chunk: ChunkPlan) -> Blocks:
        """Returns the place of the rows of each rank of the joint group among those of this rank's experts."""
        groups, first, by_shard = self.groups, chunk.first_gathered, []
        for counts in chunk.arriving_counts:
            by_shard.append(blocks_of(counts, first))
            first += sum(counts)
        return [by_shard[shard][ep_rank] for ep_rank in range(groups.ep_size) for shard in range(groups.etp_size)]


def way_of(groups: ExpertGroups, level: str | None, payload: Payload) -> Way:
    """Returns the way of MoNTA at a level of its pipelining; without one, Parm's."""
    return EpWithExpertTp(groups, payload) if level is None else EpThenExpertTp(groups, level, payload)


def _sent(rows: torch.Tensor, chunk: ChunkPlan) -> torch.Tensor:
    return rows.narrow(0, chunk.first_sent, chunk.num_sent)


def _gathered(rows: torch.Tensor, chunk: ChunkPlan) -> torch.Tensor:
    return rows.narrow(0, chunk.first_gathered, chunk.num_gathered)


def _received(rows: torch.Tensor, chunk: ChunkPlan) -> torch.Tensor:
    return rows.narrow(0, chunk.first_received, chunk.num_received)
