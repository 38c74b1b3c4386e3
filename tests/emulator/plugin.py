"""`pytest -p tests.emulator.plugin tests/gpu`: where there is no GPU, `torch.device("cuda")` is the emulator.

With `tests/multirank --gpus` in the place of tests/gpu, ranks have an emulator each (ranks.py).

PyTorch decides while it is imported what devices there are, and the emulator's build of the extension takes the place
of the package's own: both want a process in which neither has been imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "megatron_moe_opt._C"
DEVICES = 8  # as ranks count them; a process has one
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one where there is a GPU: PyTorch is asked only then


def load(module: Path) -> ctypes.CDLL:
    """Makes the build at `module` the package's extension, and PyTorch's "cuda". Returns its switches: device.cpp."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: the emulator needs a process of its own")
    libraries = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "lib"
    ctypes.CDLL(str(libraries / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    for library in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / library))
    switches = ctypes.CDLL(str(module))
    _answer_for_cuda(switches)
    spec = importlib.util.spec_from_file_location("_C", module)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[NAME] = extension
    return switches


class _Stream:
    """A stream whose work is done when it is issued: there is nothing to wait for."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Whether all is done."""
        return True


def _answer_for_cuda(switches: ctypes.CDLL) -> None:
    """Answers for torch.cuda, which a build of PyTorch without CUDA leaves empty."""
    import torch

    streams = [_Stream()]
    # Streams of Python's are one; lanes of the executor are others.
    _Stream.cuda_stream = property(lambda stream: switches.emulator_current_stream())

    @contextlib.contextmanager
    def stream(which: _Stream) -> Iterator[None]:
        streams.append(which)
        try:
            yield
        finally:
            streams.pop()

    answers = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (2**36, 2**36),  # an 80 GB GPU has about as much
        "Stream": _Stream,
        "stream": stream,
        "current_stream": lambda device=None: streams[-1],
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: switches.emulator_refuse_synchronisation(mode == "error"),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.pin_memory = lambda self, device=None: self


def _has_gpu() -> bool:
    if not any(map(os.path.exists, GPU_FILES)):
        return False
    asked = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked]).returncode == 0


switches: ctypes.CDLL | None = None
given = os.environ.get("MOE_OPT_EMULATOR")  # the module of a mutant, or that of the process which started this one
if given is None and not _has_gpu():
    build = [sys.executable, "-m", "tests.emulator.build"]
    given = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    os.environ["MOE_OPT_EMULATOR"] = given  # for ranks
if given is not None:
    switches = load(Path(given))
