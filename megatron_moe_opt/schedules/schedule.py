"""Ops, lanes and the Schedule: one object that the executor runs, the simulator plays and the timeline draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple


class _OneOfEach(Enum):
    """An enumeration whose members are hashed as the objects that they are: a planner looks them up by the million."""

    __hash__ = object.__hash__


class Lane(_OneOfEach):
    """What an op occupies. Ops of one lane run one after another, ops of different lanes side by side.

    On a CPU a lane is a thread, on CUDA a stream.
    """

    INTER = "inter"  # links between nodes
    INTRA = "intra"  # links inside a node
    COPY = "copy"  # device memory
    COMPUTE = "compute"  # matrix units; always the caller's thread and stream, where autograd is
    D2H = "d2h"
    H2D = "h2d"
    EXPERTS = "experts"  # links too, in groups of their own: experts that travel beside all schedules


class Kind(_OneOfEach):
    """What an op does, by which its cost is looked up and it is drawn."""

    PERMUTE = "permute"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND_RECEIVE = "send_receive"
    SUM = "sum"  # of the parts that a reduce-scatter, or an all-to-all that ends in a sum, has brought
    COPY = "copy"
    COMPUTE = "compute"
    GRADIENT = "gradient"  # the backward pass of a compute op
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    ENCODE = "encode"  # of experts that travel
    DECODE = "decode"
    ENCODE_GRADIENT = "encode_gradient"  # of gradients that return to the experts' owners
    DECODE_GRADIENT = "decode_gradient"  # and their sum
    ACTIVATE = "activate"  # what lies between an expert's two matrix products, again
    SHARED = "shared"  # half of the shared experts, which all tokens go through where they are
    SHARED_GRADIENT = "shared_gradient"


COLLECTIVES = frozenset({Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SEND_RECEIVE})
OF_EXPERTS = frozenset({Kind.COMPUTE, Kind.GRADIENT})
"""The kinds of ops that are a whole pass through experts."""
OF_SHARED_EXPERTS = frozenset({Kind.SHARED, Kind.SHARED_GRADIENT})
"""The kinds of ops that are half a pass through shared experts."""
CODEC = frozenset({Kind.ENCODE, Kind.DECODE, Kind.ENCODE_GRADIENT, Kind.DECODE_GRADIENT})
"""The kinds of ops that encode and decode experts, and their gradients, which travel compressed."""


@dataclass(frozen=True)
class Op:
    """One step of a schedule: what it does, in which lane, with which buffers.

    An op starts when its lane has finished the lane's earlier ops and every op it waits for has finished.
    """

    kind: Kind
    lane: Lane
    chunk: int = 0
    size: int = 0
    """The bytes on this rank: of the rows sent (all_to_all), of the gathered rows (all_gather, and reduce_scatter,
    which is its mirror), of the rows moved (copies). Own rows count; what crosses a link is the cost curve's affair.
    """
    waits_for: tuple[int, ...] = ()
    """The ops that it waits for, as indexes in Schedule.ops."""
    reads: tuple[str, ...] = ()
    """Names of the buffers that it reads."""
    writes: tuple[str, ...] = ()
    group: str | None = None
    """The role of a collective's process group, such as "ep" or "expert-tp"; None: the op is no collective."""
    meanwhile: int = 0
    """How many of the ops behind it are issued halfway through it, on a GPU: see issue_order.py."""
    part: int = 0
    """The part of its chunk that it moves, where a partition of rows is a chunk and goes in several parts."""

    def __str__(self) -> str:
        return f"{self.kind.value} of chunk {self.chunk}" + (f", part {self.part}" if self.part else "")


