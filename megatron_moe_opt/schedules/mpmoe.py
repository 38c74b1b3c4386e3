"""MPMoE's schedules: dispatch, experts and combine of n partitions of the rows as one pipeline, and its mirror.

    lane inter     S0 | S1 | R0 | S2 | R1 | R2          S: all-to-all to the experts, R: all-to-all back
    lane compute        C0   | C1   | C2                C: the experts

(MPMoE, Fig. 4b.) S and R alternate. Expert-TP's all-gather follows S and its reduce-scatter precedes R, in the lane
intra. Rows that have arrived are sorted by expert in the lane copy; outputs are sorted back in the lane intra, where
they need not wait for the next partition's sort. The backward pass has the same shape: R' brings the gradients of
outputs, C' computes, S' returns the gradients of inputs.

Without memory reuse every partition has buffers of its own. With it all partitions share them (Fig. 6): expert inputs
T_DI and outputs T_DO have two each, one to communicate and one to compute with; what the experts save for backward,
T_M, has one. So rows that arrive are sorted when the partition before them has been computed. Backward then gets back
what was overwritten, T_DI and T_M each in one of two ways (Table II):

    S1   offload, offload             S3   offload, recompute
    S2   communicate again, offload   S4   communicate again, recompute

Offloading has lanes of its own, d2h in the forward and h2d in the backward pass (Fig. 7).

What an op waits for follows from the buffers it touches: whoever writes what it reads, whoever reads what it
overwrites. Buffers of partition j are NAME.j, or NAME.SLOT where partitions share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .issue_order import in_issue_order
from .schedule import Kind, Lane, Op, Schedule, ScheduleError

EP = "ep"
EXPERT_TP = "expert-tp"


# Where a partition's rows lie on their way to the experts: NAME.j on this rank, as they arrive, and sorted by expert.
INPUT_ROWS = ("rows", "arrived", "tokens")
GRADIENT_ROWS = ("grad_combined", "grad_arrived", "grad_output")
PARTS = "parts.0"
"""What a reduce-scatter brings, until it is added. All partitions share it: in one lane each follows the other."""


class Restore(Enum):
    """How backward comes by a tensor of the forward pass."""

    KEEP = "keep"  # it is still there
    OFFLOAD = "offload"
    COMMUNICATE = "communicate"  # T_DI only
    RECOMPUTE = "recompute"  # T_M only


@dataclass(frozen=True)
class Strategy:
    """A row of Table II."""

    inputs: Restore
    """Of T_DI, the rows that experts take."""
    middle: Restore
    """Of T_M, what experts save for their backward pass."""

    @property
    def reuses(self) -> bool:
        """Whether partitions share buffers."""
        return self.inputs is not Restore.KEEP


NONE = "none"
STRATEGIES = {
    NONE: Strategy(Restore.KEEP, Restore.KEEP),
    "S1": Strategy(Restore.OFFLOAD, Restore.OFFLOAD),
    "S2": Strategy(Restore.COMMUNICATE, Restore.OFFLOAD),
    "S3": Strategy(Restore.OFFLOAD, Restore.RECOMPUTE),
    "S4": Strategy(Restore.COMMUNICATE, Restore.RECOMPUTE),
}


@dataclass(frozen=True)
class PartitionRows:
    """Rows of one partition on this rank."""

    own: int
    """That its all-to-all carries."""
    gathered: int
    """Of all expert-TP peers, after the all-gather."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row."""

    packed: int
    """With its probability, on the way to the experts."""
    token: int
    """Without."""
    middle: int = 0
    """Of what experts save for backward (T_M)."""


