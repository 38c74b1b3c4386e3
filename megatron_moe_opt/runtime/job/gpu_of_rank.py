"""Which GPU of its node a rank works on."""

from __future__ import annotations

import os
import socket

import torch

SHARED = "MOE_OPT_SHARED_GPUS"
"""Environment variable: set, where ranks are to share a node's GPUs, which serves tests."""


def take_gpu() -> torch.device:
    """Makes a GPU the device of this rank, before its process group is made, and returns it: of those that it sees
    the one of its number in the node, or the only one.

    Where SHARED is set, ranks go round the node's GPUs. NCCL refuses two ranks of a host on one, so that each round is
    given a host's name of its own, and ranks of two rounds send over sockets.
    """
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if SHARED in os.environ:
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank // gpus}"
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    return device
