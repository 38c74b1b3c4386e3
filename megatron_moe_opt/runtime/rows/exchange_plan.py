"""Who sends how many rows to whom, chunk by chunk, and where they land: pure arithmetic on agreed counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels import ChunkList
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.schedules.pipeline import ChunkBytes
from megatron_moe_opt.topology.expert_groups import TokenCopies

_C = load_extension()

MIN_PHASE_BYTES = 64 * 1024  # of a rank's own rows; less takes its latency, and one all-to-all has it only once


@dataclass(frozen=True)
class ChunkPlan:
    """One rank's part in moving one chunk of the rows of a MoE layer."""

    send_counts: list[int]
    """Number of rows for each expert-parallel peer, [ep_size]."""
    arriving_counts: list[list[int]]
    """The rows of each rank for this rank's experts, [etp_size][ep_size]."""
    etp_rank: int
    by_expert: ChunkList
    """The chunks that move rows of the whole layer from arrival order (chunk, etp rank, ep rank, local expert) to
    expert order (local expert, etp rank, ep rank, chunk).
    """
    first_sent: int
    """Where the chunk begins among this rank's own rows."""
    first_received: int
    """Where it begins among the rows that arrive at this rank."""
    first_gathered: int
    """Where it begins among the rows of all expert-tensor-parallel peers."""

    @property
    def receive_counts(self) -> list[int]:
        """Returns the number of rows from each expert-parallel peer, [ep_size]."""
        return self.arriving_counts[self.etp_rank]

    @cached_property
    def num_sent(self) -> int:
        """Returns the rows of this rank, those for itself included."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Returns the rows that its all-to-all brings."""
        return self.gather_counts[self.etp_rank]

    @cached_property
    def gather_counts(self) -> list[int]:
        """Returns the rows that each expert-tensor-parallel peer holds after its all-to-all, [etp_size]."""
        return [sum(counts) for counts in self.arriving_counts]

    @cached_property
    def num_gathered(self) -> int:
        """Returns the rows for this rank's experts."""
        return sum(self.gather_counts)

    @cached_property
    def first_own(self) -> int:
        """Returns where this rank's block of the chunk begins among the rows of all expert-tensor-parallel peers."""
        return self.first_gathered + sum(self.gather_counts[: self.etp_rank])


@dataclass(frozen=True)
class ExchangePlan:
    """One rank's part in dispatching (and, read backwards, combining) the rows of one MoE layer."""

    chunks: tuple[ChunkPlan, ...]
    tokens_per_expert: torch.Tensor
    """Number of rows of each local expert, int64 [local experts], on the CPU."""
    arrives_sorted: bool
    """Whether arrival order is expert order."""
    of_tp: tuple[int, ...] = ()
    """Rows of each rank of the TP group that has shared them out, [tp_size]; empty: every rank has rows of its own."""
    tp_rank: int = 0

    @cached_property
    def num_sent(self) -> int:
        """Returns the rows of this rank that all chunks together send, to itself too."""
        return sum(chunk.num_sent for chunk in self.chunks)

    @cached_property
    def num_received(self) -> int:
        """Returns the rows that its all-to-alls bring."""
        return sum(chunk.num_received for chunk in self.chunks)

    def chunk(self, number: int) -> ChunkPlan:
        """Returns the chunk that an op of this number moves; where there is one alone, that, whatever the number."""
        return self.chunks[number if len(self.chunks) > 1 else 0]

    def chunk_bytes(self, row_bytes: int) -> list[ChunkBytes]:
        """Returns the bytes that move of each chunk."""
        return [ChunkBytes(chunk.num_sent * row_bytes, chunk.num_gathered * row_bytes) for chunk in self.chunks]

    @cached_property
    def num_gathered(self) -> int:
        """Returns the rows that this rank's experts get."""
        return sum(chunk.num_gathered for chunk in self.chunks)


