"""Loads the compiled extension and refuses one that does not belong to this package or this PyTorch."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import ModuleType

import torch

from megatron_moe_opt import __version__
from megatron_moe_opt.errors import ExtensionError

# Number of the interface between this package and csrc/bindings. Raise it with every change of a bound function;
# CMakeLists.txt compiles it into the extension.
ABI = 18

HOW_TO_BUILD = (
    "build it with `pip install --no-build-isolation -e .` in the megatron-moe-opt checkout, for GPUs with "
    "MOE_OPT_CUDA=ON before it"
)


def load_extension() -> ModuleType:
    """Imports `megatron_moe_opt._C`, and says in one sentence what to do where that fails.

    Raises:
        ExtensionError: one sentence with the cure: the extension is missing, does not load, was built from another
            version of the package, or for another version of PyTorch.
    """
    try:
        extension = importlib.import_module("megatron_moe_opt._C")
    except ModuleNotFoundError as error:
        raise ExtensionError(f"The compiled extension of megatron-moe-opt is missing{_shadowed()}.") from error
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise ExtensionError(
            f"The compiled extension of megatron-moe-opt does not load with PyTorch {torch.__version__} ({reason}): "
            f"re{HOW_TO_BUILD}."
        ) from error
    info = extension.build_info()
    if info["torch"] != torch.__version__:
        raise ExtensionError(
            f"The compiled extension of megatron-moe-opt was built for PyTorch {info['torch']}, but PyTorch "
            f"{torch.__version__} is running: re{HOW_TO_BUILD}."
        )
    if (info["version"], info["abi"]) != (__version__, ABI):
        raise ExtensionError(
            f"The compiled extension of megatron-moe-opt is stale (built from version {info['version']}, interface "
            f"{info['abi']}; the package is version {__version__}, interface {ABI}): re{HOW_TO_BUILD}."
        )
    return extension


def _shadowed() -> str:
    """Returns how to come by an extension: that of an installed package, which this checkout hides, or a new one."""
    here = Path(__file__).resolve().parent
    # More than one: what an installation leaves in the checkout (*.egg-info) says that it is installed there.
    for found in importlib.metadata.distributions(name="megatron-moe-opt"):
        installed = Path(str(found.locate_file(here.name))).resolve()
        if installed != here and any(installed.glob("_C.*")):
            cure = f"leave {here.parent}, or {HOW_TO_BUILD}"
            return f" from {here}, which hides the package installed in {installed}: {cure}"
    return f": {HOW_TO_BUILD}"


def build_info() -> dict[str, str | int]:
    """Returns what the extension was built with.

    Returns:
        `version` and `abi` of the package it was built from, `torch` version, `compiler`, `backend` ("cpu" or "cuda"),
        `cuda_archs` ("80,90,100" or empty), and `cpu_kernels`, the instruction set in use on this processor.

    Raises:
        ExtensionError: as `load_extension`.
    """
    return load_extension().build_info()
