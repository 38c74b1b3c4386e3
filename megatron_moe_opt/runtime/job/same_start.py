"""Whether all ranks are started alike: what they have been told is compared, before anything depends on it.

Ranks that were told otherwise would send each other messages of other sizes, or wait for messages that never come. They
compare through the job's store, in which a rank that has been refused something can say so too: it takes part in no
collective any more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_moe_opt.errors import ConfigurationError, DisagreementError, ExtensionError, sentence
from megatron_moe_opt.runtime.job import failure_board
from megatron_moe_opt.runtime.job.job_store import job_store

T = TypeVar("T")
Facts = Mapping[str, str | None]
"""What must be the same on all ranks, by the name that the user knows it by. None: this rank does not know."""

LATE_S = distributed_c10d.default_pg_timeout.total_seconds()
"""How many seconds later than the others a rank may start; init_process_group waits as long."""
TOGETHER_S = 2.0
"""How many seconds later than another a rank may be refused the same thing."""

_turns: Counter[tuple[int, ...]] = Counter()


def start_alike(start: Callable[[], T], facts: Callable[[T], Facts], is_alone: bool = False) -> T:
    """Returns what `start` returns, once it has on all ranks of the job, and they have the same facts. Called by all of
    them.

    Args:
        is_alone: the job's other ranks do not exist, and nobody waits for them.

    Raises:
        DisagreementError: on all ranks: what they differ in, or what only some of them are refused.
        ConfigurationError, ExtensionError: what all are refused, as `start` raised it.
    """
    ranks = range(1 if is_alone else _world())
    try:
        started = start()
    except (ConfigurationError, ExtensionError) as error:
        check_alike(ranks, {}, str(error))
        raise
    check_alike(ranks, facts(started))
    return started


def check_alike(ranks: Sequence[int], facts: Facts, refused: str | None = None) -> None:
    """Compares the facts of these ranks of the job. All of them call it.

    Args:
        refused: why this rank cannot start.

    Raises:
        DisagreementError: on all of them: what they differ in, or what only some of them are refused.
    """
    store, rank = None if len(ranks) == 1 else job_store(), _rank()
    if store is None:
        return
    ranks = tuple(ranks)
    turn = f"start/{_named(ranks)}/{_turns[ranks]}"
    _turns[ranks] += 1
    store.set(f"{turn}/{rank}", json.dumps({"facts": dict(facts), "refused": refused}))
    verdict = f"{turn}/verdict"
    if rank == ranks[0]:
        _wait(store, {f"{turn}/{other}": other for other in ranks})
        told = {other: store.get(f"{turn}/{other}") for other in ranks}
        alike = len(set(told.values())) == 1  # as nearly always: nothing is to be parsed
        store.set(verdict, "" if alike else difference({other: json.loads(one) for other, one in told.items()}) or "")
    else:
        _wait(store, {verdict: ranks[0]})
    if text := store.get(verdict).decode():
        _leave_together(store, f"{turn}/left", len(ranks))
        raise DisagreementError(text)


def difference(told: Mapping[int, Mapping[str, object]]) -> str | None:
    """Returns one sentence on what these ranks differ in; None: they agree.

    Args:
        told: of each rank its `facts` and what it was `refused`.
    """
    refusals = _by_value({rank: one["refused"] for rank, one in told.items()})
    if set(refusals) != {None}:
        if len(refusals) == 1:
            return None  # all of them the same
        return "; ".join(f"on {_named(ranks)}: {text}" for text, ranks in refusals.items() if text is not None)
    names = dict.fromkeys(name for one in told.values() for name in one["facts"])
    found = []
    for name in names:
        known = {rank: one["facts"].get(name, "not given") for rank, one in told.items()}
        values = _by_value({rank: value for rank, value in known.items() if value is not None})
        if len(values) > 1:
            found.append(f"{name} is {' and '.join(f'{value} on {_named(ranks)}' for value, ranks in values.items())}")
    return f"the ranks are not started alike: {'; '.join(found)}: give all ranks the same" if found else None


def say_together(error: Exception, program: str, is_alone: bool = False) -> None:
    """Says why this rank ends: once, on rank 0, where all ranks end for the same reason, else on every rank.

    A rank that ends alone tells the others, if there are process groups, and they end too. What a rank is refused in
    the middle of a pass, every rank has said already.

    Args:
        is_alone: the job's other ranks do not exist.
    """
    if failure_board.first_failure() is not None:
        return
    text, world = sentence(error), 1 if is_alone else _world()
    store = None if world == 1 else job_store()
    line = f"{program}: error: {text}"
    everywhere = isinstance(error, DisagreementError)
    if store is None:
        print(line, file=sys.stderr, flush=True)
    elif _all_say(store, text, world):
        if everywhere or _rank() == 0:
            print(line, file=sys.stderr, flush=True)
        _leave_together(store, "said", world)
    else:
        failure_board.explain(text, is_own=True)
        if failure_board.first_failure() is None:
            print(line, file=sys.stderr, flush=True)


def _all_say(store: dist.Store, text: str, world: int) -> bool:
    try:
        store.set(f"ends/{_rank()}", text)
        keys = [f"ends/{rank}" for rank in range(world)]
        store.wait(keys, timedelta(seconds=TOGETHER_S))
        return all(store.get(key).decode() == text for key in keys)
    except RuntimeError:  # they have not come; or who serves the store is gone
        return False


def _leave_together(store: dist.Store, key: str, number: int) -> None:
    """Waits until all have read what they need: the process of one of them may serve the store, and a launcher ends all
    as soon as one has ended.
    """
    deadline = time.monotonic() + TOGETHER_S
    try:
        left = store.add(key, 1)
        while left < number and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add(key, 0)
    except RuntimeError:
        pass


def _wait(store: dist.Store, keys: Mapping[str, int]) -> None:
    """Waits for keys; each is written by a rank."""
    try:
        store.wait(list(keys), timedelta(seconds=LATE_S))
    except RuntimeError as error:
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        raise ConfigurationError(
            f"{_named(missing)} {'have' if len(missing) > 1 else 'has'} not started as rank {_rank()} has, in "
            f"{LATE_S:.0f} s: start all ranks with the same command"
        ) from error


def _by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    ranks: dict[T, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _named(ranks: Sequence[int]) -> str:
    """Returns ranks in words: "ranks 0 to 3, 8" for 0, 1, 2, 3, 8."""
    runs = [[ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(listed)}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
