"""Wrappers that take weights out of their modules between uses.

Where no arguments of Megatron-LM's loop tell of them, as in Megatron-Bridge or in a script of one's own, the first that
is known of one is that a model is given to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from megatron_moe_opt.integration.patching import when_imported, wrap_once

WRAPPERS = {
    "use_megatron_fsdp": (
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
        ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2", "FullyShardedDataParallel"),
    ),
    "use_torch_fsdp2": (
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        ("TorchFullyShardedDataParallel",),
    ),
}
"""The flag of Megatron-LM's for each, its module, and the names of its classes in one version or another."""


def shards_weights(config: Any, arguments: Any) -> str | None:
    """Returns the flag of the wrapper of a model; None: no such wrapper is known of."""
    return next(
        (
            f"--{flag.replace('_', '-')}"
            for flag in WRAPPERS
            if getattr(arguments, flag, False) or getattr(config, "_moe_opt_sharded_by", None) == flag
        ),
        None,
    )


def note_wrappers(check: Callable[[Any], None]) -> None:
    """Notes in the configurations of a model which wrapper it is given to, and has `check` look at those before the
    wrapper begins.
    """
    for flag, (module_name, class_names) in WRAPPERS.items():
        when_imported(module_name, functools.partial(_wrap_all, flag=flag, class_names=class_names, check=check))


def _wrap_all(module: ModuleType, flag: str, class_names: Sequence[str], check: Callable[[Any], None]) -> None:
    for name in class_names:
        if isinstance(wrapper := getattr(module, name, None), type):  # from 0.20 on a function makes one of two
            _wrap(wrapper, flag, check)


def _wrap(wrapper: type, flag: str, check: Callable[[Any], None]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    def init(stock_init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        models = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.nn.Module)]
        configs = [getattr(module, "config", None) for model in models for module in model.modules()]
        for config in {id(one): one for one in configs if isinstance(one, TransformerConfig)}.values():
            config._moe_opt_sharded_by = flag  # on ranks without a MoE layer too: one of them may plan for all
            check(config)
        stock_init(self, *args, **kwargs)

    wrap_once(wrapper, "__init__", init)
