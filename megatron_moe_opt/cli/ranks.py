"""torch.distributed for a command: over the ranks of torchrun or of Slurm's srun, or over this process alone."""

from __future__ import annotations

import os
import platform
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.versions import megatron_version


def begin() -> int:
    """Readies this process for a command that runs on all ranks, and returns how many there are.

    Warnings of Megatron and PyTorch are left out: there are many, on every rank, about optional libraries that are
    absent.

    Raises:
        ConfigurationError: see adopt_slurm_ranks.
    """
    warnings.filterwarnings("ignore", module=r"megatron|torch")
    adopt_slurm_ranks()
    return world_size()


def slowest(seconds: Sequence[float] | torch.Tensor, device: torch.device) -> list[Any]:
    """Returns the largest of all ranks of each number, which may be in rows. A collective call over the world."""
    times = torch.as_tensor(seconds, dtype=torch.float64).to(device).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds from calling `run` until the work that it issued on `device` is complete."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what a report says of the host and the devices that it is from; in a process group.

    A shaped cluster (tools/netbox.py) is known by its rates, not by its host.
    """
    facts = {
        "name": socket.gethostname(),
        "cpus": os.cpu_count() or 0,
        "threads of a rank": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": dist.get_backend(),
    }
    return facts | {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NETBOX_")}


def software() -> dict[str, Any]:
    """Returns the versions that a report says it was made with."""
    return {
        "megatron-moe-opt": megatron_moe_opt.__version__,
        "megatron-core": megatron_version() or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def adopt_slurm_ranks() -> None:
    """Where srun itself started the ranks, and no torchrun: names them in torchrun's variables.

    Raises:
        ConfigurationError: nothing says where rank 0 is.
    """
    if "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]  # first: it says which rank of a node speaks
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise ConfigurationError(
                f"{variable} is not set: export the first node's host name as MASTER_ADDR and a free port as "
                "MASTER_PORT before srun, or start torchrun on every node"
            )
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]


def world_size() -> int:
    """Returns the number of ranks of this run, before there is a process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Makes the default process group inside the block: NCCL with a GPU a rank, Gloo without; yields this rank's
    device.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextmanager
def megatron_process_group() -> Iterator[torch.device]:
    """Yields the device of `process_group`, for commands that run Megatron's layers: without a GPU they run on the
    host.
    """
    megatron_moe_opt.use_host_backend()
    with process_group() as device:
        yield device


@contextmanager
def temporary_groups(groups: Iterable[ProcessGroup]) -> Iterator[None]:
    """Destroys this rank's groups after the block, when all ranks of the world have done with theirs.

    A rank that destroys a group while others make their next one can cut the connections of that one (seen with Gloo).
    """
    try:
        yield
        dist.barrier()
    finally:
        for group in groups:
            dist.destroy_process_group(group)


@contextmanager
def parallel_layer(tp: int, ep: int, expert_tp: int, seed: int) -> Iterator[None]:
    """Makes Megatron's groups of these sizes, and sets its seeds, in the block. A collective call over the world."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp
    )
    try:
        model_parallel_cuda_manual_seed(seed)
        yield
        dist.barrier()  # see temporary_groups
    finally:
        parallel_state.destroy_model_parallel()