def forward(strategy: str, partitions: Sequence[PartitionRows], row: RowBytes, ep_size: int, etp_size: int) -> Schedule:
    """Rows through the experts and back: rows.j -> combined.j.

    Besides, `tokens.j` and `middle.j` stay behind without reuse, and what is offloaded ends in `host_tokens.j` and
    `host_middle.j`. The size of a compute op is that of its inputs, T_DI.
    """
    how, last = STRATEGIES[strategy], len(partitions) - 1
    pipeline = _Pipeline(how, partitions, row, ep_size, etp_size, [f"rows.{j}" for j in range(len(partitions))])
    pipeline.hops(0, *INPUT_ROWS)
    pipeline.sort(0, *INPUT_ROWS)
    for j, rows in enumerate(partitions):
        if j < last:
            pipeline.hops(j + 1, *INPUT_ROWS)
        if how.inputs is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, rows.gathered * row.token, ["tokens"], [f"host_tokens.{j}"])
        written = ["output"] if how.middle is Restore.RECOMPUTE else ["output", "middle"]
        pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, rows.gathered * row.token, ["tokens"], written)
        if how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, rows.gathered * row.middle, ["middle"], [f"host_middle.{j}"])
        if j < last:
            pipeline.sort(j + 1, *INPUT_ROWS)
        pipeline.combine(j, "output", row.token, "unsorted", "summed", f"combined.{j}")
    return pipeline.schedule(_name("forward", strategy, len(partitions)))


def backward(
    strategy: str, partitions: Sequence[PartitionRows], row: RowBytes, ep_size: int, etp_size: int
) -> Schedule:
    """Gradients of the rows' outputs to the experts, and of their inputs back: grad_combined.j -> grad_rows.j.

    Rows that were kept to be communicated again make room for their gradients: these go to rows.j then. A gradient op,
    like the compute op that it mirrors, has the size of T_DI. Partitions are in the same order as in the forward pass,
    which is the order in which weight gradients are added.
    """
    how, last = STRATEGIES[strategy], len(partitions) - 1
    inputs = [f"grad_combined.{j}" for j in range(last + 1)]
    for name, restore in (("tokens", how.inputs), ("middle", how.middle)):
        stays = {Restore.KEEP: name, Restore.OFFLOAD: f"host_{name}", Restore.COMMUNICATE: "rows"}.get(restore)
        inputs += [f"{stays}.{j}" for j in range(last + 1) if stays is not None]
    pipeline = _Pipeline(how, partitions, row, ep_size, etp_size, inputs)

    def prefetch(j: int, name: str, restore: Restore, row_bytes: int) -> None:
        if restore is Restore.OFFLOAD:
            size = partitions[j].gathered * row_bytes
            pipeline.add(Kind.PREFETCH, Lane.H2D, j, size, [f"host_{name}.{j}"], [name])

    def before_gradient(j: int) -> None:  # of the partition before
        prefetch(j, "tokens", how.inputs, row.token)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.hops(j, *INPUT_ROWS)
        pipeline.hops(j, *GRADIENT_ROWS)

    def after_gradient(j: int) -> None:
        prefetch(j, "middle", how.middle, row.middle)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.sort(j, *INPUT_ROWS)
        pipeline.sort(j, *GRADIENT_ROWS)

    target = "rows" if how.inputs is Restore.COMMUNICATE else "grad_rows"
    before_gradient(0)
    after_gradient(0)
    for j, rows in enumerate(partitions):
        if j < last:
            before_gradient(j + 1)
        if how.middle is Restore.RECOMPUTE:
            pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, rows.gathered * row.token, ["tokens"], ["middle"])
        read = ["tokens", "middle", "grad_output"]
        pipeline.add(Kind.GRADIENT, Lane.COMPUTE, j, rows.gathered * row.token, read, ["grad_tokens"])
        if j < last:
            after_gradient(j + 1)
        pipeline.combine(j, "grad_tokens", row.packed, "grad_unsorted", "grad_summed", f"{target}.{j}")
    return pipeline.schedule(_name("backward", strategy, len(partitions)))


def base_name(buffer: str) -> str:
    """The NAME of a buffer NAME.j."""
    return buffer.partition(".")[0]


