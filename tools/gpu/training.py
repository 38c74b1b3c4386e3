"""Trains a small GPT with unmodified pretrain_gpt.py on the GPUs of this node, under one dispatcher after the other,
and compares losses and times with the first one's.

    MEGATRON_LM=CHECKOUT python -m tools.gpu.training                            stock's alltoall, then auto
    ... python -m tools.gpu.training --steps 60 --dispatchers "alltoall; mpmoe --moe-opt-partitions 4"
    ... python -m tools.gpu.training --num-layers 4                              other arguments go to Megatron

The text is the source of Python's standard library, by bytes. Layers, grouped experts and the fused permute are
Transformer Engine's where it is installed. A single GPU is shared by four ranks, each as a node of its own, over NCCL's
sockets: losses count there, times say nothing of a cluster. Without a GPU four ranks run on the CPU, over Gloo. Ends
with a table, and with a status that is not 0 if a run failed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

from megatron_moe_opt.gpu_settings import CONNECTIONS
from tools import ROOT
from tools.forked_ranks import GRACE_S, die_with_parent
from tools.markdown_rows import head, row
from tools.megatron_checks.feature_matrix import WITHOUT_LIBRARIES, losses_of

SHARING = 4
"""The ranks that share a single GPU, or run without one."""
OF_SHARED = "12"
"""The hardware queues that each of them can have under NVIDIA's multi-process service."""
SETTLED = 40
"""The number of steps at the end whose times are told: `auto` has settled by then."""
EXPERTS = 16
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
    " --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
    f" --attention-dropout 0 --num-experts {EXPERTS} --moe-router-topk 4 --moe-ffn-hidden-size 8192"
    " --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss --moe-router-dtype fp32"
    " --micro-batch-size 2 --lr 3e-4 --lr-decay-style constant --split 100,0,0 --eval-iters 0 --eval-interval 1000"
    " --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 257 --use-distributed-optimizer"
    " --overlap-grad-reduce --bf16 --distributed-timeout-minutes 3"
)
FUSED = shlex.split("--transformer-impl transformer_engine --moe-grouped-gemm --moe-permute-fusion")
FUSES_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""The module of Apex by which Megatron's own linear layers, as the last one is, add to main_grad."""


@dataclass(frozen=True)
class Trained:
    """What a run has logged of its steps."""

    dispatcher: str
    losses: tuple[float, ...]
    milliseconds: tuple[float, ...]

    @classmethod
    def of(cls, dispatcher: str, log: str) -> Trained:
        """Returns what Megatron's log says. Raises RuntimeError where that is less than two steps."""
        losses, times = losses_of(log), re.findall(r"per iteration \(ms\): ([0-9.]+)", log)
        if not 1 < len(losses) == len(times):
            raise RuntimeError(f"{dispatcher}: {len(losses)} losses and {len(times)} times of steps were logged")
        return cls(dispatcher, tuple(map(float, losses)), tuple(map(float, times)))

    def row(self, first: Trained) -> str:
        """Returns a row of the table."""
        low, median, high = statistics.quantiles(self.milliseconds[-SETTLED:], n=4)
        of_first = median / statistics.median(first.milliseconds[-SETTLED:])
        apart = [abs(one / other - 1) for one, other in zip(self.losses, first.losses, strict=False)]
        end = statistics.mean(self.losses[-10:])
        return row(
            f"`{self.dispatcher}`", len(self.losses), f"{median:.1f} ({low:.1f} to {high:.1f})", f"{of_first:.3f}",
            f"{self.losses[0]:.4f}, {end:.4f}", f"{max(apart[:10]):.2%}, {max(apart):.2%}",
        )  # fmt: skip


def table(runs: Sequence[Trained]) -> str:
    """Returns the runs beside the first of them, in Markdown."""
    names = head(
        "dispatcher", "steps", "ms a step at the end (quartiles)", "over the first", "loss of step 1, of the last 10",
        "farthest from the first's: in 10 steps, in all",
    )  # fmt: skip
    return "\n".join([*names, *(one.row(runs[0]) for one in runs)])


