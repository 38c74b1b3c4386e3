"""tools/gpu/training.py: what it reads off Megatron's log, and the place that it gives each rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.gpu import training
from tools.gpu.training import Trained, main, ranks_here, run, table

LINE = (
    " [2026-11-27 06:27:57.{step:06d}] iteration      {step}/     200 | consumed samples:         1600 | elapsed time "
    "per iteration (ms): {ms:.1f} | learning rate: 3.000000E-04 | global batch size:     8 | lm loss: {loss:.6E} | "
    "load_balancing_loss: 1.376131E+00 | loss scale: 1.0 | grad norm: 1.570 |\n"
)


def logged(dispatcher: str, times: list[float], losses: list[float]) -> Trained:
    lines = (
        LINE.format(step=step, ms=ms, loss=loss) for step, (ms, loss) in enumerate(zip(times, losses, strict=True))
    )
    return Trained.of(dispatcher, "moe-opt: auto: measured ms a step\n" + "".join(lines))


def test_runs_stand_beside_the_first_of_them():
    stock = logged("alltoall", [900.0, *[310.0] * 59], [5.5, *[2.5] * 59])
    ours = logged("monta", [900.0, *[248.0] * 59], [5.5, *[2.5] * 19, *[2.55] * 40])
    *_, first, second = table([stock, ours]).splitlines()
    assert first == "| `alltoall` | 60 | 310.0 (310.0 to 310.0) | 1.000 | 5.5000, 2.5000 | 0.00%, 0.00% |"
    assert second == "| `monta` | 60 | 248.0 (248.0 to 248.0) | 0.800 | 5.5000, 2.5500 | 0.00%, 2.00% |"


def test_ranks_that_share_a_gpu_are_nodes_of_their_own():
    assert [one["LOCAL_RANK"] for one in ranks_here(8)] == list("01234567")
    shared = ranks_here(1)
    assert {one["LOCAL_RANK"] for one in shared} == {"0"} and {one["LOCAL_WORLD_SIZE"] for one in shared} == {"1"}
    assert len({one["NCCL_HOSTID"] for one in shared}) == len(shared) == 4


def test_it_needs_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["training"])
    assert main() == 2 and "MEGATRON_LM names no checkout" in capsys.readouterr().err


def test_sample_indices_are_those_of_the_data_that_it_has_written(monkeypatch, tmp_path):
    """And not what Megatron has left beside those of an earlier run."""
    commands = []

    def note(command: list[str], ranks: object, folder: Path) -> str:
        commands.append((command, folder))
        return "".join(LINE.format(step=step, ms=300, loss=2.5) for step in (1, 2))

    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setenv("MEGATRON_LM", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "argv", ["training", "--folder", str(tmp_path / "runs")])
    monkeypatch.setattr(training.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(training, "run", note)
    assert main() == 0
    for command, folder in commands:
        assert command[command.index("--data-cache-path") + 1] == str(folder.parent / "sample-indices")
    assert len(commands) == 2


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '2' else time.sleep(600)"
    with pytest.raises(RuntimeError, match="rank 2 failed: .*rank-2.log"):
        run([sys.executable, "-c", script], ranks_here(4), tmp_path / "logs")


def test_a_run_that_logs_no_steps_is_not_compared():
    with pytest.raises(RuntimeError, match="auto: 0 losses and 0 times"):
        Trained.of("auto", "nothing")
