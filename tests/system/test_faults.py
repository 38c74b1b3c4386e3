"""Ranks that die or stall, and runs that die while they save."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from megatron_moe_opt.errors import ConfigurationError
from tests.system.training import command, environment, train

# The collective (in a pipeline also its lane and chunk), its group with its ranks, and the rank that noticed.
NAMED_ERROR = re.compile(
    r"pretrain_moe_gpt: error: (monta O3 \w+, 3 chunk\(s\): lane \w+: )?\w+( of chunk \d)? on group \S.* "
    r"\(ranks [\d, ]+\) failed on rank \d: "
)


HANGS_S = 600  # far above what a busy machine takes

# A sitecustomize module: rank 3 stops where it opens its part of the second checkpoint, and says so with a file.
STOP_IN_SECOND_CHECKPOINT = """
import os, sys, time

def stop(event, arguments):
    if event == "open" and "/.iter_0000002.partial/" in str(arguments[0]) and os.environ.get("RANK") == "3":
        open(os.environ["STOPPED"], "w").close()
        while True:
            time.sleep(1)

sys.addaudithook(stop)
"""


@contextmanager
def running(
    data: Path, output: Path, *arguments: str | Path | int, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """A training run with no end that prints into the file `output`; none of its processes is left afterwards."""
    with open(output, "w") as printed:
        process = subprocess.Popen(
            command(data, "--train-iters", 100_000, *arguments),
            env=env or environment(),
            stdout=printed,
            stderr=printed,
        )
    try:
        yield process
    finally:
        kill_all(process)


def kill_all(process: subprocess.Popen) -> None:
    """Kill torchrun and its ranks, which have sessions of their own, all at once."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come so far in {HANGS_S} s"
        time.sleep(0.05)


def rank_process(process: subprocess.Popen, rank: int) -> psutil.Process:
    return next(child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
def test_a_lost_rank_ends_the_job_with_a_named_error(data: Path, tmp_path: Path, sign: signal.Signals):
    log, output = tmp_path / "log.jsonl", tmp_path / "output.txt"
    # A stall is noticed after the time-out, which is also what a rank may be late by when the job starts; a death at
    # once, far below the time-out.
    timeout_minutes = 0.4 if sign == signal.SIGSTOP else 60
    with running(
        data, output, "--moe-token-dispatcher-type", "monta", "--log-json", log,
        "--moe-opt-monta-level", "O3", "--moe-opt-chunks", 3, "--distributed-timeout-minutes", timeout_minutes,
    ) as process:  # fmt: skip
        wait_until(lambda: process.poll() is not None or (log.exists() and log.read_text().count("\n") >= 2))
        assert process.poll() is None, output.read_text()
        lost = rank_process(process, 3)
        lost.send_signal(sign)
        wait_until(lambda: NAMED_ERROR.search(output.read_text()))
        if sign == signal.SIGSTOP:
            # torchrun ends the ranks with SIGTERM, which a stopped process obeys when it goes on, or with SIGKILL
            # 30 seconds later; the job has failed already.
            lost.send_signal(signal.SIGCONT)
        assert process.wait(timeout=HANGS_S) != 0


def test_a_run_killed_while_it_saves_leaves_the_checkpoint_before(data: Path, tmp_path: Path):
    from checkpoint import find_checkpoint

    folder, output, stopped = tmp_path / "checkpoints", tmp_path / "output.txt", tmp_path / "stopped"
    arguments = ("--moe-token-dispatcher-type", "monta", "--save", folder)
    (tmp_path / "sitecustomize.py").write_text(STOP_IN_SECOND_CHECKPOINT)
    env = environment() | {"STOPPED": str(stopped)}
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"

    with running(data, output, *arguments, "--save-interval", 1, env=env) as process:
        wait_until(lambda: process.poll() is not None or stopped.exists())
        assert process.poll() is None, output.read_text()
        kill_all(process)
    partial = folder / ".iter_0000002.partial"
    assert partial.exists() and not any(partial.glob("__3_*"))

    complete = find_checkpoint(str(folder), None)
    assert complete == folder / "iter_0000001"
    printed = train(data, *arguments, "--load", folder, "--train-iters", 2)
    assert f"resumed from {complete}" in printed
    # The iteration that the killed run was saving is saved over what it left.
    assert find_checkpoint(str(folder), None).name == "iter_0000002"


def test_a_half_written_checkpoint_is_refused_and_its_complete_neighbours_named(tmp_path: Path):
    from checkpoint import TRACKER, find_checkpoint

    for iteration, files in ((10, ("common.pt", "metadata.json")), (20, ("common.pt", "__0_0.distcp"))):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
        for name in files:
            content = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}' if "json" in name else ""
            (tmp_path / f"iter_{iteration:07d}" / name).write_text(content)
    assert find_checkpoint(str(tmp_path), None) is None  # no tracker: nothing is complete
    sentence = "iter_0000020 is missing or not complete; complete checkpoints, for --ckpt-step: 10"
    with pytest.raises(ConfigurationError, match=sentence):
        find_checkpoint(str(tmp_path), 20)
    (tmp_path / TRACKER).write_text("20")
    with pytest.raises(ConfigurationError, match=sentence):
        find_checkpoint(str(tmp_path), None)
    (tmp_path / TRACKER).write_text("10")
    assert find_checkpoint(str(tmp_path), None) == tmp_path / "iter_0000010"


def test_nothing_is_published_when_the_tracker_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A failure between the parts and the rename leaves the tracker where it was."""
    import checkpoint

    (tmp_path / checkpoint.TRACKER).write_text("1")
    partial = tmp_path / ".iter_0000002.partial"
    partial.mkdir()
    (partial / "common.pt").write_bytes(b"state")

    def fail(path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "_flush", fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.publish(partial, tmp_path / "iter_0000002", 2)
    assert (tmp_path / checkpoint.TRACKER).read_text() == "1"
    assert not (tmp_path / "iter_0000002").exists()
