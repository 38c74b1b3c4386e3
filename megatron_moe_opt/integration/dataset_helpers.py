"""The compilation of Megatron's helpers for data sets, where its checkout has none that are compiled."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable

from megatron_moe_opt.integration.patching import replace


def compile_helpers_with_this_python() -> None:
    """Has Megatron compile them for the Python that runs, where they are missing."""
    replace(importlib.import_module("megatron.core.datasets.utils"), "compile_helpers", _compile_for_this_python)


def _compile_for_this_python(original: Callable[[], None]) -> Callable[[], None]:
    """Adapts the compilation of dataset helpers, whose Makefile asks `python3` and `python3-config` from PATH.

    A virtual environment has no python3-config and PATH may lead to another Python: the suffix is given and this
    Python goes first. Helpers that are there already (the wheel has them) are not compiled.
    """

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        present = {name: os.environ.get(name) for name in ("MAKEFLAGS", "PATH")}
        os.environ["MAKEFLAGS"] = f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
        os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), present["PATH"] or os.defpath))
        try:
            original()
        finally:
            for name, value in present.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    return compile_helpers
