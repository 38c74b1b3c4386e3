"""`moe-opt doctor`: what is installed, what runs, and the command that mends what does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import typer
from rich.table import Table

import megatron_moe_opt
from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.gpu_settings import A_GPU, NEW_CLASS, has_unusable_gpu
from megatron_moe_opt.versions import (
    NEWEST_MEGATRON,
    OLDEST_MEGATRON,
    SUPPORTED_MEGATRON,
    cure_of_old_python,
    megatron_version,
    supports_megatron,
)  # fmt: skip

OLDEST_PYTHON, OLDEST_TORCH, NEWEST_TORCH = (3, 10), (2, 6), (2, 14)
WANTED_TORCH = f"torch>=2.{OLDEST_TORCH[1]},<2.{NEWEST_TORCH[1] + 1}"
"""What README and the extra `train` ask pip for. From 2.15 on another class is behind NCCL, which has not run with this
package.
"""


@dataclass(frozen=True)
class Finding:
    """What was found of one subject, a line of the report."""

    subject: str
    found: str
    mend: str = ""
    """The command that mends it; empty where nothing is wrong."""
    required: bool = True
    """Whether training cannot run before it is mended."""


def doctor() -> None:
    """Versions, devices, the compiled extension, and what is missing.

    Ends with exit code 0 if training can run and 1 otherwise.
    """
    findings = examine()
    table = Table(title="moe-opt doctor", show_lines=False)
    for column in ("", "", "to mend it"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = None if not finding.mend else "red" if finding.required else "yellow"
        table.add_row(finding.subject, finding.found, finding.mend, style=style)
    console = report_console()
    console.print(table)
    missing = [finding.subject for finding in findings if finding.mend and finding.required]
    if missing:
        console.print(f"Training cannot run yet: mend {', '.join(missing)}.")
        raise typer.Exit(1)
    console.print("Training can run.")


def examine() -> list[Finding]:
    """Returns all findings; imports nothing that has to be there, and raises nothing."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _torch,
        _extension,
        _megatron,
        _optional_libraries,
    )
    return [finding for check in checks for finding in check()]


def _python() -> Iterator[Finding]:
    old = tuple(int(part) for part in platform.python_version_tuple()[:2]) < OLDEST_PYTHON
    yield Finding("Python", platform.python_version(), f"use Python {_dotted(OLDEST_PYTHON)} or newer" if old else "")
    yield Finding("megatron-moe-opt", megatron_moe_opt.__version__)


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # the latter where a library of CUDA is missing
        yield Finding("PyTorch", _first_line(error), f"pip install '{WANTED_TORCH}'")
        return
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    found, mend = f"{torch.__version__} ({built_for})", ""
    if version < OLDEST_TORCH:
        mend = f"pip install --upgrade '{WANTED_TORCH}'"
    elif version > NEWEST_TORCH:
        found += f", newer than {_dotted(NEWEST_TORCH)}"
        if torch.version.cuda and os.environ.get(NEW_CLASS) != "0":
            why = "PyTorch's newer NCCL class has not run with this package"
            mend = f"export {NEW_CLASS}=0 for training on GPUs, or pip install '{WANTED_TORCH}': {why}"
    yield Finding("PyTorch", found, mend, required=version < OLDEST_TORCH)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding("devices", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))
    elif has_unusable_gpu():
        mend = "install a CUDA build of PyTorch that this driver supports, or set CUDA_VISIBLE_DEVICES= for the CPU"
        yield Finding("devices", "a GPU is here, and PyTorch cannot use it", mend)
    else:
        yield Finding("devices", f"no CUDA device: Megatron-Core runs on the CPU ({os.cpu_count()} cores) over Gloo")
    known = ("nccl", "gloo", "mpi", "ucc")
    backends = [name for name in known if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    mend = "" if wanted in backends else f"install a build of PyTorch with {wanted}"
    yield Finding("process groups", ", ".join(backends) or "none", mend)


def _extension() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return  # said above: there is nothing to build it for yet

    try:
        from megatron_moe_opt.extension import build_info

        built = build_info()
    except ImportError as error:  # one sentence: the problem, a colon, the cure
        found, _, mend = _first_line(error).rpartition(": ")
        yield Finding("extension", found, mend)
        return
    found = ", ".join(f"{name} {value}" for name, value in built.items() if value != "")
    has_gpu, has_kernels = torch.cuda.is_available(), built["backend"] == "cuda"
    mend = "MOE_OPT_CUDA=ON pip install --no-build-isolation -e . in the checkout, with nvcc on PATH"
    lacking = _without_kernels(str(built["cuda_archs"])) if has_gpu and has_kernels else []
    if lacking:
        archs = ";".join(map(str, lacking))
        found += f" (no kernels for GPUs that are here: sm_{archs})"
        yield Finding("extension", found, f"MOE_OPT_CUDA_ARCHS='{archs}' {mend}")
    elif has_kernels or not (has_gpu or torch.version.cuda):
        yield Finding("extension", found)
    else:
        mend = mend if has_gpu else f"for GPUs: {mend}"
        yield Finding("extension", f"{found} (no CUDA kernels)", mend, required=has_gpu)


def _without_kernels(archs: str) -> list[int]:
    """Returns the architectures of this node's GPUs that can run nothing of what was compiled for these: machine code
    runs on GPUs of its own major version, from its minor version on; PTX, which the last one has, on all that follow.
    """
    import torch

    compiled = [int(arch.rstrip("af")) for arch in archs.split(",")]
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return [
        here
        for here in sorted({10 * major + minor for major, minor in capabilities})
        if here < compiled[-1] and not any(arch // 10 == here // 10 and arch <= here for arch in compiled)
    ]


def _megatron() -> Iterator[Finding]:
    wanted = f"pip install 'megatron-core>={_dotted(OLDEST_MEGATRON)},<0.{NEWEST_MEGATRON[1] + 1}'"
    version = megatron_version()
    if version is None:
        yield Finding("megatron-core", "not installed", f"{wanted}, or put a checkout of Megatron-LM on PYTHONPATH")
    elif not supports_megatron(version):
        yield Finding("megatron-core", f"{version} (not supported: {SUPPORTED_MEGATRON} are)", wanted)
    elif cure := cure_of_old_python(version):
        yield Finding("megatron-core", f"{version} (not on this Python)", cure)
    else:
        yield Finding("megatron-core", f"{version} (supported)")


def _optional_libraries() -> Iterator[Finding]:
    for subject, module, use in (
        # The package alone can be imported even where its part for PyTorch, which Megatron then asks for, cannot.
        ("Transformer Engine", "transformer_engine.pytorch", "layers of pretrain_gpt.py by default and of the recipes"),
        ("Apex", "apex", "--gradient-accumulation-fusion, which Megatron-LM has on by default"),
    ):
        package = module.partition(".")[0]
        if find_spec(package) is None:
            yield Finding(subject, f"not installed; not needed by this package (on GPUs: {use})")
            continue
        version = _version_of(package.replace("_", "-"))
        problem = import_problem(module)
        if problem is None:
            yield Finding(subject, version)
            continue
        found = f"{version}, and cannot be imported: {problem}"
        if "libcuda.so" in problem and not A_GPU.exists():  # as on a login node: it comes with a GPU's driver
            yield Finding(subject, found, "ask on a node with a GPU; to train on a CPU remove it", required=False)
        else:  # with which Megatron does not begin either
            yield Finding(subject, found, "install it anew for this PyTorch, or remove it")


def import_problem(module: str) -> str | None:
    """Returns the last line of what importing a module ends with, in a process of its own; None: it can be imported."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; import {module}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else None


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "installed, version unknown"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
