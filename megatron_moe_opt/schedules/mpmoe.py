"""MPMoE's schedules: dispatch, experts and combine of n partitions of the rows as one pipeline, and its mirror.

    lane inter     S0 | S1 | R0 | S2 | R1 | R2          S: all-to-all to the experts, R: all-to-all back
    lane compute        C0   | C1   | C2                C: the experts

(MPMoE, Fig. 4b.) S and R alternate. Expert-TP's all-gather follows S and its reduce-scatter precedes R, in the lane
intra. Rows that have arrived are sorted by expert in the lane copy; outputs are sorted back in the lane intra, where
they need not wait for the next partition's sort. The backward pass has the same shape: R' brings the gradients of
outputs, C' computes, S' returns the gradients of inputs.

Without memory reuse every partition has buffers of its own. With it all partitions share them (Fig. 6): expert inputs
T_DI and outputs T_DO have two each, one to communicate and one to compute with; what the experts save for backward,
T_M, has one or, where it is offloaded, two, one to compute with and one to copy (Strategy.middle_buffers). So rows that
arrive are sorted when the partition before them has been computed. Backward then gets back what was overwritten, T_DI
and T_M each in one of two ways (Table II):

    S1   offload, offload             S3   offload, recompute
    S2   communicate again, offload   S4   communicate again, recompute

Offloading has lanes of its own, d2h in the forward and h2d in the backward pass (Fig. 7). The paper activates in place,
and its T_M is the output of an expert's first matrix product: that is what is offloaded, and what Megatron's experts
save besides is computed again from it.

In chunks, a partition goes as MoNTA's rows do: one chunk of it is inside nodes while the next one is between them, and
the experts take all of them at once.

What lies between a rank's rows and its experts are the stages of a way (`by_rows`; `jointly`, in one all-to-all to all
shards of an expert; or hops.py's: then a partition is a part of the tokens, each of which crosses a link once). Where
that is more than one all-to-all, two partitions are on their way before the experts have had one, if memory is not
shared. On the way back a partition then passes what lies behind the first links while the next but one is on these,
and the next but one does while that returns on these: the first links need not wait for the others, nor the experts
for either.

Nothing is beside the first partition's way to the experts and the last one's way back. Where partitions are parts of
the tokens, those at both ends are smaller therefore (`token_shares`).

Shared experts, which all tokens go through where they are, do half of their work while the first partition is on its
way, before its experts, and half while the last one is on its way back, behind those of that.

Buffers of partition j are NAME.j, or NAME.SLOT where partitions share them; a chunk's part of one is NAME.j/CHUNK. Of
gradients they are called grad_NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

from megatron_moe_opt.schedules.monta import TP, AllToAllAndGather
from megatron_moe_opt.schedules.parm import JointAllToAll
from megatron_moe_opt.schedules.pipeline import ChunkBytes, Pipeline, Stage, Stages, base_name, own_buffer
from megatron_moe_opt.schedules.schedule import Kind, Lane, Measure, Outline, Schedule

Part = Callable[[int], None]
"""A function that adds the ops of the partition with this number."""


class Restore(Enum):
    """How backward comes by a tensor of the forward pass."""

    KEEP = "keep"  # it is still there
    OFFLOAD = "offload"
    COMMUNICATE = "communicate"  # T_DI only
    RECOMPUTE = "recompute"  # T_M only


@dataclass(frozen=True)
class Strategy:
    """A strategy of sharing memory between partitions (MPMoE, Table II)."""

    inputs: Restore
    """What becomes of T_DI, the rows that experts take."""
    middle: Restore
    """What becomes of T_M, what experts save for their backward pass."""

    @property
    def reuses(self) -> bool:
        """Whether partitions share buffers, so that what backward needs of them has to be restored."""
        return self.inputs is not Restore.KEEP

    @property
    def middle_buffers(self) -> int:
        """Returns the number of partitions whose T_M is on the device at once, where they share memory.

        Two where it is offloaded: the paper allocates one (section III-C, eq. 5), but has its copy beside the next
        partition's experts (Fig. 8b and c), which fill another one.
        """
        return 2 if self.middle is Restore.OFFLOAD else 1


PARTITIONS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The numbers of partitions to choose from: the paper's 2 to 8, and not to cut at all."""
NONE = "none"
STRATEGIES = {
    NONE: Strategy(Restore.KEEP, Restore.KEEP),
    "S1": Strategy(Restore.OFFLOAD, Restore.OFFLOAD),
    "S2": Strategy(Restore.COMMUNICATE, Restore.OFFLOAD),
    "S3": Strategy(Restore.OFFLOAD, Restore.RECOMPUTE),
    "S4": Strategy(Restore.COMMUNICATE, Restore.RECOMPUTE),
}
ROWS, HOPS, JOINT, SHARED_ROWS = "rows", "hops", "joint", "shared-rows"
"""The ways: a row for each expert of a token; a token once over every link; a row at once for each shard of each of its
experts; or rows for each expert of tokens that all ranks of a TP group hold, which they share out (Parm's S2).
"""
_AT_THE_ENDS = (2, 3)
"""The shares of the tokens that the first partitions have, and the last ones mirrored, where others have 4."""
SHARED_TOKENS, SHARED_OUTPUT_GRADIENTS = "shared_tokens.0", "grad_shared_output.0"
"""What shared experts take in either direction: of all tokens of a rank, whatever the partition."""


