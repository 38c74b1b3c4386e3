"""Which GPU of its node a rank works on."""

from __future__ import annotations

import os
import socket

import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.gpu_settings import SHARED


def take_gpu() -> torch.device:
    """Makes a GPU the device of this rank, before its process group is made, and returns it: the only one that it sees,
    or the one of its number in the node.

    Where SHARED is 1, ranks go round the node's GPUs. NCCL refuses two ranks of a host on one, so that each round is
    given a host's name of its own, and ranks of two rounds send over sockets.

    Raises:
        ConfigurationError: more ranks on this node than GPUs, of which there are several: the only one that a rank
            sees may be its own.
    """
    # Set for PyTorch, too: from 2.15 on it binds NCCL's groups to the GPU of this number, or of the rank's in the job.
    local_rank, gpus = int(os.environ.setdefault("LOCAL_RANK", "0")), torch.cuda.device_count()
    number = 0 if gpus == 1 else local_rank
    if os.environ.get(SHARED) == "1":
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank // gpus}"
        number = local_rank % gpus
    elif gpus > 1 and (ranks := max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) > gpus:
        raise ConfigurationError(
            f"{ranks} ranks were started on this node, which has {gpus} GPUs: start as many ranks as GPUs, or set "
            f"{SHARED}=1 to have ranks share them"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
