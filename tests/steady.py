"""What ranks hold while they train: threads, files, process groups, tensors and memory must stay as they are.

    python -m tests.steady --steps 300

is the long form of tests/multirank/test_steady.py.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.ranks.dispatchers import DISPATCHERS, config_of, imitate_two_nodes, layout_of, options_of
from tests.ranks.pool import RankPool

LOOKS = 5


@dataclass(frozen=True)
class Held:
    """What a rank's process holds after a step."""

    threads: int
    files: int
    groups: int
    """The number of process groups."""
    tensors: int
    """The number of tensors that Python knows."""
    resident_mb: float


def measure(dispatcher: str, at: Sequence[int], folder: Path, trial_steps: int | None = None) -> list[Held]:
    """Trains a tiny GPT and looks after these steps, the last of which ends it. For the ranks of a pool.

    Args:
        trial_steps: the most steps in which `auto` tries; None: as always.
    """
    import pytest

    import megatron_moe_opt
    from megatron_moe_opt.options import Options
    from megatron_moe_opt.planning.choosing import trials
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with pytest.MonkeyPatch.context() as patch, parallel(**layout_of(dispatcher)):
        patch.setitem(os.environ, "GROUP_RANK", "0")
        imitate_two_nodes()
        if trial_steps is not None:
            patch.setattr(trials, "TURN", 2)
            patch.setattr(trials, "MOST_STEPS", trial_steps)
        megatron_moe_opt.register(options_of(dispatcher, folder))
        try:
            model = gpt(learning_rate=1e-3, microbatches=1, **config_of(dispatcher))
            held = []
            for step in at:
                model.train(step - model.step)
                held.append(look())
            return held
        finally:
            megatron_moe_opt.register(Options())


def look() -> Held:
    """Looks at what this process holds."""
    import psutil
    import torch
    import torch.distributed as dist

    gc.collect()
    seen = []
    for _ in range(LOOKS):  # Gloo's threads let go of what they have sent some moments after their callers go on
        seen.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
        time.sleep(0.02)
    tensors = min(seen)
    process = psutil.Process()
    groups = len(dist.distributed_c10d._world.pg_map)
    return Held(process.num_threads(), process.num_fds(), groups, tensors, process.memory_info().rss / 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.steady", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dispatcher", choices=("alltoall", *DISPATCHERS))
    args = parser.parse_args()
    at = sorted({max(1, args.steps * part // 15) for part in (1, 5, 10, 15)})
    print("largest of 4 ranks, after step " + ", ".join(map(str, at)) + "; last: change a step since the first look\n")
    print("| dispatcher | threads | files | process groups | tensors | resident MB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="steady-") as folder:
        for dispatcher in [args.dispatcher] if args.dispatcher else ("alltoall", *DISPATCHERS):
            pool = RankPool()  # a fresh one: what others have left behind is not this one's
            try:
                of_ranks = pool.run(measure, timeout_s=3600, dispatcher=dispatcher, at=at, folder=Path(folder))
            finally:
                pool.close()
            print(f"| {dispatcher} | " + " | ".join(_columns(at, of_ranks)) + " |", flush=True)
    return 0


def _columns(at: Sequence[int], of_ranks: list[list[Held]]) -> list[str]:
    """Returns a column for each number that is held: its largest of all ranks at each step, and the
    largest slope of a rank.
    """
    columns = []
    for one in range(len(astuple(of_ranks[0][0]))):
        numbers = [[astuple(held)[one] for held in of_rank] for of_rank in of_ranks]
        slope = max((of_rank[-1] - of_rank[0]) / (at[-1] - at[0]) for of_rank in numbers)
        largest = ", ".join(f"{max(values):.0f}" for values in zip(*numbers, strict=True))
        columns.append(f"{largest}; {slope:+.3f}")
    return columns


if __name__ == "__main__":
    sys.exit(main())
