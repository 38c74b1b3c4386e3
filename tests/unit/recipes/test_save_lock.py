"""One job at a time saves into a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest

from megatron_moe_opt.errors import ConfigurationError

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
sys.path.insert(0, str(RECIPES))  # a folder of scripts, not a package

from save_lock import NAME, Holder, save_lock  # noqa: E402

JOB = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def _without_a_job(monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


def left_behind(folder: Path, **changes: object) -> None:
    """The file of a holder like this process, but for the changes."""
    holder = dataclasses.replace(Holder.this_process(), **changes)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(holder)))


def test_a_second_job_is_refused_and_told_who_saves(tmp_path):
    with save_lock(tmp_path):
        sentence = f"--save {tmp_path} is being saved to by .* on {socket.gethostname()} .process {os.getpid()}. since "
        with pytest.raises(ConfigurationError, match=f"^{sentence}.* remove {tmp_path}/{re.escape(NAME)}$"):
            save_lock(tmp_path).__enter__()
        assert (tmp_path / NAME).is_file()
    with save_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_behind_is_taken_over(tmp_path):
    script = "import os, sys; from pathlib import Path; from save_lock import save_lock\n"
    script += "with save_lock(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, tmp_path], cwd=RECIPES, env=os.environ | {"PYTHONPATH": str(RECIPES)})
    assert (tmp_path / NAME).is_file()
    with save_lock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


HELD_IN_A_COLLECTIVE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from save_lock import save_lock

with save_lock(Path(sys.argv[1])):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"1")
        time.sleep(600)
    os.read(reading, 1)
    os.kill(child, signal.SIGTERM)  # as multiprocessing ends a process
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    print("holds", os.listdir(sys.argv[1]), flush=True)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # which no signal interrupts
"""


def test_sigterm_lets_go_wherever_the_holder_waits(tmp_path):
    command = [sys.executable, "-c", HELD_IN_A_COLLECTIVE, tmp_path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(RECIPES), str(RECIPES.parent)])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == f"holds {[NAME]}\n"
        holder.terminate()
        assert holder.wait(60) == 143
    assert os.listdir(tmp_path) == []


def test_another_process_with_the_number_of_one_that_ended_does_not_hold(tmp_path):
    left_behind(tmp_path, process_start="1")
    with save_lock(tmp_path):
        pass


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"machine": "another boot"}])
def test_of_another_machine_nothing_is_known(tmp_path, changes):
    left_behind(tmp_path, process_start="1", **changes)
    with pytest.raises(ConfigurationError, match="is being saved to by"), save_lock(tmp_path):
        pass


@pytest.mark.parametrize(
    ("variables", "is_taken_over"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),  # queued again
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "another"}, True),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "another", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "7"}, False),  # another step of the job
        ({"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_job_that_is_queued_again_goes_on_elsewhere(tmp_path, monkeypatch, variables, is_taken_over):
    left_behind(tmp_path, host="elsewhere", job="7", run="run")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        if not is_taken_over:
            stack.enter_context(pytest.raises(ConfigurationError, match="elsewhere .process .*, job 7 run. since"))
        stack.enter_context(save_lock(tmp_path))


def test_a_process_that_runs_holds_whatever_its_job_is_called(tmp_path, monkeypatch):
    """As where two jobs have one name, or none, and torchrun starts the ranks of one again."""
    left_behind(tmp_path, run="run")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigurationError, match="is being saved to by"), save_lock(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"starts": "ab"}', "\udcff"])
def test_a_file_that_is_not_ours_holds_too(tmp_path, content):
    (tmp_path / NAME).write_bytes(content.encode(errors="surrogateescape"))
    with (
        pytest.raises(ConfigurationError, match="is being saved to by someone who has not said who"),
        save_lock(tmp_path),
    ):
        pass


def test_of_many_that_take_over_one_does(tmp_path):
    left_behind(tmp_path, process_start="1")
    together, done = Barrier(8), Barrier(8)

    def take(_: int) -> bool:
        together.wait()
        with ExitStack() as stack:
            try:
                stack.enter_context(save_lock(tmp_path))
                return True
            except ConfigurationError:
                return False
            finally:
                done.wait()  # nobody lets go before all have tried

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 1
    assert os.listdir(tmp_path) == []