def token_shares(count: int, strategy: str) -> list[int]:
    """Returns the shares of a rank's tokens that so many partitions have, where partitions are parts of the tokens.

    The experts wait for the first partition and the links for the last one, so that these are half as large as those
    in the middle: by simulation 0.94 to 1.01 times the time of equal ones. Up to three have no middle. Where memory is
    shared all are equal: the largest one says how much is allocated.
    """
    shares = [4] * count
    if count > len(_AT_THE_ENDS) + 1 and not STRATEGIES[strategy].reuses:
        shares[: len(_AT_THE_ENDS)] = _AT_THE_ENDS
        shares[-len(_AT_THE_ENDS) :] = reversed(_AT_THE_ENDS)
    return shares


class Partition(Protocol):
    """What a schedule has to know of the rows of one partition on this rank."""

    @property
    def own(self) -> int:
        """Returns the number of the partition's rows that this rank sends out."""

    @property
    def packed(self) -> int:
        """Returns the number of rows that are packed here: its own; or all that it gets back, its own among them."""

    @property
    def returned(self) -> int:
        """Returns the number of rows that this rank gets back: those that it has sent; or, where a TP group has shared
        its rows out, those of all ranks of that group.
        """

    @property
    def own_place(self) -> int:
        """Returns the place of this rank's own rows among those that it gets back: the number of the first one."""

    @property
    def gathered(self) -> int:
        """Returns the number of the partition's rows that the experts of this rank get."""

    def bytes(self, row_bytes: int) -> Any:
        """Returns the bytes that move of rows of so many bytes each, in the form that the way's stages take them."""


@dataclass(frozen=True)
class PartitionRows:
    """Rows of one partition on this rank, by_rows."""

    own: int
    """Number of rows that its all-to-all carries."""
    gathered: int
    """Number of rows of all expert-TP peers, after the all-gather."""
    of_tp: tuple[int, ...] = ()
    """Rows of each rank of the TP group that has shared out its rows; empty: they are this rank's own."""
    tp_rank: int = 0

    @property
    def returned(self) -> int:
        """Returns the number of rows that come back to this rank."""
        return sum(self.of_tp) if self.of_tp else self.own

    packed = returned  # each rank packs the rows of the whole TP group

    @property
    def own_place(self) -> int:
        """Returns where its own rows begin among them."""
        return sum(self.of_tp[: self.tp_rank])

    def bytes(self, row_bytes: int) -> ChunkBytes:
        """Returns what moves of rows of so many bytes."""
        return ChunkBytes(self.own * row_bytes, self.gathered * row_bytes, self.returned * row_bytes)


