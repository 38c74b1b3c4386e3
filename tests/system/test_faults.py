"""Ranks that die or stall, and runs that die while they save."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe_opt.errors import ConfigurationError
from tests.faults.campaign import run
from tests.faults.cases import Fault
from tests.ranks.job import Job
from tests.system.training import VARIABLES, start, train, words

HANGS_S = 600  # far above what a busy machine takes
ENDLESS = ("--train-iters", 100_000, "--moe-token-dispatcher-type", "monta")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not come so far in {HANGS_S} s"
        time.sleep(0.05)


# All dispatchers, places and faults, but not all of them combined: that is `python -m tests.faults`.
SAMPLE = (
    Fault("monta", "dispatch", "kill", victim=2, after=1),
    Fault("expert-migration", "background", "kill", victim=1),
    Fault("mpmoe", "backward", "kill", victim=0, rank_0_serves_store=True),
    Fault("parm", "combine", "stop", victim=3),
    Fault("mpmoe", "background", "raise", victim=3, after=2),
    Fault("netmoe", "background", "raise", victim=1),
    Fault("auto", "background", "raise", victim=2),
    Fault("expert-migration", "backward", "raise", victim=0, rank_0_serves_store=True),
    Fault("monta", "combine", "disagree", victim=2),
)


@pytest.mark.parametrize("fault", SAMPLE, ids=str)
def test_a_fault_ends_all_ranks_with_its_rank_and_layer(tmp_path: Path, fault: Fault):
    outcome = run(fault, tmp_path)  # how soon is for the long form to say, on a machine of its own
    assert not outcome.wrong, [end.output for end in outcome.ends]


def raise_on_rank_1() -> None:
    """Raises an error in the experts of rank 1. What torchrun would print goes to a file of each
    rank, as torchrun has it.
    """
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{os.environ['ERRORS']}/{os.environ['RANK']}.json"
    if os.environ["RANK"] == "1":
        from megatron.core.transformer.moe.experts import SequentialMLP

        def fail(*_: object) -> None:
            raise ValueError("boom")

        SequentialMLP.forward = fail


def test_only_the_first_failure_is_left_for_torchrun(data: Path, tmp_path: Path):
    variables = VARIABLES | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"], "ERRORS": str(tmp_path)}
    job = Job(words(data, *ENDLESS), tmp_path / "output.txt", 4, variables, raise_on_rank_1)
    assert job.wait() == 1
    assert [file.name for file in tmp_path.glob("*.json")] == ["1.json"]
    recorded = json.loads((tmp_path / "1.json").read_text())["message"]["message"]
    assert "failed first, in MoE layer 1 (monta, forward): ValueError: boom" in recorded
    said = re.findall(r"^moe-opt: error: rank 1 \(.*$", job.output.read_text(), re.MULTILINE)
    assert len(said) == 4 and all(recorded.endswith(line.removeprefix("moe-opt: error: ")) for line in said)


def stop_in_second_checkpoint() -> None:
    """Rank 3 stops where it opens its part of the checkpoint, and says so with a file in its place."""

    def stop(event: str, arguments: tuple) -> None:
        if event == "open" and "/.iter_0000002.partial/" in str(arguments[0]):
            Path(str(arguments[0])).parents[1].joinpath("stopped").touch()
            while True:
                time.sleep(1)

    if os.environ["RANK"] == "3":
        sys.addaudithook(stop)


def test_a_run_killed_while_it_saves_leaves_the_checkpoint_before(data: Path, tmp_path: Path):
    from checkpoint import find_checkpoint

    folder = tmp_path / "checkpoints"
    arguments = (*ENDLESS, "--save", folder)
    job = start(data, tmp_path / "killed.txt", *arguments, "--save-interval", 1, before=stop_in_second_checkpoint)
    try:
        wait_until(lambda: job.ended() or (folder / "stopped").exists())
        assert not job.ended(), job.output.read_text()
    finally:
        job.kill()
    partial = folder / ".iter_0000002.partial"
    assert partial.exists() and not any(partial.glob("__3_*"))

    complete = find_checkpoint(str(folder), None)
    assert complete == folder / "iter_0000001"
    printed = train(data, tmp_path, *arguments, "--load", folder, "--train-iters", 2)
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

    monkeypatch.setattr(checkpoint, "flush", fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.publish(partial, tmp_path / "iter_0000002", 2)
    assert (tmp_path / checkpoint.TRACKER).read_text() == "1"
    assert not (tmp_path / "iter_0000002").exists()
