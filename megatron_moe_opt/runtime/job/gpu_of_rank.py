"""Which GPU of its node a rank works on."""

from __future__ import annotations

import os
import socket

import torch


def take_gpu() -> torch.device:
    """Makes a GPU of this node the device of this rank, before its process group is made, and returns it.

    Where a node has more ranks than GPUs, ranks share them, which serves tests: NCCL refuses two ranks of a host on one
    GPU, so that each is given a host's name of its own there, and sends over sockets.
    """
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > gpus:
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank}"
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device
