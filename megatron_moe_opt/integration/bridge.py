"""The seams of Megatron-Bridge, whose training loop and configurations are its own, beside those of Megatron-Core."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_moe_opt.integration.checks import BRIDGES_RESTART, check_flags
from megatron_moe_opt.integration.observe.reports import report
from megatron_moe_opt.integration.patching import replace, when_imported

_TRAINING = "megatron.bridge.training"
_OF_CHECKPOINT = "run_config.yaml"
"""The file of a checkpoint from which Bridge makes the model again, to export it, in processes that may lack us."""


def plug_into_bridge(reading_as_alltoall: Callable[[Any], AbstractContextManager[str]]) -> None:
    """Has Bridge's own checks of a dispatcher's name take ours for `alltoall`, what its checkpoints say of the run name
    that, its log end with our reports, and a start anew in the same processes be refused, where a script uses Bridge.

    Args:
        reading_as_alltoall: a context in which a configuration reads so.
    """

    def as_alltoall(argument: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns what wraps a function that takes the model's configuration as this argument."""

        def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(stock)

            def called(*args: Any, **kwargs: Any) -> Any:
                with reading_as_alltoall(signature.bind(*args, **kwargs).arguments.get(argument)):
                    return stock(*args, **kwargs)

            return called

        return wrap

    def named_in_checkpoints(stock: Callable[..., None]) -> Callable[..., None]:
        """Returns what writes a run's configuration: with `alltoall` in the place of ours, if it is a checkpoint's."""

        def to_yaml(self: Any, yaml_path: Any = None) -> None:
            is_of_checkpoint = yaml_path is not None and Path(yaml_path).name == _OF_CHECKPOINT
            with reading_as_alltoall(self.model) if is_of_checkpoint else nullcontext():
                stock(self, yaml_path)

        return to_yaml

    for module, owner, name, wrap in (
        ("comm_overlap", "CommOverlapConfig", "setup", as_alltoall("model_config")),
        ("utils.moe_token_drop", None, "apply_moe_token_drop", as_alltoall("model_provider")),
        ("config", "ConfigContainer", "to_yaml", named_in_checkpoints),
        ("utils.train_utils", None, "training_log", _reporting),
        ("inprocess_restart", None, "maybe_wrap_for_inprocess_restart", _refusing),
    ):
        when_imported(f"{_TRAINING}.{module}", functools.partial(_replace, owner=owner, name=name, wrap=wrap))


def _replace(module: ModuleType, owner: str | None, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wraps a function of a module, or of a class in it, as far as this version of Bridge has it."""
    holder = module if owner is None else getattr(module, owner, None)
    if hasattr(holder, name):
        replace(holder, name, wrap)


def _refusing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what wraps a training function so that it begins anew in the same processes, but not under ours."""

    def maybe_wrap_for_inprocess_restart(train: Any, config: Any, state: Any) -> Any:
        if config.enabled:
            check_flags(getattr(state.cfg.model, "moe_token_dispatcher_type", None), [BRIDGES_RESTART])
        return stock(train, config, state)

    return maybe_wrap_for_inprocess_restart


def _reporting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what logs a step, and then what we have to report of it."""
    signature = inspect.signature(stock)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        result, given = stock(*args, **kwargs), signature.bind(*args, **kwargs).arguments
        state, iteration = given["global_state"], given["global_state"].train_state.step
        if iteration % given["config"].logger.log_interval == 0:
            report(iteration, state.tensorboard_logger, state.wandb_logger)
        return result

    return training_log