def plan_exchange(
    counts: torch.Tensor, ep_rank: int, etp_rank: int, num_chunks: int = 1, device: torch.device | str = "cpu"
) -> ExchangePlan:
    """Plans the exchange of the rank at (ep_rank, etp_rank).

    Args:
        counts: int64 [ep_size, etp_size, experts] on the CPU: rows each rank has for each expert. Ranks that agree
            on it, and on num_chunks, arrive at plans that fit together.
        num_chunks: each rank's rows for each expert are cut into so many parts, as equal as whole rows allow; chunk c
            is part c of all of them. Rows must lie as `RowMap.cut(num_chunks)` has them.
        device: where the rows are.

    Returns:
        The plan of this rank. Expert-parallel rank e holds experts [e * n, (e + 1) * n), n = experts / ep_size.
    """
    (plan,) = plan_partitions(counts, ep_rank, etp_rank, 1, device, num_chunks)
    return plan


def plan_partitions(
    counts: torch.Tensor,
    ep_rank: int,
    etp_rank: int,
    num_partitions: int,
    device: torch.device | str = "cpu",
    num_chunks: int = 1,
) -> tuple[ExchangePlan, ...]:
    """Plans what `plan_exchange` plans, but for each part of the rows by itself: they arrive,
    and go back, separately.

    Args:
        num_chunks: of each partition. Rows must lie as `RowMap.cut(num_partitions * num_chunks)` has them.
    """
    of_all = num_partitions * num_chunks
    chunks, of_parts = _C.plan_exchange(counts, ep_rank, etp_rank, of_all, num_partitions, torch.device(device))
    chunks = tuple(map(_chunk_plan, chunks))
    # With one chunk and one expert there is nothing to sort.
    return tuple(
        ExchangePlan(
            chunks[j * num_chunks : (j + 1) * num_chunks],
            tokens_per_expert,
            num_chunks == 1 == len(tokens_per_expert),
        )
        for j, tokens_per_expert in enumerate(of_parts)
    )


def plan_shared_partitions(
    counts: torch.Tensor,
    ep_rank: int,
    etp_rank: int,
    copies: TokenCopies,
    beyond: HostCopy | None,
    num_partitions: int,
    device: torch.device | str = "cpu",
) -> tuple[ExchangePlan, ...]:
    """Plans what `plan_partitions` plans, where the ranks of a TP group have the same rows and send a part of each
    partition. Rows must lie as `RowMap.cut(num_partitions * tp_size)` has them: of a partition those of one TP rank
    after those of another.

    Args:
        counts: int64 [ep_size, etp_size, experts] on the CPU: rows each rank has for each expert, whoever sends them.
        beyond: see Sharing.

    Raises:
        RoutingError: they do not have the same rows.
    """
    tp_size, tp_rank = copies.group.size(), copies.group.rank()
    sent, rows, _ = _shares(counts, ep_rank, etp_rank, copies, beyond, num_partitions)
    plans = (plan_exchange(of_partition, ep_rank, etp_rank, 1, device) for of_partition in sent)
    of_ranks = [sum(of_peers) for of_peers in rows]
    return tuple(
        replace(plan, of_tp=tuple(of_ranks[j * tp_size : (j + 1) * tp_size]), tp_rank=tp_rank)
        for j, plan in enumerate(plans)
    )


def _shares(
    counts: torch.Tensor,
    ep_rank: int,
    etp_rank: int,
    copies: TokenCopies,
    beyond: HostCopy | None,
    num_partitions: int,
) -> tuple[torch.Tensor, list[list[int]], int]:
    """Returns what each rank exchanges of each partition, int64 [partitions, ep_size, etp_size, experts]; the rows of
    this rank's tokens in each TP rank's part for each EP rank, [partitions * tp_size][ep_size]; and the sum of counts.

    Raises RoutingError where ranks that hold the same tokens do not have the same rows.
    """
    copies.check_alike(counts, beyond and beyond.wait())
    return _C.share_out(counts, copies.tp_ranks, copies.group.size(), num_partitions, ep_rank, etp_rank)


def _chunk_plan(chunk: tuple[Any, ...]) -> ChunkPlan:
    sent, arriving, etp_rank, blocks, *firsts = chunk
    return ChunkPlan(sent, arriving, etp_rank, ChunkList(*blocks), *firsts)


