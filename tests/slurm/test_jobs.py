"""The recipes' job under a real Slurm: what is refused, measured, trained, preempted, and what a node's end does."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, until
from tests.system.training import ROOT, VARIABLES

SUBMIT = ROOT / "recipes" / "slurm" / "submit.sh"
JOB = SUBMIT.with_name("pretrain_gpt.sbatch")
TINY = Path(__file__).with_name("tiny.sh")
CHECKOUT = os.environ.get("MEGATRON_LM")
trains = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout of Megatron-LM")

# As site files are: not written for `set -eu`, and with a last command that fails.
PROLOGUE = """
[ -n "$NOT_SET_ANYWHERE" ] || export PROLOGUE_RAN=yes
echo "prologue on $(hostname), in job ${SLURM_JOB_ID:-none}"
PYTHON=@PYTHON@
false
"""


@dataclass
class User:
    """Somebody with a run of their own."""

    slurm: SlurmCluster
    folder: Path

    def submit(self, *arguments: object, **environment: object):
        """submit.sh, with all that a training run needs. Returns the finished command."""
        prologue = self.folder / "prologue.sh"
        prologue.write_text(PROLOGUE.replace("@PYTHON@", sys.executable))
        given = VARIABLES | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        given |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.folder / "cache")}
        given |= {"DATA": "mock", "MEGATRON_LM": CHECKOUT or "", "CHECKPOINTS": str(self.checkpoints)}
        given |= {"PROLOGUE": str(prologue)} | {name: str(value) for name, value in environment.items()}
        return self.slurm.run("bash", str(SUBMIT), *map(str, arguments), environment=given)

    def job(self, *arguments: object, **environment: object) -> int:
        """Submits a job that is taken, as `submit` does. Returns its number."""
        result = self.submit(*arguments, **environment)
        assert result.returncode == 0, result.stderr
        (number,) = re.findall(r"Submitted batch job (\d+)", result.stdout)
        return int(number)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def saved(self) -> int:
        """Returns the iteration of the last complete checkpoint."""
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def iterations(self, number: int) -> list[int]:
        """The iterations that a job has logged, of all its starts."""
        return [int(one) for one in re.findall(r"iteration +(\d+)/ +\d+ \|", self.slurm.log(number))]

    def go_on(self, number: int) -> None:
        """Starts a job that queues again now, not after the two minutes that Slurm lets it wait."""
        until(lambda: self.slurm.job(number)["JobState"] == "PENDING", 120)
        self.slurm.scontrol("update", f"JobId={number}", "StartTime=now")


@pytest.fixture
def user(slurm: SlurmCluster, tmp_path: Path) -> Iterator[User]:
    """Leaves no job behind, and no node switched off."""
    yield User(slurm, tmp_path)
    slurm.switch_on("n1")
    slurm.switch_on("n2")
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.queue(), 120)


@pytest.mark.parametrize(
    ("recipe", "arguments", "environment", "sentence"),
    [
        ("mixtral_8x7", (), {}, "mixtral_8x7 is neither a file nor a recipe, which are: deepseek_v3 "),
        (TINY, (), {"MEGATRON_LM": "/nowhere"}, "MEGATRON_LM: there is no /nowhere/pretrain_gpt.py"),
        (TINY, (), {"PROFILE": "/nowhere/c.json"}, "PROFILE: there is no /nowhere/c.json"),
        (TINY, (), {"PROLOGUE": "/nowhere/site.sh"}, "PROLOGUE: there is no /nowhere/site.sh"),
        (TINY, ("--expert-model-parallel-size", "3"), {}, "ep 3 x pp 1 does not divide the 4 ranks"),
        (TINY, ("--num-layers", "4000", "--hidden-size", "4096"), {}, "and a GPU has 80 GB"),
    ],
)
def test_what_cannot_work_does_not_reach_the_queue(user, recipe, arguments, environment, sentence):
    (user.folder / "pretrain_gpt.py").touch()
    result = user.submit(recipe, *arguments, **({"MEGATRON_LM": user.folder} | environment))
    assert result.returncode == 2 and sentence in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and user.slurm.queue() == []


def test_a_job_that_was_submitted_by_hand_says_what_is_wrong(user):
    result = user.slurm.run("sbatch", "--gpus-per-node=2", "--ntasks-per-node=2", "--overcommit", str(JOB), "tiny.sh")
    number = int(result.stdout.split()[-1])
    assert user.slurm.end_of(number)["ExitCode"] == "2:0"
    assert "error: tiny.sh cannot be read here: give an absolute path" in user.slurm.log(number)


@pytest.fixture(scope="module")
def measured(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, str]]:
    """What `MEASURE` has written, the job's number, and what Slurm knows of it."""
    user = User(slurm, tmp_path_factory.mktemp("measured"))
    profile = user.folder / "cluster.json"
    number = user.job(TINY, MEASURE=profile, MEGATRON_LM="", CHECKPOINTS="", DATA="")
    job = slurm.end_of(number)
    assert job["JobState"] == "COMPLETED", slurm.log(number)
    return profile, number, job


