"""tools/forked_ranks.py: ranks that are forked find each other, and end as torchrun's do."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.ranks.pool import preloaded_processes


def meets() -> None:
    """A rank that reads what the other has written into the store."""
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://"))
    store.set(str(rank), os.environ["WORD"])
    others = [store.get(str(other)).decode() for other in range(world)]
    print(rank, world, others, Path.cwd().name, flush=True)


def fails() -> None:
    """One rank fails at once, and the other waits."""
    if os.environ["RANK"] == "1":
        sys.exit("no")
    time.sleep(600)


def waits() -> None:
    """No rank ends."""
    time.sleep(600)


def become_job(main: object, folder: Path, timeout: float) -> None:
    """Ends as the job of two ranks does that it starts."""
    from tools.forked_ranks import start_job

    assert start_job(main, 2, {"WORD": "told"}, folder, timeout)
    _, status = os.wait()
    os._exit(os.waitstatus_to_exitcode(status))


@pytest.mark.parametrize(
    ("main", "timeout", "status", "said"),
    [
        (meets, 300, 0, ["0 2 ['told', 'told'] job\n", "1 2 ['told', 'told'] job\n"]),
        (fails, 300, 1, ["", "no\n"]),
        (waits, 1, 124, ["", ""]),
    ],
)
def test_forked_ranks_meet_and_end_together(tmp_path, main, timeout, status, said):
    folder = tmp_path / "job"
    folder.mkdir()
    with preloaded_processes() as context:
        process = context.Process(target=become_job, args=(main, folder, timeout))
        process.start()
    process.join(timedelta(minutes=5).total_seconds())
    assert process.exitcode == status
    assert [(folder / f"{rank}.txt").read_text() for rank in range(2)] == said
