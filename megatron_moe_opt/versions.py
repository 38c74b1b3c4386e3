"""The Megatron-Core versions we plug into, and the one that is here. Imports neither Megatron nor the extension."""

from __future__ import annotations

import functools
import importlib.util
import platform
import runpy
from pathlib import Path

from megatron_moe_opt import __version__
from megatron_moe_opt.errors import ConfigurationError

OLDEST_MEGATRON, NEWEST_MEGATRON = (0, 16), (0, 20)
SUPPORTED_MEGATRON = f"0.{OLDEST_MEGATRON[1]} to 0.{NEWEST_MEGATRON[1]}"
_WITH_NEW_PYTHON, _NEW_PYTHON = (0, 18), (3, 12)
"""The first Megatron whose training imports what this Python has first (typing.override). pip, which already refuses
the one before, is not asked for a checkout on PYTHONPATH.
"""


def megatron_version() -> str | None:
    """Returns the version of the megatron.core that `import megatron.core` would take; None where there is none.

    Read from its package_info.py: the metadata of an installed wheel would be wrong where a Megatron-LM checkout on
    PYTHONPATH comes before it.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).parent / "package_info.py"))["__version__"]


def supports_megatron(version: str) -> bool:
    """Whether a version string such as "0.16.1" is in the supported range."""
    return OLDEST_MEGATRON <= _major_minor(version) <= NEWEST_MEGATRON


def cure_of_old_python(version: str) -> str | None:
    """Returns what to do where this Python is too old for a megatron-core; None where it is not."""
    this = tuple(map(int, platform.python_version_tuple()[:2]))
    if _major_minor(version) < _WITH_NEW_PYTHON or this >= _NEW_PYTHON:
        return None
    python, megatron = (".".join(map(str, one)) for one in (_NEW_PYTHON, _WITH_NEW_PYTHON))
    return f"use Python {python} or newer, or a megatron-core before {megatron}"


def check_megatron() -> None:
    """Refuses, with ConfigurationError, a megatron-core that we do not plug into, that needs a newer Python, or that is
    not there.
    """
    version = megatron_version()
    if version is None:
        raise ConfigurationError(
            f"megatron-core is not installed: install megatron-core {SUPPORTED_MEGATRON}, or put a checkout of "
            "Megatron-LM on PYTHONPATH"
        )
    if not supports_megatron(version):
        raise ConfigurationError(f"megatron-core {version} is not supported: install one from {SUPPORTED_MEGATRON}")
    if cure := cure_of_old_python(version):
        raise ConfigurationError(f"megatron-core {version} does not run on Python {platform.python_version()}: {cure}")


@functools.cache
def megatron_is_before(major: int, minor: int) -> bool:
    """Whether the megatron.core that is here is older than a version; not where there is none."""
    version = megatron_version()
    return version is not None and _major_minor(version) < (major, minor)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@functools.cache
def software() -> dict[str, str]:
    """Returns the versions that a report or a profile says it was made with."""
    import torch

    return {
        "megatron-moe-opt": __version__,
        "megatron-core": megatron_version() or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
