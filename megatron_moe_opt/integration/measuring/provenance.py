"""Where measurements are from, and what they were made with."""

from __future__ import annotations

import os
import platform
import socket
from typing import Any

import torch
import torch.distributed as dist

import megatron_moe_opt
from megatron_moe_opt.versions import megatron_version


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