def by_rows(ep_size: int, etp_size: int, tp_size: int = 1, chunks: int = 1) -> AllToAllAndGather:
    """Returns the stages of a row for every expert of a token: MPMoE's own. With a TP group of several ranks these have
    shared out their rows. A partition goes in so many chunks, as MoNTA's rows do.
    """
    return AllToAllAndGather(ep_size, etp_size, Lane.COPY, Lane.INTRA, tp_size, chunks)


def jointly(etp_size: int) -> JointAllToAll:
    """Returns the stages of one all-to-all to all shards of the experts: Parm's. What is sorted and summed on the way
    back does not hold up the next partition's.
    """
    return JointAllToAll(etp_size, unsort=Lane.INTRA, sums=Lane.COPY)


@dataclass(frozen=True)
class RowBytes:
    """The bytes of one row at each place that MPMoE's pipeline moves it through."""

    packed: int
    """Bytes of a token with its probability, on the way to the experts."""
    token: int
    """Bytes of a token as the experts have it."""
    middle: int = 0
    """Bytes of the part that is offloaded of what experts save for backward (T_M)."""
    returned: int | None = None
    """Bytes of a token's gradient with that of its probability, on the way back; None: as much as `packed`."""
    outputs: int | None = None
    """Bytes of an output on the way back; None: as much as `token`."""
    output_gradients: int | None = None
    """Bytes of the gradient of an output, on the way to the experts; None: as much as `token`."""
    activations: int = 0
    """Bytes of what experts save besides `middle` and is computed again from it, where that was offloaded."""

    def of(self, move: Move) -> int:
        """Returns the bytes of a row on the way of this move."""
        own, other = {
            INPUTS: (self.packed, 0),
            INPUT_GRADIENTS: (self.returned, self.packed),
            OUTPUTS: (self.outputs, self.token),
            OUTPUT_GRADIENTS: (self.output_gradients, self.token),
        }[move]
        return other if own is None else own


