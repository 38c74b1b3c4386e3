"""Replacing or wrapping a function of an upstream module, with a refusal where upstream has moved it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.versions import SUPPORTED_MEGATRON


def seam_moved(what: str) -> ConfigurationError:
    """Returns the refusal to run under this Megatron, where a place that we plug into is not where it was."""
    return ConfigurationError(
        f"cannot plug into this megatron-core: {what}; install a release from {SUPPORTED_MEGATRON}, or use "
        "--moe-token-dispatcher-type alltoall"
    )


def wrap_once(owner: object, name: str, around: Callable[..., Any]) -> None:
    """Has whoever calls `owner.name` call `around(original, ...)`, unless that was done before."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._moe_opt = True
    setattr(owner, name, wrapped)


def is_wrapped(function: object) -> bool:
    """Whether a function is one that `wrap_once` has put in the place of another."""
    return hasattr(function, "_moe_opt")


def replace(owner: object, name: str, adapt: Callable[[Any], Any]) -> None:
    """Sets `owner.name` to `adapt(original)`, keeping the original's name and documentation.

    Modules of Megatron that were imported earlier and hold the original under any name of their own get the
    replacement too, so it does not matter whether Megatron was imported before.

    Raises:
        ConfigurationError: `owner` has no such name.
    """
    if not hasattr(owner, name):
        raise ConfigurationError(
            f"megatron-moe-opt adapts {getattr(owner, '__name__', repr(owner))}.{name}, which this version does not "
            f"have: use megatron-core {SUPPORTED_MEGATRON} and torch 2.6 or later"
        )
    original = getattr(owner, name)
    adapted = adapt(original)
    if not isinstance(adapted, type):
        functools.update_wrapper(adapted, original)
    setattr(owner, name, adapted)
    if not isinstance(owner, ModuleType):
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and module is not owner:
            for alias, value in list(vars(module).items()):
                if value is original:
                    setattr(module, alias, adapted)


def when_imported(module_name: str, adapt: Callable[[ModuleType], None]) -> None:
    """Calls `adapt(module)` once the module is imported: now, if it already is.

    For modules that are adapted only if a script uses them, and that we do not import ourselves.
    """

    @contextmanager
    def then_adapt(module: ModuleType) -> Iterator[None]:
        yield
        adapt(module)

    if module_name in sys.modules:
        adapt(sys.modules[module_name])
    else:
        around_import(module_name, then_adapt)


def around_import(module_name: str, surroundings: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
    """Runs the code of a module that is not imported yet inside the context `surroundings(module)`."""
    sys.meta_path.insert(0, _AroundImport(module_name, surroundings))


class _AroundImport(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders and lets its code run inside a context."""

    def __init__(self, module_name: str, surroundings: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
        self.module_name = module_name
        self.surroundings = surroundings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module_name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_inside(module: ModuleType) -> None:
                with self.surroundings(module):
                    execute(module)

            spec.loader.exec_module = execute_inside
        return spec
