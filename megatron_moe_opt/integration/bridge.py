"""The seams of Megatron-Bridge, whose training loop and configurations are its own, beside those of Megatron-Core."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_moe_opt.integration.checks import check_processes
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

    def drops(stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply_moe_token_drop(config: Any, *args: Any, **kwargs: Any) -> Any:
            with reading_as_alltoall(config):
                return stock(config, *args, **kwargs)

        return apply_moe_token_drop

    def overlaps(stock: Callable[..., Any]) -> Callable[..., Any]:
        def setup(self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            with reading_as_alltoall(config):
                return stock(self, config, *args, **kwargs)

        return setup

    def names(stock: Callable[..., Any]) -> Callable[..., Any]:
        def to_yaml(self: Any, yaml_path: Any = None) -> None:
            is_of_checkpoint = yaml_path is not None and Path(yaml_path).name == _OF_CHECKPOINT
            with reading_as_alltoall(self.model) if is_of_checkpoint else nullcontext():
                stock(self, yaml_path)

        return to_yaml

    for module, adapt in (
        ("config", lambda it: replace(it.ConfigContainer, "to_yaml", names)),
        ("comm_overlap", lambda it: replace(it.CommOverlapConfig, "setup", overlaps)),
        ("utils.moe_token_drop", lambda it: replace(it, "apply_moe_token_drop", drops)),
        ("utils.train_utils", _follow_log),
        ("inprocess_restart", lambda it: replace(it, "maybe_wrap_for_inprocess_restart", _refused)),
    ):
        when_imported(f"{_TRAINING}.{module}", adapt)


def _refused(stock: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_wrap_for_inprocess_restart(train: Any, config: Any, state: Any) -> Any:
        if config.enabled:
            check_processes(state.cfg.model.moe_token_dispatcher_type, ["--inprocess-restart"])
        return stock(train, config, state)

    return maybe_wrap_for_inprocess_restart


def _follow_log(module: ModuleType) -> None:
    signature = inspect.signature(module.training_log)

    def reporting(stock: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result, given = stock(*args, **kwargs), signature.bind(*args, **kwargs).arguments
            state, iteration = given["global_state"], given["global_state"].train_state.step
            if iteration % given["config"].logger.log_interval == 0:
                report(iteration, state.tensorboard_logger, state.wandb_logger)
            return result

        return training_log

    replace(module, "training_log", reporting)