@dataclass(frozen=True)
class Moved:
    """What moves of one partition: its rows, and what they take."""

    rows: Partition
    row: RowBytes
    shared: int = 0
    """Bytes of the tokens that shared experts take, which are all of a rank's in whichever partition."""
    _known: dict[Move, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def bytes(self, move: Move) -> Any:
        """Returns the bytes of its rows on the way of a move, in the form that the way's stages take them."""
        if move not in self._known:  # each stage of the way asks
            self._known[move] = self.rows.bytes(self.row.of(move))
        return self._known[move]


def forward(
    strategy: str, partitions: Sequence[Partition], row: RowBytes, way: Stages, shared: int | None = None
) -> Schedule:
    """Returns the schedule of rows through the experts and back: rows.j -> combined.j.

    Besides, `tokens.j` and `middle.j` stay behind without reuse, and what is offloaded ends in `host_tokens.j` and
    `host_middle.j`. The size of a compute op is that of its inputs, T_DI.

    Args:
        shared: bytes of the tokens that shared experts take beside the rows; None: there are none, or they run before.
    """
    outline = forward_outline(strategy, len(partitions), way, shared is not None)
    return outline.sized(_moved(partitions, row, shared or 0))


def backward(
    strategy: str, partitions: Sequence[Partition], row: RowBytes, way: Stages, shared: int | None = None
) -> Schedule:
    """Returns the schedule of gradients of the rows' outputs to the experts, and of those of their inputs back:
    grad_combined.j -> grad_rows.j.

    Rows that were kept to be communicated again have been read by then: grad_rows.j may be in their memory. A gradient
    op, like the compute op that it mirrors, has the size of T_DI. Partitions are in the same order as in the forward
    pass, which is the order in which weight gradients are added. `shared` as in `forward`.
    """
    outline = backward_outline(strategy, len(partitions), way, shared is not None)
    return outline.sized(_moved(partitions, row, shared or 0))


def _moved(partitions: Sequence[Partition], row: RowBytes, shared: int) -> list[Moved]:
    """Returns what moves of partitions, of which some may be the same object."""
    known = {id(rows): Moved(rows, row, shared) for rows in partitions}
    return [known[id(rows)] for rows in partitions]


def _inputs(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.token


def _middle(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.middle


def _activations(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.activations


def _shared(moved: Moved) -> int:
    return moved.shared


@cache
def forward_outline(strategy: str, count: int, way: Stages, with_shared: bool = False) -> Outline:
    """Returns what `forward` does with so many partitions, whatever moves."""
    how = STRATEGIES[strategy]
    inputs = [f"rows.{j}" for j in range(count)]
    pipeline = _Partitions(how, count, way, [*inputs, *([SHARED_TOKENS] if with_shared else [])])

    def compute(j: int) -> None:
        if how.inputs is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, _inputs, ["tokens"], [f"host_tokens.{j}"])
        written = ["output"] if how.middle is Restore.RECOMPUTE else ["output", "middle"]
        pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, _inputs, ["tokens"], written)
        if how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, _middle, ["middle"], [f"host_middle.{j}"])

    pipeline.alternate(
        lambda j: pipeline.send(j, INPUTS),
        lambda j: pipeline.sort(j, INPUTS),
        compute,
        lambda j: pipeline.back(j, OUTPUTS, f"combined.{j}"),
        (Kind.SHARED, SHARED_TOKENS) if with_shared else None,
    )
    return pipeline.outline(_name("forward", strategy, count))


@cache
def backward_outline(strategy: str, count: int, way: Stages, with_shared: bool = False) -> Outline:
    """Returns what `backward` does with so many partitions, whatever moves."""
    how = STRATEGIES[strategy]
    inputs = [f"grad_combined.{j}" for j in range(count)] + ([SHARED_OUTPUT_GRADIENTS] if with_shared else [])
    for name, restore in (("tokens", how.inputs), ("middle", how.middle)):
        stays = {Restore.KEEP: name, Restore.OFFLOAD: f"host_{name}", Restore.COMMUNICATE: "rows"}.get(restore)
        inputs += [f"{stays}.{j}" for j in range(count) if stays is not None]
    pipeline = _Partitions(how, count, way, inputs)

    def prefetch(j: int, name: str, restore: Restore, size: Measure) -> None:
        if restore is Restore.OFFLOAD:
            pipeline.add(Kind.PREFETCH, Lane.H2D, j, size, [f"host_{name}.{j}"], [name])

    def send(j: int) -> None:
        prefetch(j, "tokens", how.inputs, _inputs)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.send(j, INPUTS)
        pipeline.send(j, OUTPUT_GRADIENTS)

    def sort(j: int) -> None:
        prefetch(j, "middle", how.middle, _middle)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.sort(j, INPUTS)
        pipeline.sort(j, OUTPUT_GRADIENTS)

    def compute(j: int) -> None:
        saved = ["tokens", "middle"]
        if how.middle is Restore.RECOMPUTE:
            pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, _inputs, ["tokens"], ["middle"])
        elif how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.ACTIVATE, Lane.COMPUTE, j, _activations, saved, ["activations"])
            saved = [*saved, "activations"]
        pipeline.add(Kind.GRADIENT, Lane.COMPUTE, j, _inputs, [*saved, "grad_output"], ["grad_tokens"])

    pipeline.alternate(
        send,
        sort,
        compute,
        lambda j: pipeline.back(j, INPUT_GRADIENTS, f"grad_rows.{j}"),
        (Kind.SHARED_GRADIENT, SHARED_OUTPUT_GRADIENTS) if with_shared else None,
    )
    return pipeline.outline(_name("backward", strategy, count))


@dataclass(frozen=True, eq=False)
class Move:
    """What travels, on one way or the other."""

    source: str
    is_out: bool
    sorted: str = ""
    """The name of rows that are sorted by expert."""
    prefix: str = ""
    """The prefix of the names of all other buffers."""

    def names(self, stages: Sequence[Stage], lies_in: Mapping[str, str]) -> dict[str, str]:
        """Returns what the buffers of a way's stages are called here.

        What may lie in another buffer does, under its own name. What is summed in the lane that brings it has one
        buffer for all partitions: each follows the other.
        """
        inner = {outer: name for name, outer in lies_in.items()}
        names = {stage.writes: self.prefix + inner.get(stage.writes, stage.writes) for stage in stages}
        for brought, following in pairwise(stages):
            if following.kind is Kind.SUM and following.lane is brought.lane:
                names[brought.writes] += ".0"
        return names | {"sorted": self.sorted}


