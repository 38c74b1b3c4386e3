"""Collectives of several ranks, each with a device in software: matched by their order in each communicator.

NCCL matches the n-th call of each rank of a communicator. Ranks that call different things there, or that wait for each
other in two communicators, hang on a GPU; here they are named.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from tests.accelerator.software import Device, Entry, Queues, Stuck

Members = Mapping[Hashable, Sequence[Sequence[int]]]
"""The ranks of each communicator of a group, by the group as the ranks call it."""


class Mismatch(AssertionError):
    """Ranks of a communicator call different collectives."""


def meet(devices: Mapping[int, Device], members: Members) -> None:
    """Runs all that was launched on the ranks' devices.

    Raises:
        Mismatch: naming both calls.
        Stuck: ranks wait for each other; names what each waits for.
    """
    calls: dict[tuple[Hashable, tuple[int, ...]], dict[int, list[Entry]]] = {}
    begun: dict[int, int] = dict.fromkeys(devices, 0)  # with one queue: entries up to which all have begun
    moved = True
    while moved:
        moved = False
        for rank, device in devices.items():
            for entry in device.entries[begun[rank] if device.queues is Queues.ONE else 0 :]:
                if not entry.begun and all(other.ended for other in entry.behind):
                    entry.begun = moved = True
                    if isinstance(entry.stream, tuple):
                        _call(calls, rank, entry, members)
                    else:
                        entry.ended = True
                if device.queues is Queues.ONE:
                    if not entry.begun:
                        break
                    begun[rank] += 1
    waiting = [
        f"rank {rank}: {next(str(entry) for entry in device.entries if not entry.ended)}"
        for rank, device in devices.items()
        if not all(entry.ended for entry in device.entries)
    ]
    if waiting:
        raise Stuck("; ".join(waiting))


def _call(calls: dict, rank: int, entry: Entry, members: Members) -> None:
    role = entry.stream[1]
    ranks = next(tuple(ranks) for ranks in members[role] if rank in ranks)
    of_ranks = calls.setdefault((role, ranks), {})
    of_ranks.setdefault(rank, []).append(entry)
    number = len(of_ranks[rank]) - 1
    present = {other: of_ranks[other][number] for other in ranks if len(of_ranks.get(other, ())) > number}
    for other, call in present.items():
        if call.label != entry.label:
            raise Mismatch(f"{role} of ranks {ranks}: rank {rank} calls {entry.label}, rank {other} {call.label}")
    if len(present) == len(ranks):
        for call in present.values():
            call.ended = True
