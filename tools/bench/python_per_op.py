"""What a pass costs the thread that issues it, at sizes where nothing else does: per op, and per chunk or partition.

    torchrun --nproc-per-node 2 -m tools.bench.python_per_op [--steps 200] [--functions 15]

For each dispatcher the processor time of the calling thread in a forward and backward pass of a MoE layer (median of
steps; waiting is not in it), over the ops that ran; and, of twice as many parts against as many, over the parts added.
Besides, how often functions of this package are called meanwhile: a number that other jobs on the machine do not touch.
The rows are so few that what is computed takes microseconds. With --functions the functions of this package with the
most time of their own, by cProfile, which makes short functions look longer than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist

import megatron_moe_opt
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest, layer_under_test

PACKAGE = Path(megatron_moe_opt.__file__).parent
PAIRS = {"monta:O3x{}": (4, 8), "mpmoe:{}": (4, 8)}


def main() -> None:
    """Runs it and prints on rank 0."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--functions", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    megatron_moe_opt.use_host_backend()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    megatron_moe_opt.register()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    variants = tuple(name.format(parts) for name, counts in PAIRS.items() for parts in counts)
    settings = LayerSettings(variants, tokens=64, hidden=16, ffn_hidden=16, experts=2 * world, topk=2, ep=world)
    microseconds: dict[str, float] = {}
    for variant in variants:
        layer = layer_under_test(settings, variant, torch.device("cpu"))
        microseconds[variant] = _of_a_step(layer, args.steps)
        ops = sum(len(timeline.schedule.ops) for timeline in layer.observed_step()[0])
        each = microseconds[variant] / ops
        calls = calls_of_a_step(layer).total()
        _say(
            f"{variant:12} {microseconds[variant]:7.0f} us a step, {ops:3} ops, {each:5.1f} us an op, "
            f"{calls} calls of the package's functions"
        )
        if args.functions and variant.endswith("4"):
            _profile(layer, args)
    for name, (few, many) in PAIRS.items():
        more = microseconds[name.format(many)] - microseconds[name.format(few)]
        _say(f"{name.format('N'):12} {more / (many - few):7.0f} us a part more")
    dist.destroy_process_group()


def calls_of_a_step(layer: LayerUnderTest) -> Counter[tuple[str, str]]:
    """How often the calling thread calls each function of this package in a step, by file in the package and name; what
    stands in for a GPU is left out.
    """
    layer.clear_grads()
    dist.barrier()
    called: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called[frame.f_code] += 1

    sys.setprofile(count)  # of this thread alone: cProfile has those of all threads from Python 3.12 on
    try:
        layer.step()
    finally:
        sys.setprofile(None)
    calls: Counter[tuple[str, str]] = Counter()
    for code, number in called.items():
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "integration" / "host"):
            calls[path.relative_to(PACKAGE).as_posix(), code.co_name] += number
    return calls


def _of_a_step(layer: LayerUnderTest, steps: int) -> float:
    times = []
    for _ in range(steps):
        layer.clear_grads()
        dist.barrier()
        start = time.thread_time_ns()
        layer.step()
        times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times)


def _profile(layer: LayerUnderTest, args: argparse.Namespace) -> None:
    profile = cProfile.Profile()
    for _ in range(args.steps):
        layer.clear_grads()
        dist.barrier()
        profile.runcall(layer.step)
    if dist.get_rank() == 0:
        pstats.Stats(profile).sort_stats("tottime").print_stats("megatron_moe_opt", args.functions)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
