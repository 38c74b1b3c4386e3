"""Megatron-LM's command line, which says more than a TransformerConfig."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_moe_opt.integration.patching import replace, seam_moved, when_imported


def training_arguments() -> Any:
    """Returns the arguments that Megatron-LM's training loop has parsed; None where a script
    does not use it, or not yet.
    """
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def checkpoint_folder() -> Path | None:
    """Returns the folder of --save, else of --load. None: there is no such local folder."""
    arguments = training_arguments()
    if arguments is None:  # another loop than Megatron-LM's
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for flag in ("--save", "--load"):
            parser.add_argument(flag, nargs="?")  # may be another loop's switch
        arguments, _ = parser.parse_known_args(sys.argv[1:])
    folder = getattr(arguments, "save", None) or getattr(arguments, "load", None)
    return Path(folder) if folder and "://" not in str(folder) else None


def name_in_checkpoints(name: str, is_ours: Callable[[str], bool]) -> None:
    """Has the arguments in checkpoints of Megatron-LM's training loop say `name` in the place of a dispatcher of ours:
    others make a model by them, in processes that may lack us.
    """

    def named(stock: Callable[..., Any]) -> Callable[..., Any]:
        def generate_state_dict(*args: Any, **kwargs: Any) -> Any:
            found = stock(*args, **kwargs)
            arguments = found.get("args")
            if is_ours(getattr(arguments, "moe_token_dispatcher_type", None)):
                found["args"] = copy.copy(arguments)
                found["args"].moe_token_dispatcher_type = name
            return found

        return generate_state_dict

    def follow(module: ModuleType) -> None:
        if hasattr(module, "generate_state_dict"):
            replace(module, "generate_state_dict", named)

    when_imported("megatron.training.checkpointing", follow)


def before_validation(check: Callable[[Any], None]) -> None:
    """Has `check` see the parsed arguments before Megatron-LM's own checks, where a script uses its training loop."""

    def checked(stock: Callable[..., Any]) -> Callable[..., Any]:
        def validate_args(arguments: Any, *defaults: Any, **named: Any) -> Any:
            check(arguments)
            return stock(arguments, *defaults, **named)

        return validate_args

    def follow(module: ModuleType) -> None:
        if not hasattr(module, "validate_args"):
            raise seam_moved("megatron.training.arguments has no validate_args")
        replace(module, "validate_args", checked)  # megatron.training.initialize may hold it already

    when_imported("megatron.training.arguments", follow)
