"""Whether schedules could deadlock or race: what the tests hold every builder to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Schedule, ScheduleError


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
    """Returns, for each op, the set of ops, as bits, that have finished when it starts."""
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