def test_measures_the_cluster(slurm, measured):
    profile, number, job = measured
    assert (job["TimeLimit"], job["NumNodes"], job["JobName"]) == ("00:30:00", "2", "tiny")
    world = json.loads(profile.read_text())["world"]
    assert (world["nodes"], world["ep"]) == ([0, 0, 1, 1], 4)
    assert f"prologue on n1, in job {number}" in slurm.log(number)


@trains
def test_a_preempted_job_saves_and_goes_on_where_it_was(user, measured):
    number = user.job(TINY, PROFILE=measured[0])
    user.slurm.wait_for(number, lambda: len(user.iterations(number)) > 10)
    urgent = user.slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    user.go_on(number)
    log, saved = user.slurm.log(number), user.saved()
    assert saved >= 10 and f"a checkpoint of iteration {saved}: the job queues again" in log, log
    assert user.slurm.end_of(int(urgent.stdout.split()[-1]))["JobState"] == "COMPLETED"
    job = user.slurm.end_of(number)
    log = user.slurm.log(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
    assert "tiny: start 1, from iteration 0 to 100, on 4 GPUs" in log
    assert f"tiny: start 2, from iteration {saved} to 100, on 4 GPUs" in log
    assert user.iterations(number) == list(range(1, 101)), log  # none twice, none left out
    assert log.count(f"moe-opt: auto: plan from {measured[0]}") == 2, log


@trains
def test_a_preempted_job_that_has_saved_nothing_queues_again(user):
    number = user.job(TINY)
    user.slurm.wait_for(number, lambda: "moe-opt: no CUDA device" in user.slurm.log(number))  # ranks import Megatron
    urgent = user.slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    assert user.slurm.end_of(int(urgent.stdout.split()[-1]))["JobState"] == "COMPLETED"
    assert user.slurm.job(number)["JobState"] == "PENDING"
    assert "no checkpoint since iteration 0, but was preempted: the job queues again" in user.slurm.log(number)


@trains
@pytest.mark.parametrize(("node", "interval"), [("n2", 20), ("n1", 1000)], ids=["any node", "the job's own"])
def test_a_job_that_loses_a_node_names_it_and_queues_again(user, node, interval):
    number = user.job(TINY, "--save-interval", interval)
    user.slurm.wait_for(number, lambda: len(user.iterations(number)) > 25)
    user.slurm.switch_off(node)
    until(lambda: user.slurm.job(number)["JobState"] == "PENDING", 300)  # once Slurm misses it
    log, saved = user.slurm.log(number), user.saved()
    user.slurm.switch_on(node)
    if node == "n2":  # n1 has taken the log's writer with it
        assert re.search(r"rank [23] \(n2\) failed first, ", log), log
    assert saved % interval == 0 and (saved > 0) == (interval == 20)
    # Two minutes later, not at once: what ends the first start's processes would end the second's.
    job = user.slurm.end_of(number)
    assert (job["JobState"], job["Restarts"], user.saved()) == ("COMPLETED", "1", 100), user.slurm.log(number)
    assert f"start 2, from iteration {saved} to 100" in user.slurm.log(number)
