"""Part two of the check for machines with GPUs: the ranks of a node together, or of the nodes of a Slurm job.

    bash tools/gpu_check.sh --node             builds first; one node of up to 8 GPUs
    python -m tools.gpu.node --plan --gpus 8   the steps and their limits, without a GPU
    sbatch tools/gpu/job.sbatch              two nodes of a Slurm cluster; --nodes=1: one

On one GPU SHARING ranks share it, over NCCL's sockets: their results count there, their times say nothing of a cluster.
Every step has a time limit; one that fails does not stop the others. Ends with a page (page.md in runs/gpu_node, or
in runs/gpu_node-JOB under Slurm), and with a status that is not 0 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from megatron_moe_opt.gpu_settings import SHARED
from tools import ROOT
from tools.gpu.node_page import Result, page
from tools.megatron_checks.test_matrix import QUICK

QUEUES = (32, 1)
SHARING, OF_SHARED = 4, (12, 1)
"""The ranks that share the GPU of a node that has one, and the queues that each of them can have there."""
PATIENCE = 3
"""The times as long that a step may take there: without NVIDIA's multi-process service ranks take turns."""
OURS = ("monta", "monta:O3x4", "mpmoe:2", "expert-migration")
COMMAND = ("-m", "megatron_moe_opt.cli.main")
CROSS_SECTION = (
    *(test for test in QUICK if test.startswith("tests/multirank/")),
    "tests/multirank/test_monta_levels.py::test_buffers_are_used_again_in_the_next_step",
    "tests/multirank/test_wire.py::test_samples_move_with_narrow_rows_and_whole_residuals",
    "tests/multirank/test_checkpoint.py::test_results_are_stocks",
    "tests/multirank/test_mpmoe_training.py::test_ranks_agree_on_partitions_under_skewed_counts",
    "tests/multirank/test_expert_migration_training.py::test_bf16_losses_are_those_of_stock",
    "tests/multirank/test_expert_migration_training.py::test_gradients_go_straight_through",
    "tests/multirank/test_overlapped_batches.py::test_experts_travel_as_they_do_without_overlap",
)
"""A test of each dispatcher against stock; then chunks, narrow rows and samples that move, recomputation, partitions,
training, compressed experts, and Megatron's overlap of micro-batches.
"""
ALL_TESTS = "python -m pytest tests/multirank --gpus -q -rs"
"""The command of all tests, which take longer than a page."""
SMALL = ("--tokens", "256", "--hidden", "256", "--ffn-hidden", "256", "--steps", "1", "--warmup", "0")


