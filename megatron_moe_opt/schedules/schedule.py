"""Ops, lanes and the Schedule: one object that the executor runs, the simulator plays and the timeline draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Lane(Enum):
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


class Kind(Enum):
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
    ENCODE = "encode"
    DECODE = "decode"


COLLECTIVES = frozenset({Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.SEND_RECEIVE})


@dataclass(frozen=True)
class Op:
    """One step of a schedule.

    An op starts when its lane has finished the lane's earlier ops and every op it waits for has finished.
    """

    kind: Kind
    lane: Lane
    chunk: int = 0
    size: int = 0
    """Bytes, on this rank: of the rows sent (all_to_all), of the gathered rows (all_gather, and reduce_scatter, which
    is its mirror), of the rows moved (copies). Own rows count; what crosses a link is the cost curve's affair."""
    waits_for: tuple[int, ...] = ()
    """Indexes in Schedule.ops."""
    reads: tuple[str, ...] = ()
    """Names of buffers."""
    writes: tuple[str, ...] = ()
    group: str | None = None
    """Of a collective: the process group's role, such as "ep" or "expert-tp"."""

    def __str__(self) -> str:
        return f"{self.kind.value} of chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """Ops in an order in which they may be issued: every op comes after those it waits for."""

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[str, ...] = ()
    """Buffers that are written before the schedule starts."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes in use, in the order of Lane."""
        used = {op.lane for op in self.ops}
        return tuple(lane for lane in Lane if lane in used)


class ScheduleError(ValueError):
    """A schedule that cannot run, or would give other results than its ops one after another."""


def validate(schedule: Schedule) -> None:
    """Refuses what would deadlock or race.

    Raises:
        ScheduleError: an op waits for itself, for a later op (a cycle) or for one that does not exist; a collective
            without a group, or a group in two lanes (its order would be left to chance); a buffer that is read
            before it is written, or that two ops touch, one of them writing, without one waiting for the other.
    """
    before = _happens_before(schedule)
    lane_of_group: dict[str, Lane] = {}
    touched: dict[str, list[tuple[int, bool]]] = {name: [] for name in schedule.inputs}
    for index, op in enumerate(schedule.ops):
        if (op.kind in COLLECTIVES) != (op.group is not None):
            raise ScheduleError(f"{_place(schedule, index)}: collectives have a group, other ops have none")
        if op.group is not None and lane_of_group.setdefault(op.group, op.lane) is not op.lane:
            raise ScheduleError(
                f"{_place(schedule, index)}: group {op.group} is used in lane {lane_of_group[op.group].value} too, so "
                "that ranks could issue its collectives in different orders"
            )
        for name in op.reads:
            if name not in touched:
                raise ScheduleError(f"{_place(schedule, index)} reads buffer {name}, which nothing has written")
        for name, writes in [*((name, False) for name in op.reads), *((name, True) for name in op.writes)]:
            for other, other_writes in touched.setdefault(name, []):
                if (writes or other_writes) and other != index and not before[index] >> other & 1:
                    raise ScheduleError(
                        f"{_place(schedule, index)} touches buffer {name} without waiting for "
                        f"{_place(schedule, other)}, which touches it too"
                    )
            touched[name].append((index, writes))


def validate_ranks(schedules: Mapping[int, Schedule], members: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Refuses schedules of several ranks that would wait for each other for ever.

    Args:
        schedules: by rank.
        members: for each group role, the ranks of each of its process groups.

    Raises:
        ScheduleError: two ranks of a process group issue different collectives, or in another order.
    """
    for role, groups in members.items():
        for ranks in groups:
            first, *others = ranks
            expected = _collectives(schedules[first], role)
            for rank in others:
                found = _collectives(schedules[rank], role)
                if found != expected:
                    raise ScheduleError(
                        f"group {role} (ranks {', '.join(map(str, ranks))}): rank {rank} issues "
                        f"{_list(found)}, but rank {first} {_list(expected)}"
                    )


def _collectives(schedule: Schedule, role: str) -> list[tuple[Kind, int]]:
    return [(op.kind, op.chunk) for op in schedule.ops if op.group == role]


def _list(collectives: list[tuple[Kind, int]]) -> str:
    return ", ".join(f"{kind.value} {chunk}" for kind, chunk in collectives) or "nothing"


def _place(schedule: Schedule, index: int) -> str:
    op = schedule.ops[index]
    return f"{schedule.name}, op {index} ({op}, lane {op.lane.value})"


def _happens_before(schedule: Schedule) -> list[int]:
    """For each op the set of ops, as bits, that have finished when it starts."""
    before: list[int] = []
    last_in_lane: dict[Lane, int] = {}
    for index, op in enumerate(schedule.ops):
        finished = 0
        predecessors = [*op.waits_for, *([last_in_lane[op.lane]] if op.lane in last_in_lane else [])]
        for other in predecessors:
            if not 0 <= other < len(schedule.ops):
                raise ScheduleError(f"{_place(schedule, index)} waits for op {other}, which does not exist")
            if other >= index:
                raise ScheduleError(f"{_place(schedule, index)} waits for op {other}, which does not come before it")
            finished |= before[other] | 1 << other
        before.append(finished)
        last_in_lane[op.lane] = index
    return before
