"""How much more memory a piece of code takes at its highest point."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def peak_memory_growth(run: Callable[[], object], device: torch.device) -> int | None:
    """Returns the bytes by which memory rises above its level before `run`, at its highest point during `run`.

    On CUDA: PyTorch's allocated bytes (torch.cuda.max_memory_allocated). On CPU: resident memory of the process (the
    kernel's VmHWM, reset before `run`, minus VmRSS, after freed memory was given back to the system), which includes
    what collectives and other threads touch, and leaves out memory that is resident already and used again, such as
    pooled buffers. None where the system does not tell (no Linux /proc, or resetting VmHWM is not allowed).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    _give_back_freed_memory()
    can_tell = _reset_peak()
    before = _status_bytes("VmRSS") if can_tell else 0
    run()
    return max(0, _status_bytes("VmHWM") - before) if can_tell else None


def _give_back_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text("5")  # proc(5): resets VmHWM to the present VmRSS
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024
