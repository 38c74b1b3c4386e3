"""One rank that is told something else, or refused something alone, ends all ranks, with its sentence."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

from tests.ranks.job import Job
from tests.system.training import VARIABLES, start

LAUNCH = """
import sys
from megatron_moe_opt.launch import main
main(sys.argv[1:])
"""
# A Megatron script in small. Its own arguments are not compared; rank 1 has one that our dispatcher refuses.
SCRIPT = """
import os
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_moe_opt.integration.layer.moe_layer import build_layer
from tests.ranks.megatron import moe_config

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
model_parallel_cuda_manual_seed(1)
balancing = "sinkhorn" if os.environ["RANK"] == "1" else "aux_loss"
build_layer(moe_config(moe_token_dispatcher_type="netmoe", moe_router_load_balancing_type=balancing))
dist.barrier()
"""


def tell_rank_2(*words: str) -> None:
    if os.environ["RANK"] == "2":
        sys.argv += words


def ended(job: Job) -> tuple[list[int], str]:
    """Exit statuses and what was printed, of ranks that all end by themselves, far before any timeout of theirs."""
    deadline = time.monotonic() + 240
    while any(process.exitcode is None for process in job.processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    statuses = [process.exitcode for process in job.processes]
    job.kill()
    return statuses, job.output.read_text()


def test_a_rank_that_is_told_something_else_ends_all(data: Path, tmp_path: Path):
    job = start(
        data, tmp_path / "output.txt", "--train-iters", 100_000, "--moe-token-dispatcher-type", "monta",
        "--moe-opt-monta-level", "O3", "--moe-opt-chunks", 3,
        before=functools.partial(tell_rank_2, "--moe-opt-chunks", "0"),
    )  # fmt: skip
    statuses, printed = ended(job)
    assert statuses == [2] * 4, printed
    sentence = "on rank 2: argument --moe-opt-chunks: '0' is neither a number of chunks"
    said = [line for line in printed.splitlines() if "error: " in line]
    assert len(said) == 4 and all(line.startswith(f"pretrain_moe_gpt: error: {sentence}") for line in said), printed


def test_a_rank_that_is_refused_something_later_ends_all(tmp_path: Path):
    launch, script = tmp_path / "launch.py", tmp_path / "script.py"
    launch.write_text(LAUNCH)
    script.write_text(SCRIPT)
    statuses, printed = ended(Job([launch, script], tmp_path / "output.txt", ranks=2, environment=VARIABLES))
    assert None not in statuses and 0 not in statuses, printed
    said = [line for line in printed.splitlines() if line.startswith("moe-opt: error: ")]
    assert len(said) == 2 and all("rank 1 " in line and "sinkhorn" in line for line in said), printed