@dataclass(frozen=True)
class Schedule:
    """Ops in an order in which they may be issued: every op comes after those it waits for."""

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[str, ...] = ()
    """Buffers that are written before the schedule starts."""

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in use, in the order of Lane."""
        used = {op.lane for op in self.ops}
        return tuple(lane for lane in Lane if lane in used)

    @cached_property
    def order(self) -> Order:
        """Returns what decides when its ops run. Raises ScheduleError, see Order.of."""
        return Order.of(self)

    @cached_property
    def chunks_of(self) -> dict[str, frozenset[int]]:
        """The chunks whose ops read or write each buffer."""
        chunks: dict[str, set[int]] = {}
        for op in self.ops:
            for buffer in (*op.reads, *op.writes):
                chunks.setdefault(buffer, set()).add(op.chunk)
        return {buffer: frozenset(of_buffer) for buffer, of_buffer in chunks.items()}


@dataclass(frozen=True)
class Order:
    """What of a schedule decides when ops run: the lane of each and the ops it waits for."""

    lanes: tuple[Lane, ...]
    """The lanes that the schedule uses."""
    lane_of: tuple[int, ...]
    """The lane of each op, as an index into `lanes`."""
    waits_for: tuple[tuple[int, ...], ...]
    in_turn: bool = False
    """Whether no op starts before the one that precedes it."""

    @classmethod
    def of(cls, schedule: Schedule) -> Order:
        """Returns the order of a schedule's ops, having checked that it can be played.

        Raises:
            ScheduleError: an op waits for one that does not come before it, or is to have ops issued halfway through it
                that are not there or cannot be issued then.
        """
        for index, op in enumerate(schedule.ops):
            for other in op.waits_for:
                if not 0 <= other < index:
                    raise ScheduleError(
                        f"{schedule.name}, op {index} ({op}) waits for op {other}, which does not come before it"
                    )
            if op.meanwhile:
                behind = schedule.ops[index + 1 : index + 1 + op.meanwhile]
                if len(behind) < op.meanwhile or any(
                    other.lane is op.lane or other.meanwhile or index in other.waits_for for other in behind
                ):
                    raise ScheduleError(
                        f"{schedule.name}, op {index} ({op}): {op.meanwhile} ops behind it cannot be issued halfway "
                        "through it"
                    )
        lanes = schedule.lanes
        number = {lane: index for index, lane in enumerate(lanes)}
        return cls(lanes, tuple(number[op.lane] for op in schedule.ops), tuple(op.waits_for for op in schedule.ops))


Measure = Callable[[Any], int]
"""The size of an op, given what moves of its chunk."""


@dataclass(frozen=True)
class Outline:
    """A schedule before it is known how much moves: ops, their order and what they wait for, the same in every pass.

    Whoever runs a schedule needs no more than that. Sizes are for those who predict, record and draw.
    """

    schedule: Schedule
    """The schedule, with ops of size 0."""
    measures: tuple[Measure, ...]
    """The measure that gives the size of each op."""

    def moving(self, chunks: Callable[[], Sequence[Any]]) -> MovingSchedule:
        """Returns it with what moves in one pass: what `sized` takes, which nobody works out before it is asked for."""
        return MovingSchedule(self.schedule, lambda: self.sized(chunks()))

    def sized(self, chunks: Sequence[Any]) -> Schedule:
        """Returns the schedule of what moves of each chunk: ChunkBytes, HopBytes, whatever the measures take."""
        # Copies of their fields, as fast as can be: a planner does this by the hundred thousand.
        ops = []
        for op, size in zip(self.schedule.ops, self.measures, strict=True):
            sized = object.__new__(Op)
            sized.__dict__.update(op.__dict__, size=size(chunks[op.chunk]))
            ops.append(sized)
        schedule = Schedule(self.schedule.name, tuple(ops), self.schedule.inputs)
        schedule.__dict__.update(lanes=self.schedule.lanes, order=self.schedule.order)  # which sizes do not change
        return schedule


class MovingSchedule(NamedTuple):
    """A schedule to run once."""

    schedule: Schedule
    """The schedule, which is the same in every pass, without sizes."""
    sized: Callable[[], Schedule]
    """Returns it with the sizes of this pass."""


class ScheduleError(ValueError):
    """Raised for a schedule that cannot run, or would give other results than its ops one after another."""