@dataclass(frozen=True)
class Step:
    """A command with a time limit, and the program that it needs beside Python, if any."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


@dataclass(frozen=True)
class Ranks:
    """How commands are started on ranks: by torchrun on this node, or by srun on those of a job."""

    gpus: int
    """Ranks of a node: as many as it has GPUs, or SHARING on a single one."""
    nodes: int = 1
    sharing: bool = False
    """Whether they share the GPU of one node."""

    @property
    def queues(self) -> tuple[int, int]:
        """Returns the values of CUDA_DEVICE_MAX_CONNECTIONS that are compared."""
        return OF_SHARED if self.sharing else QUEUES

    def __call__(self, *command: str, before: Sequence[str] = ()) -> tuple[str, ...]:
        """Returns the command that starts the ranks of `python COMMAND`; `before`: a program that watches
        each of them, or torchrun.
        """
        if self.nodes > 1:
            each = ("srun", f"--ntasks={self.gpus * self.nodes}", f"--ntasks-per-node={self.gpus}")
            return (*each, "--kill-on-bad-exit=1", *before, sys.executable, *command)
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.gpus))
        return (*before, sys.executable, *torchrun, *command)

    def alone(self, *command: str) -> tuple[str, ...]:
        """Returns the command of one process, which sees all GPUs of a node."""
        one = ("srun", "--nodes=1", "--ntasks=1", f"--gpus-per-node={self.gpus}") if self.nodes > 1 else ()
        return (*one, *command)


def steps(ranks: Ranks, flex: Sequence[str], folder: Path) -> list[Step]:
    """All steps in turn: together at most 13 minutes, three times that where ranks share a GPU.

    Args:
        flex: the back ends of Megatron's flex that can run.
    """
    dispatchers = ",".join(["allgather", *(f"flex:{backend}" for backend in flex), *OURS])
    shape = ("--hidden", "4096", "--ffn-hidden", "1536", "--dtype", "bf16")
    sizes = ("--tokens", "4096", "--topk", "8", *shape)
    experts = ("--experts", str(8 * ranks.gpus * ranks.nodes))
    domain = f"{'1x' * (ranks.nodes > 1)}{ranks.gpus}"  # a node, whose experts then travel to all of its ranks
    watched = f"monta:O3x2,parm,mpmoe:2,expert-migration:{domain}"
    small = (*COMMAND, "bench", "--dispatchers", watched, *SMALL, *experts)
    tests = (sys.executable, "-m", "pytest", *CROSS_SECTION, "--gpus", "-q", "-rs", "--tb=short")
    found = [Step("cross-section of the tests of several ranks, NCCL", ranks.alone(*tests), 240)]
    for number in ranks.queues:
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)}
        memory = ("-m", "tools.gpu.with_memory", f"{folder}/memory-{number}.txt")
        layer = (*memory, "bench", "--dispatchers", dispatchers, *sizes, *experts)
        json = ("--output", f"{folder}/layer-{number}.json")
        found.append(Step(f"layer, {number} queue(s)", ranks(*layer, *json), 80, queues))
        profile = (
            *COMMAND,
            "profile",
            "--hidden",
            "4096",
            "--ffn-hidden",
            "1536",
            "--dtype",
            "bf16",
            "--seconds",
            "20",
        )
        output = ("--output", f"{folder}/cluster-{number}.json")
        found.append(Step(f"profile, {number} queue(s)", ranks(*profile, *output), 60, queues))
    found.append(Step("CUDA sanitizer of PyTorch", ranks(*small), 60, {"TORCH_CUDA_SANITIZER": "1"}))
    memcheck = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "1")
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found.append(Step("memcheck", ranks(*small, before=memcheck), 140, uncached, memcheck[0]))
    trace = ("nsys", "profile", "--trace=cuda,nvtx", "--force-overwrite=true", f"--output={folder}/trace-%h-%p")
    with_ranges = ("-m", "tools.gpu.with_nvtx", *small[len(COMMAND) :])
    found.append(Step("trace of nsys", ranks(*with_ranges, before=trace), 60, needs=trace[0]))
    return [replace(step, limit_s=PATIENCE * step.limit_s) for step in found] if ranks.sharing else found


def run(step: Step, log: Path) -> Result:
    """Runs a step, keeps what it says in `log`, and ends all that it started when its time is over."""
    if step.needs is not None and shutil.which(step.needs) is None:
        return Result(step.name, f"not run: no {step.needs} here")
    begin = time.monotonic()
    with open(log, "w") as file:
        try:
            process = subprocess.Popen(
                step.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"} | step.environment,
            )
        except OSError as error:  # no srun in a container
            return Result(step.name, f"FAILED ({error})")
        try:
            status = process.wait(step.limit_s)
            said = "ok" if status == 0 else f"FAILED (exit status {status}): {log}"
        except subprocess.TimeoutExpired:
            _end(process)
            said = f"FAILED (over {step.limit_s} s): {log}"
    return Result(step.name, said, time.monotonic() - begin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with what it started: torchrun, asked, ends its ranks, which are not of its process group."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, ending)
        try:
            process.wait(15)
            return
        except subprocess.TimeoutExpired:
            continue


def plan(of: Sequence[Step]) -> str:
    """Returns the steps as they would run."""
    lines = []
    for step in of:
        variables = "".join(f"{name}={value} " for name, value in step.environment.items())
        needs = f", needs {step.needs}" if step.needs else ""
        lines.append(f"{step.name} (at most {step.limit_s} s{needs})\n    {variables}{shlex.join(step.command)}")
    return "\n".join([*lines, f"together at most {sum(step.limit_s for step in of)} s"])


def main() -> int:
    """Runs the steps, or prints them, as the module says."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="print the steps, run none")
    parser.add_argument("--gpus", type=int, help="GPUs of a node (default: those that PyTorch finds)")
    parser.add_argument("--record", action="store_true", help="also write docs/benchmarks/gpu-node-DATE.md")
    args = parser.parse_args()
    import torch

    gpus = args.gpus or (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    if not gpus or (not args.plan and not torch.cuda.is_available()):
        print("tools.gpu.node: error: no GPU here; --plan --gpus 8 shows the steps", file=sys.stderr)
        return 2
    if gpus == 1 and nodes > 1:
        print(f"tools.gpu.node: error: {nodes} nodes of one GPU: use nodes of 2 to 8, or one node", file=sys.stderr)
        return 2
    job = os.environ.get("SLURM_JOB_ID")
    folder = ROOT / "runs" / ("gpu_node" + (f"-{job}" if job else ""))
    ranks = Ranks(gpus, nodes) if gpus > 1 else Ranks(SHARING, sharing=True)
    if ranks.sharing:
        os.environ[SHARED] = "1"  # for what the steps start
    if args.plan:
        print(plan(steps(ranks, ("deepep",), folder)))
        return 0
    from megatron_moe_opt.integration.flex_backends import flex_backends, missing_for_flex

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    missing = {backend: missing_for_flex(backend) for backend in flex_backends()}
    not_installed = {f"flex:{backend}": why for backend, why in missing.items() if why}
    not_installed |= (
        {} if any("nccl" in backend for backend in missing) else {"flex over NCCL-EP": "not in this Megatron-Core"}
    )
    results = []
    for number, step in enumerate(steps(ranks, [one for one, why in missing.items() if not why], folder)):
        print(f"== {step.name}", flush=True)
        results.append(run(step, folder / f"step-{number}.log"))
        print(f"   {results[-1].said}", flush=True)
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    sharing = f", shared by {ranks.gpus} ranks" if ranks.sharing else ""
    title = f"{ranks.nodes} node(s) of {gpus} x {torch.cuda.get_device_name()}{sharing}, {day}"
    written = page(title, _facts(), results, folder, ranks.queues, not_installed, ALL_TESTS)
    record = ROOT / "docs" / "benchmarks" / f"gpu-node{'s' * (ranks.nodes > 1)}-{day}.md"
    targets = [folder / "page.md"] + [record] * args.record
    for target in targets:
        target.write_text(written)
    print(f"\n{written}\nwritten: {', '.join(map(str, targets))}")
    return int(any(result.failed for result in results))


def _facts() -> dict[str, str]:
    """Versions, topology and memory of this node."""
    commands = {
        "Versions": (sys.executable, *COMMAND, "doctor"),
        "Commit": ("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "Driver and memory": ("nvidia-smi", "--query-gpu=index,name,driver_version,memory.total", "--format=csv"),
        "Topology": ("nvidia-smi", "topo", "-m"),
    }
    return {name: _said(command) for name, command in commands.items()}


def _said(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
