"""Logs on a full disk lose lines and do not end training."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
sys.path.insert(0, str(RECIPES))  # a folder of scripts, not a package

from step_log import StepLog, read_steps  # noqa: E402


def test_a_record_that_does_not_fit_is_left_out_whole(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    with StepLog(log) as steps:
        steps.write({"iteration": 1})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 5, limits[1]))  # as a disk that is almost full
        try:
            for iteration in (2, 3):
                steps.write({"iteration": iteration})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        steps.write({"iteration": 4})
    assert list(read_steps(log)) == [1, 4]
    assert capsys.readouterr().err.count("warning:") == 1


def test_a_device_without_room_is_warned_of_once(capsys):
    with StepLog("/dev/full") as steps:
        for _ in range(3):
            steps.write({"iteration": 1})
    assert capsys.readouterr().err == "warning: /dev/full loses lines (No space left on device); training goes on\n"


def test_standard_output_without_room_changes_nothing_but_the_output():
    script = "import sys; from lossy_logs import LossyStream\n"
    script += "sys.stdout = LossyStream(sys.stdout, 'stdout')\n"
    script += "for _ in range(3000): print('a line', flush=True)\n"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=RECIPES, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 0
    assert result.stderr == "warning: stdout loses lines (No space left on device); training goes on\n"
