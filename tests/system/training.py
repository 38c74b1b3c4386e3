"""Runs of recipes/pretrain_moe_gpt.py for the system tests: a tiny model on a tiny dataset, under torchrun."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "pretrain_moe_gpt.py"

# Two of each parallel dimension that four ranks can have at once; 2 data-parallel ranks.
LAYOUT = shlex.split(
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    " --expert-tensor-parallel-size 2 --use-distributed-optimizer"
)
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --num-experts 4 --moe-router-topk 2"
    " --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 0.01 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3"
    " --split 9,1,0"
)


def environment() -> dict[str, str]:
    """One thread a rank, no GPU, loopback only: the same job on every machine."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def command(
    data: Path,
    *arguments: str | Path | int,
    ranks: int = 4,
    layout: Sequence[str] = LAYOUT,
) -> list[str]:
    """The command line of a training run; later arguments override the model's and the layout's."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(SCRIPT), "--data-path", str(data), *MODEL, *layout, *map(str, arguments)]


def train(data: Path, *arguments: str | Path | int, timeout: float = 600, **options: object) -> str:
    """Train to the end and return what was printed; fails with all of it where the run fails."""
    result = subprocess.run(
        command(data, *arguments, **options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def refused(data: Path, *arguments: str | Path | int, timeout: float = 600) -> str:
    """Start one rank with arguments that are to be refused; returns the sentence after `error: `."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--data-path", str(data), *MODEL, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("pretrain_moe_gpt: error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0].removeprefix("pretrain_moe_gpt: error: ")


def scalar_names(folder: Path) -> dict[str, list[int]]:
    """The steps of each scalar in a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return {name: [event.step for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
