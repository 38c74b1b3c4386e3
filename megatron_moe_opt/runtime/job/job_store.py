"""The store through which all ranks of a job find each other: they can tell each other things where no group works."""

from __future__ import annotations

import functools
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMES_A_JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def job_store() -> dist.Store | None:
    """Returns our part of the job's store, the same before init_process_group as after it; None for a lone process.

    Who asks before init_process_group gets the store that the environment names; the first call then waits for rank 0,
    which serves it where the launcher does not. All ranks ask for the first time on the same side of
    init_process_group. A restarted job does not read what the failed attempt has written.
    """
    return _store() if _is_named() or dist.is_initialized() else None


def connect_to_job_store(prefix: str) -> dist.Store | None:
    """Returns another connection to the store, for keys under `prefix`; None where the environment names no job.

    It is for a thread that must not wait until others have used theirs. All ranks of a job connect.
    """
    return dist.PrefixStore(f"megatron-moe-opt/{prefix}", _connect()) if _is_named() else None


def _is_named() -> bool:
    return all(name in os.environ for name in _NAMES_A_JOB)


@functools.cache
def _store() -> dist.Store:
    store = distributed_c10d._get_default_store() if dist.is_initialized() else _connect()
    return dist.PrefixStore("megatron-moe-opt", store)


def _connect() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://"))
    return store
