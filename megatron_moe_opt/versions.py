"""The Megatron-Core versions we plug into, and the one that is here. Imports neither Megatron nor the extension."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

OLDEST_MEGATRON, NEWEST_MEGATRON = (0, 16), (0, 19)
SUPPORTED_MEGATRON = f"0.{OLDEST_MEGATRON[1]} to 0.{NEWEST_MEGATRON[1]}"


def megatron_version() -> str | None:
    """Version of the megatron.core that `import megatron.core` would take; None where there is none.

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
    return OLDEST_MEGATRON <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST_MEGATRON