_AT_EXPERTS = frozenset({"tokens", "output", "grad_output", "grad_tokens"})
"""The buffers of a partition that experts read and write, whatever chunks it goes in."""


INPUTS = Move("rows", True, "tokens")
OUTPUTS = Move("output", False)
OUTPUT_GRADIENTS = Move("grad_combined", True, "grad_output", "grad_")
INPUT_GRADIENTS = Move("grad_tokens", False, prefix="grad_")
_ON_THE_WAY_OUT = ("copies", "arrived", "gathered")


@cache
def place_of(buffer: str) -> tuple[Move, str]:
    """Returns whose rows are in a buffer that a way writes, and what the way calls it."""
    name = base_name(buffer)
    for move, sorted_or_back in (
        (INPUTS, {"tokens": "sorted"}),
        (OUTPUT_GRADIENTS, {"grad_output": "sorted"}),
        (OUTPUTS, {"combined": "rows"}),
        (INPUT_GRADIENTS, {"grad_rows": "rows"}),
    ):
        if name in sorted_or_back:
            return move, sorted_or_back[name]
    own = name.removeprefix("grad_")
    moves = (INPUTS, OUTPUT_GRADIENTS) if own.startswith(_ON_THE_WAY_OUT) else (OUTPUTS, INPUT_GRADIENTS)
    return moves[own != name], own


