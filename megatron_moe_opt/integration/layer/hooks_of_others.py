"""Hooks that others have put on modules: whoever reads there what passes through a layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FRAMEWORKS = frozenset({"megatron", "megatron_moe_opt", "torch", "transformer_engine"})
"""The packages whose hooks gather parameters, reduce gradients and the like, whatever samples pass."""


class HookOfOthers(NamedTuple):
    """A hook on a module, or on one inside of it."""

    module: str
    function: str
    """The hook's name, with that of the Python module that it is from."""

    @property
    def distills(self) -> bool:
        """Whether ModelOpt takes what it sees here for a loss, as Megatron-Bridge's knowledge distillation has it."""
        return self.function.startswith("modelopt.torch.distill")

    def __str__(self) -> str:
        return f"a hook on {self.module} ({self.function})"


def hooks_of_others(inside: nn.Module, called: str, kinds: Sequence[str] = _KINDS) -> list[HookOfOthers]:
    """Returns the hooks on a module, and on those inside of it, that are neither PyTorch's, Megatron's, Transformer
    Engine's nor ours.

    Args:
        called: what the module is called.
        kinds: of hooks, as torch.nn.Module names them.
    """
    found = []
    for name, module in inside.named_modules(prefix=called):
        for kind in kinds:
            for hook in getattr(module, kind).values():
                function = _function(hook)
                if function.partition(".")[0] not in _FRAMEWORKS:
                    found.append(HookOfOthers(name, function))
    return found


def _function(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
