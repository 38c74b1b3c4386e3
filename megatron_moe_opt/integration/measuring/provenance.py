"""Where measurements are from, and what they were made with."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist


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