class _Partitions(Pipeline):
    """A pipeline of partitions, which may share buffers."""

    def __init__(self, strategy: Strategy, count: int, way: Stages, inputs: Sequence[str]) -> None:
        super().__init__(inputs, self._name)
        self._strategy, self._count, self._given = strategy, count, frozenset(inputs)
        self._way, self._ahead = way, 1 if strategy.reuses else way.ahead
        self._on_the_way: dict[tuple[int, Move], tuple[str, Sequence[Stage]]] = {}
        """Where the rows of a partition are that have been sent, but not sorted, and what remains until they are."""
        self._at_source: dict[int, tuple[str, Sequence[Stage], Sequence[Stage], Mapping[str, str]]] = {}
        """Where the rows of a partition are that are back, and what remains to be done with them: sums, and what a TP
        group does with these; by what names.
        """

    def alternate(
        self, send: Part, sort: Part, compute: Part, back: Part, shared: tuple[Kind, str] | None = None
    ) -> None:
        """Has all partitions through the experts; each function adds its ops for one.

        `shared` are the kind of the shared experts' ops, and what they take, where they run beside.

        In ascending order, in the backward pass too: Transformer Engine overwrites a weight's gradient in the backward
        pass of what its module ran first, and adds to it in the others.
        """
        last = self._count - 1
        halfway = "shared_middle.0"
        if shared is not None:
            self.add(shared[0], Lane.COMPUTE, 0, _shared, [shared[1]], [halfway])
        for j in range(min(self._ahead, last + 1)):
            send(j)
            self._pass_on(j)
        sort(0)
        for j in range(last + 1):
            if j + self._ahead <= last:
                send(j + self._ahead)
                if self._ahead == 1:
                    self._pass_on(j + 1)
            compute(j)
            if j < last:
                sort(j + 1)
            self._sum_up(j - 1)
            back(j)
            self._pass_on(j + self._ahead)
            self._share(j - 1)
        if shared is not None:
            self.add(shared[0], Lane.COMPUTE, 0, _shared, [halfway], ["shared_result.0"])
        self._sum_up(last)
        self._share(last)

    def send(self, j: int, move: Move) -> None:
        """Sends a partition's rows over the first links to their experts. Without a group of
        several ranks they stay.
        """
        *moves, _ = stages = self._stages(move)
        names = move.names(stages, self._way.lies_in)
        first = next((number + 1 for number, stage in enumerate(moves) if stage.group is not None), 0)
        arrived = self._through(j, own_buffer(move.source, j), moves[:first], names)
        self._on_the_way[j, move] = arrived, moves[first:]

    def _pass_on(self, j: int) -> None:
        """Sends on, over all other links, what was sent of a partition."""
        for (number, move), (arrived, moves) in self._on_the_way.items():
            if number == j and moves:
                names = move.names(moves, self._way.lies_in)
                self._on_the_way[j, move] = self._through(j, arrived, moves, names), ()

    def sort(self, j: int, move: Move) -> None:
        """Adds the op that sorts a partition's rows by expert, once they have arrived."""
        *_, sort = stages = self._stages(move)
        arrived, _ = self._on_the_way.pop((j, move))
        self._through(j, arrived, [sort], move.names(stages, self._way.lies_in))

    def back(self, j: int, move: Move, target: str) -> None:
        """Sends a partition's rows back to their sources: move.source -> target. What is done there comes after what
        other partitions need first.
        """
        stages = self._stages(move)
        own = own_buffer(move.prefix + "own", j)  # in the memory of the target, of which every partition has its own
        names = {**move.names(stages, self._way.lies_in), "own": own, stages[-1].writes: target}
        moves = stages[:-1] if stages[-1].group == TP else stages
        share = stages[len(moves) :]
        sums = moves[-1:] if len(moves) > 1 and moves[-1].kind is Kind.PERMUTE else []
        moves = moves[: len(moves) - len(sums)]
        self._at_source[j] = self._through(j, move.source, moves, names), sums, share, names

    def _sum_up(self, j: int) -> None:
        """Adds what a rank does with the rows of a partition that are back: it sums those of a token."""
        if j in self._at_source:
            back, sums, share, names = self._at_source[j]
            self._at_source[j] = self._through(j, back, sums, names), [], share, names

    def _share(self, j: int) -> None:
        """Adds what the ranks of a TP group that have shared out a partition do with its sums: they gather them."""
        if j in self._at_source:
            back, _, share, names = self._at_source.pop(j)
            self._through(j, back, share, names)

    def _through(self, j: int, source: str, stages: Sequence[Stage], names: Mapping[str, str]) -> str:
        """Appends stages for each chunk of a partition, one after another, and returns what the last stage writes."""
        written = source
        for chunk in range(self._way.chunks):
            of_chunk = {name: self._of_chunk(buffer, chunk) for name, buffer in names.items()}
            written = self.through(j, self._of_chunk(source, chunk), stages, of_chunk, chunk)
        return written.partition("/")[0]

    def _of_chunk(self, buffer: str, chunk: int) -> str:
        """Returns what a chunk's part of a partition's buffer is called, so that it waits for no other chunk's; the
        whole buffer, where that is given or the experts'. Where partitions share it, a chunk's rows may lie where
        another chunk's were: there it is one for all.
        """
        is_whole = "." in buffer or buffer in _AT_EXPERTS
        return buffer if is_whole or self._way.chunks == 1 or self._strategy.reuses else f"{buffer}/{chunk}"

    def _stages(self, move: Move) -> list[Stage]:
        """Returns the stages of the way in a move's direction, which measure rows of a partition as it has them."""

        def measured(stage: Stage) -> Measure:
            return lambda moved: -(-stage.size(moved.bytes(move)) // self._way.chunks)

        stages = self._way.out() if move.is_out else self._way.back()
        return [replace(stage, size=measured(stage)) for stage in stages]

    def _name(self, name: str, j: int) -> str:
        if "." in name:
            return name
        if not self._strategy.reuses:
            whole, slash, chunk = name.partition("/")
            return own_buffer(whole, j) + slash + chunk
        if name == "middle":
            return f"{name}.{j % self._strategy.middle_buffers}"
        # What comes from the host has no buffer to arrive in: it has a second one to be fetched into, beside gradients.
        fetched = name == "tokens" and f"host_tokens.{j}" in self._given
        return f"{name}.{j % 2 if fetched else 0}"


def _name(direction: str, strategy: str, count: int) -> str:
    return f"mpmoe {strategy} {direction}, {count} partition(s)"
