"""The store through which all ranks of a job find each other: they can tell each other things where no group works."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import distributed_c10d

_PLACE, _RANK = ("MASTER_ADDR", "MASTER_PORT"), ("RANK", "WORLD_SIZE")
"""The variables that say where a job's store is, and who is asking."""


def job_store() -> dist.Store | None:
    """Returns our part of the job's store, the same before init_process_group as after it; None for a lone process.

    Who asks before init_process_group gets the store that the environment names; the first call then waits for rank 0,
    which serves it where the launcher does not. All ranks ask for the first time on the same side of
    init_process_group. Where a launcher starts a job again, its store may hold what the attempt before has written.
    """
    return _store() if _is_named() or dist.is_initialized() else None


def connect_to_job_store(prefix: str) -> dist.Store | None:
    """Returns another connection to the store, for keys under `prefix`; None where the environment names no job.

    It is for a thread that must not wait until others have used theirs. All ranks of a job connect.
    """
    return dist.PrefixStore(f"megatron-moe-opt/{prefix}", _connect()) if _is_named() else None


def may_be_restarted() -> bool:
    """Whether the launcher starts a failed job again, on the store that it had (torchrun --max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def of_this_attempt(store: dist.Store, rank: int, world: int, is_over: Callable[[], bool]) -> dist.Store | None:
    """Returns the part of a store that the ranks of this attempt alone use, once all of them have come.

    Attempts have no number that all nodes agree on (each torchrun counts its own). So each rank writes a word of its
    own; rank 0 lists what it has read, again whenever that changes, and who finds its word there takes rank 0's for the
    attempt's name.

    Args:
        is_over: waits a moment, and says whether to give up: then None is returned.
    """
    own, listed = uuid4().hex, None
    store.set(f"came/{rank}", own)
    came = [f"came/{one}" for one in range(world)]
    while not is_over():
        if rank == 0 and store.check(came):
            words = [word.decode() for word in store.multi_get(came)]
            if words != listed:
                listed = words
                store.set("attempt", json.dumps(words))
        words = json.loads(store.get("attempt")) if store.check(["attempt"]) else [None] * world
        if words[rank] == own:
            ours = dist.PrefixStore(words[0], store)
            ours.set(f"knows/{rank}", "")
            if rank != 0 or ours.check([f"knows/{one}" for one in range(world)]):
                return ours
    return None


def _is_named() -> bool:
    """Whether the environment names the job. Who has called init_process_group may have the rank from Slurm alone."""
    knows_its_rank = "SLURM_PROCID" in os.environ and dist.is_initialized()
    return all(name in os.environ for name in (_PLACE if knows_its_rank else (*_PLACE, *_RANK)))


@functools.cache
def _store() -> dist.Store:
    store = distributed_c10d._get_default_store() if dist.is_initialized() else _connect()
    return dist.PrefixStore("megatron-moe-opt", store)


def _connect() -> dist.Store:
    own = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ()
    store, _, _ = next(dist.rendezvous("env://", *own))
    return store
