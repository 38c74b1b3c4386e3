"""Megatron-LM's command line, which says more than a TransformerConfig."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_moe_opt.integration.host.patching import when_imported
from megatron_moe_opt.integration.seams import seam_moved


def training_arguments() -> Any:
    """The arguments that Megatron-LM's training loop has parsed; None where a script does not use it, or not yet."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def before_validation(check: Callable[[Any], None]) -> None:
    """Has `check` see the parsed arguments before Megatron-LM's own checks, where a script uses its training loop."""

    def follow(module: ModuleType) -> None:
        stock = getattr(module, "validate_args", None)
        if stock is None:
            raise seam_moved("megatron.training.arguments has no validate_args")

        @functools.wraps(stock)
        def validate_args(arguments: Any, *defaults: Any, **named: Any) -> Any:
            check(arguments)
            return stock(arguments, *defaults, **named)

        module.validate_args = validate_args

    when_imported("megatron.training.arguments", follow)