@dataclass(frozen=True)
class Parts:
    """How the ranks of a TP group share out rows that all of them have: TP rank m exchanges part m, see RowMap.cut.

    They come back in phases, one EP peer each, and are shared with the TP group. Where the EP size is a power of two,
    phase p is with rank xor p: pairs that exchange, on one node first, between nodes then, all ranks alike.
    """

    group: ProcessGroup
    """The tensor-parallel group whose ranks hold the same tokens."""
    ep_ranks: tuple[int, ...]
    """The EP rank of each TP rank, [tp_size]."""
    rows: list[list[int]]
    """The rows of each part for the experts of each EP rank, [tp_size][ep_size]."""
    num_phases: int
    """The number of phases: the EP size; or 1, where rows come from all EP peers at once."""

    @property
    def first_own(self) -> int:
        """Returns the first row of this rank's part."""
        return self._first(self.group.rank())

    @property
    def num_rows(self) -> int:
        """Returns the rows of all parts of the TP group together."""
        return self._first(len(self.rows))

    def peers(self, ep_rank: int, phase: int) -> range:
        """Returns the EP ranks whose rows come back to `ep_rank` in a phase; of phase -p:
        those that get theirs in p.
        """
        if self.num_phases == 1:
            return range(len(self.rows[0]))
        in_pairs = self.num_phases & (self.num_phases - 1) == 0
        peer = ep_rank ^ abs(phase) if in_pairs else (ep_rank - phase) % self.num_phases
        return range(peer, peer + 1)

    def block(self, tp_rank: int, phase: int) -> tuple[int, int]:
        """Returns (first row, rows), among all, of what comes back to a TP rank in a phase."""
        peers, rows = self.peers(self.ep_ranks[tp_rank], phase), self.rows[tp_rank]
        return self._first(tp_rank) + sum(rows[: peers.start]), sum(rows[peers.start : peers.stop])

    def phase_bytes(self, row_bytes: int) -> list[ChunkBytes]:
        """Returns what moves in each phase: this rank's part of the rows, and all parts."""
        own, size = self.group.rank(), len(self.rows)
        return [
            ChunkBytes(self.block(own, p)[1] * row_bytes, sum(self.block(t, p)[1] for t in range(size)) * row_bytes)
            for p in range(self.num_phases)
        ]

    def _first(self, tp_rank: int) -> int:
        return sum(sum(rows) for rows in self.rows[:tp_rank])


@dataclass(frozen=True)
class Sharing:
    """What is shared out in a TP group, and how it comes back."""

    copies: TokenCopies
    row_bytes: int
    overlap: bool
    """Whether rows come back in phases, where the mean phase is worth it; False: in one."""
    beyond: HostCopy | None = None
    """The rows of the ranks of the TP group for each expert, int64 [tp_size, experts], where the joint group has not
    all of them and padding does not tell; on their way to the host before the joint group's counts.
    """


def share_out(counts: torch.Tensor, ep_rank: int, etp_rank: int, sharing: Sharing) -> tuple[torch.Tensor, Parts]:
    """Returns what each rank exchanges where the ranks of a TP group have the same rows.

    Args:
        counts: int64 [ep_size, etp_size, experts] on the CPU: rows each rank has for each expert, whoever sends them.

    Returns:
        Counts of the rows that each rank sends, for `plan_exchange` with one chunk; and the parts of this rank's group.

    Raises:
        RoutingError: they do not have the same rows.
    """
    copies, (ep_size, etp_size, _) = sharing.copies, counts.shape
    (sent,), rows, total = _shares(counts, ep_rank, etp_rank, copies, sharing.beyond, 1)
    # By what all ranks have, not by what these send: a TP group of several joint groups, whose rows are the same and
    # whose parts are not, gathers phase by phase too.
    mean_phase = total / copies.group.size() * sharing.row_bytes / (ep_size * etp_size * ep_size)
    in_phases = sharing.overlap and mean_phase >= MIN_PHASE_BYTES
    return sent, Parts(copies.group, copies.ep_ranks, rows, ep_size if in_phases else 1)
