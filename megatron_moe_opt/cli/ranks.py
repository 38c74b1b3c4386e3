"""torch.distributed for a command: over the ranks of torchrun or of Slurm's srun, or over this process alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.runtime.job.gpu_of_rank import take_gpu
from megatron_moe_opt.topology.process_groups import temporary_groups


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


def adopt_slurm_ranks() -> None:
    """Names the ranks in torchrun's variables where srun itself started them, and no torchrun did.

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
    device = take_gpu() if torch.cuda.is_available() else torch.device("cpu")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    with temporary_groups([dist.group.WORLD]):
        yield device


@contextmanager
def megatron_process_group() -> Iterator[torch.device]:
    """Yields the device of `process_group`, for commands that run Megatron's layers: without a GPU they run on the
    host.
    """
    megatron_moe_opt.use_host_backend()
    with process_group() as device:
        yield device
