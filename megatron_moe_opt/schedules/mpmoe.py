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

Buffers of partition j are NAME.j, or NAME.SLOT where partitions share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_moe_opt.schedules.monta import AllToAllAndGather
from megatron_moe_opt.schedules.pipeline import ChunkBytes, Pipeline, own_buffer
from megatron_moe_opt.schedules.schedule import Kind, Lane, Schedule


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
        """Whether partitions share buffers, so that what backward needs of them has to be restored."""
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
    """The bytes of one row at each place that MPMoE's pipeline moves it through."""

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
    pipeline = _Partitions(how, partitions, row, ep_size, etp_size, [f"rows.{j}" for j in range(len(partitions))])
    pipeline.send(0, INPUTS)
    pipeline.sort(0, INPUTS)
    for j, rows in enumerate(partitions):
        if j < last:
            pipeline.send(j + 1, INPUTS)
        if how.inputs is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, rows.gathered * row.token, ["tokens"], [f"host_tokens.{j}"])
        written = ["output"] if how.middle is Restore.RECOMPUTE else ["output", "middle"]
        pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, rows.gathered * row.token, ["tokens"], written)
        if how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, rows.gathered * row.middle, ["middle"], [f"host_middle.{j}"])
        if j < last:
            pipeline.sort(j + 1, INPUTS)
        pipeline.back(j, OUTPUTS, f"combined.{j}")
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
    pipeline = _Partitions(how, partitions, row, ep_size, etp_size, inputs)

    def prefetch(j: int, name: str, restore: Restore, row_bytes: int) -> None:
        if restore is Restore.OFFLOAD:
            size = partitions[j].gathered * row_bytes
            pipeline.add(Kind.PREFETCH, Lane.H2D, j, size, [f"host_{name}.{j}"], [name])

    def before_gradient(j: int) -> None:  # of the partition before
        prefetch(j, "tokens", how.inputs, row.token)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.send(j, INPUTS)
        pipeline.send(j, OUTPUT_GRADIENTS)

    def after_gradient(j: int) -> None:
        prefetch(j, "middle", how.middle, row.middle)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.sort(j, INPUTS)
        pipeline.sort(j, OUTPUT_GRADIENTS)

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
        pipeline.back(j, INPUT_GRADIENTS, f"{target}.{j}")
    return pipeline.schedule(_name("backward", strategy, len(partitions)))


@dataclass(frozen=True)
class _Rows:
    """What travels, on one way or the other."""

    source: str
    is_packed: bool
    names: Mapping[str, str]
    """Of the buffers of a way, where they are called otherwise here. An all-gather is in place, and what a
    reduce-scatter brings has one buffer for all partitions: in one lane each follows the other."""


INPUTS = _Rows("rows", True, {"gathered": "arrived", "sorted": "tokens"})
OUTPUTS = _Rows("output", False, {"parts": "parts.0"})
OUTPUT_GRADIENTS = _Rows(
    "grad_combined", False, {"arrived": "grad_arrived", "gathered": "grad_arrived", "sorted": "grad_output"}
)
INPUT_GRADIENTS = _Rows(
    "grad_tokens", True, {"unsorted": "grad_unsorted", "parts": "grad_parts.0", "summed": "grad_summed"}
)


class _Partitions(Pipeline):
    """A pipeline of partitions, which may share buffers."""

    def __init__(
        self,
        strategy: Strategy,
        partitions: Sequence[PartitionRows],
        row: RowBytes,
        ep_size: int,
        etp_size: int,
        inputs: Sequence[str],
    ) -> None:
        super().__init__(inputs, self._name)
        self._reuses, self._partitions, self._row, self._given = strategy.reuses, partitions, row, frozenset(inputs)
        self._arrived: dict[tuple[int, str], str] = {}
        """Where the rows of a partition are that have been sent, but not sorted."""
        self._way = AllToAllAndGather(ep_size, etp_size, sort=Lane.COPY, unsort=Lane.INTRA)

    def send(self, j: int, rows: _Rows) -> None:
        """A partition's rows to their experts. Without a group of several ranks they stay."""
        *moves, _ = self._way.out(self._bytes(j, rows))
        self._arrived[j, rows.source] = self.through(j, own_buffer(rows.source, j), moves, rows.names)

    def sort(self, j: int, rows: _Rows) -> None:
        """By expert, once they have arrived."""
        *_, sort = self._way.out(self._bytes(j, rows))
        self.through(j, self._arrived.pop((j, rows.source)), [sort], rows.names)

    def back(self, j: int, rows: _Rows, target: str) -> None:
        """To their sources: rows.source -> target."""
        stages = self._way.back(self._bytes(j, rows))
        self.through(j, rows.source, stages, {**rows.names, stages[-1].writes: target})

    def _bytes(self, j: int, rows: _Rows) -> ChunkBytes:
        row_bytes = self._row.packed if rows.is_packed else self._row.token
        return ChunkBytes(self._partitions[j].own * row_bytes, self._partitions[j].gathered * row_bytes)

    def _name(self, name: str, j: int) -> str:
        if "." in name:
            return name
        if not self._reuses:
            return own_buffer(name, j)
        # What comes from the host has no buffer to arrive in: it has a second one to be fetched into, beside gradients.
        fetched = name == "tokens" and f"host_tokens.{j}" in self._given
        return f"{name}.{j % 2 if fetched else 0}"


def _name(direction: str, strategy: str, count: int) -> str:
    return f"mpmoe {strategy} {direction}, {count} partition(s)"