def ranks_here(gpus: int) -> list[dict[str, str]]:
    """Returns torchrun's variables of each rank, and NCCL's where ranks share a GPU: Megatron takes the GPU of a rank's
    number in its node, and NCCL refuses two ranks of a host on one.
    """
    if gpus > 1:
        queues = os.environ.get(CONNECTIONS, "32")
        of_all = {"LOCAL_WORLD_SIZE": str(gpus), CONNECTIONS: queues}
        return [of_all | {"LOCAL_RANK": str(rank)} for rank in range(gpus)]
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_IB_DISABLE": "1", CONNECTIONS: OF_SHARED}
    return [alone | {"GROUP_RANK": str(rank), "NCCL_HOSTID": f"node{rank}"} for rank in range(SHARING)]


def model_arguments(ranks: int, steps: int, data: Path, gpus: int) -> list[str]:
    """Returns Megatron's arguments of the model, the layout and the data: two micro-batches of each rank a step."""
    if gpus and find_spec("transformer_engine"):
        libraries = [*FUSED, *["--no-gradient-accumulation-fusion"] * (find_spec(FUSES_GRADIENTS) is None)]
    else:
        libraries = shlex.split(WITHOUT_LIBRARIES)
    ep, batch = math.gcd(ranks, EXPERTS), 4 * ranks
    sizes = ["--expert-model-parallel-size", ep, "--global-batch-size", batch, "--train-iters", steps]
    return [*MODEL, *libraries, *map(str, sizes), "--data-path", str(data)]


def run(command: Sequence[str], ranks: Sequence[Mapping[str, str]], folder: Path) -> str:
    """Runs a command on all ranks, each of which writes a log into a new folder. Returns what the last rank has said,
    which is who tells the loss. Raises RuntimeError where a rank fails; none is left running.
    """
    folder.mkdir(parents=True)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    logs = [folder / f"rank-{number}.log" for number in range(len(ranks))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, (of_rank, log) in enumerate(zip(ranks, logs, strict=True)):
            environment = os.environ | common | of_rank | {"RANK": str(number)}
            with open(log, "w") as file:
                how = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
                processes.append(subprocess.Popen(command, **how, preexec_fn=die_with_parent))
        codes: list[int | None] = [None] * len(ranks)
        while None in codes:
            time.sleep(0.2)
            codes = [process.poll() for process in processes]
            failed = next((number for number, code in enumerate(codes) if code), None)
            if failed is not None:  # the others would wait for it
                raise RuntimeError(f"rank {failed} failed: {logs[failed]}")
    finally:
        _end(processes)
    return logs[-1].read_text()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs, so that its GPU is free for what comes next."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """Trains and prints, as the module says."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dispatchers", default="alltoall; auto", help="with their options, separated by semicolons")
    parser.add_argument("--steps", type=int, default=200, help="of each (auto tries in 150 at most)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_training", help="for a new folder of logs")
    args, of_megatron = parser.parse_known_args()
    checkout = Path(os.environ.get("MEGATRON_LM", "")).resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        print(
            "tools.gpu.training: error: MEGATRON_LM names no checkout of Megatron-LM with pretrain_gpt.py",
            file=sys.stderr,
        )
        return 2
    import torch

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(checkout), os.environ.get("PYTHONPATH"))))
    data = ROOT / "runs" / "data" / "stdlib"
    subprocess.run([sys.executable, ROOT / "recipes" / "prepare_text.py", "--output", data], check=True)
    gpus = torch.cuda.device_count()
    ranks = ranks_here(gpus)
    launch = [sys.executable, "-m", "megatron_moe_opt.launch", f"{checkout}/pretrain_gpt.py"]
    folder = args.folder / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M%S}"
    # Of the data that were written just now: beside these Megatron would find the sample indices of the last ones.
    cache = ["--data-cache-path", str(folder / "sample-indices")]
    arguments = [*model_arguments(len(ranks), args.steps, data, gpus), *cache, *of_megatron]
    runs, failed = [], False
    for number, dispatcher in enumerate(filter(None, map(str.strip, args.dispatchers.split(";")))):
        print(f"== {dispatcher}: {folder / str(number)}", flush=True)
        command = [*launch, *arguments, "--moe-token-dispatcher-type", *shlex.split(dispatcher)]
        try:
            runs.append(Trained.of(dispatcher, run(command, ranks, folder / str(number))))
        except RuntimeError as error:
            print(f"   {error}", flush=True)
            failed = True
            if number == 0:
                break  # there is nothing to compare with
    if runs:
        print(table(runs))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
