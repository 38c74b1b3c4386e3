"""Runs of recipes/pretrain_moe_gpt.py for the system tests: a tiny model on a tiny dataset."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.ranks.job import Job

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

# No GPU, loopback only: the same job on every machine.
VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def environment() -> dict[str, str]:
    """Returns the environment of scripts that start ranks themselves: one thread a rank,
    besides the usual variables.
    """
    return os.environ | VARIABLES | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def words(data: Path, *arguments: str | Path | int, layout: Sequence[str] = LAYOUT) -> list[str]:
    """The script and its arguments; later ones override the model's and the layout's."""
    return [str(SCRIPT), "--data-path", str(data), *MODEL, *layout, *map(str, arguments)]


def torchrun(data: Path, *arguments: str | Path | int) -> list[str]:
    """The command line of a training run on four ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    return [*launcher, *words(data, *arguments)]


def start(
    data: Path,
    output: Path,
    *arguments: str | Path | int,
    ranks: int | None = 4,
    layout: Sequence[str] = LAYOUT,
    before: Callable[[], None] | None = None,
) -> Job:
    """A training run that prints into the file `output`; see Job."""
    variables = VARIABLES | {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    return Job(words(data, *arguments, layout=layout), output, ranks, variables, before)


def train(data: Path, folder: Path, *arguments: str | Path | int, **options: object) -> str:
    """Train to the end and return what was printed; fails with all of it where the run fails."""
    job = start(data, folder / "output.txt", *arguments, **options)
    status = job.wait()
    printed = job.output.read_text()
    assert status == 0, printed
    return printed


def refused(data: Path, folder: Path, *arguments: str | Path | int) -> str:
    """Start one rank with arguments that are to be refused; returns the sentence after `error: `."""
    job = start(data, folder / "output.txt", *arguments, ranks=None, layout=())
    status = job.wait()
    printed = job.output.read_text()
    assert status == 2, printed
    lines = [line for line in printed.splitlines() if line.startswith("pretrain_moe_gpt: error: ")]
    assert len(lines) == 1, printed
    return lines[0].removeprefix("pretrain_moe_gpt: error: ")


def scalar_names(folder: Path) -> dict[str, list[int]]:
    """The steps of each scalar in a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return {name: [event.step for event in board.Scalars(name)] for name in board.Tags()["scalars"]}