class _Pipeline:
    """Ops one after another, each waiting for what its buffers ask for."""

    def __init__(
        self,
        strategy: Strategy,
        partitions: Sequence[PartitionRows],
        row: RowBytes,
        ep_size: int,
        etp_size: int,
        inputs: Sequence[str],
    ) -> None:
        self.strategy, self.partitions, self.row = strategy, partitions, row
        self.ep_size, self.etp_size, self.inputs = ep_size, etp_size, tuple(inputs)
        self.ops: list[Op] = []
        self._holds = {name: int(name.rpartition(".")[2]) for name in inputs}  # whose rows are in a buffer
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}

    def hops(self, j: int, source: str, arrived: str, target: str) -> None:
        """All-to-all and all-gather of a partition's rows to their experts: source.j -> arrived."""
        own, gathered = self._bytes(j, self._row_bytes(source))
        if self.ep_size > 1:
            self.add(Kind.ALL_TO_ALL, Lane.INTER, j, own, [f"{source}.{j}"], [arrived], EP)
        if self.etp_size > 1:
            rows = arrived if self.ep_size > 1 else f"{source}.{j}"
            self.add(Kind.ALL_GATHER, Lane.INTRA, j, gathered, [rows], [arrived], EXPERT_TP)

    def sort(self, j: int, source: str, arrived: str, target: str) -> None:
        """By expert: arrived -> target. Groups of one rank have no hops, and rows have not moved."""
        rows = arrived if self.ep_size * self.etp_size > 1 else f"{source}.{j}"
        self.add(Kind.COPY, Lane.COPY, j, self._bytes(j, self._row_bytes(source))[1], [rows], [target])

    def combine(self, j: int, source: str, row_bytes: int, unsorted: str, summed: str, target: str) -> None:
        """Sort by source, reduce-scatter and its sum, all-to-all: `source` -> `target`."""
        own, gathered = self._bytes(j, row_bytes)
        last = [target if self.ep_size * self.etp_size == 1 else unsorted]
        self.add(Kind.COPY, Lane.INTRA, j, gathered, [source], last)
        if self.etp_size > 1:
            self.add(Kind.REDUCE_SCATTER, Lane.INTRA, j, gathered, last, [PARTS], EXPERT_TP)
            added, last = [*last, PARTS], [target if self.ep_size == 1 else summed]
            self.add(Kind.SUM, Lane.INTRA, j, gathered, added, last)
        if self.ep_size > 1:
            self.add(Kind.ALL_TO_ALL, Lane.INTER, j, own, last, [target], EP)

    def add(
        self, kind: Kind, lane: Lane, j: int, size: int, reads: list[str], writes: list[str], group: str | None = None
    ) -> None:
        """Appends an op of partition j; names without a number are those of its buffers."""
        reads, writes = ([self._buffer(name, j) for name in names] for names in (reads, writes))
        for name in reads:
            if self._holds.get(name) != j:
                raise ScheduleError(f"{kind.value} of chunk {j} reads {name} of chunk {self._holds.get(name)}")
        before = {self._writer[name] for name in (*reads, *writes) if name in self._writer}
        before |= {reader for name in writes for reader in self._readers.get(name, ())}
        waits_for = tuple(sorted(index for index in before if self.ops[index].lane is not lane))
        index = len(self.ops)
        for name in reads:
            self._readers.setdefault(name, []).append(index)
        for name in writes:
            self._writer[name], self._readers[name], self._holds[name] = index, [], j
        self.ops.append(Op(kind, lane, j, size, waits_for, tuple(reads), tuple(writes), group))

    def schedule(self, name: str) -> Schedule:
        """What was added."""
        return Schedule(name, in_issue_order(self.ops), self.inputs)

    def _row_bytes(self, source: str) -> int:
        return self.row.packed if source == "rows" else self.row.token

    def _bytes(self, j: int, row_bytes: int) -> tuple[int, int]:
        return self.partitions[j].own * row_bytes, self.partitions[j].gathered * row_bytes

    def _buffer(self, name: str, j: int) -> str:
        if "." in name:
            return name
        if not self.strategy.reuses:
            return f"{name}.{j}"
        # What comes from the host has no buffer to arrive in: it has a second one to be fetched into, beside gradients.
        fetched = name == "tokens" and f"host_tokens.{j}" in self.inputs
        return f"{name}.{j % 2 if fetched else 0}"


def _name(direction: str, strategy: str, count: int) -> str:
    return f"mpmoe {strategy} {direction}, {count} partition(s)"
