"""A small GPT trained on the pool of ranks, and the log of a training loop."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from megatron_moe_opt.options import Options


def losses(
    dispatcher: str, layout: dict[str, int], options: Options | None = None, steps: int = 3, **settings: Any
) -> list[float]:
    """Returns the losses of a few optimizer steps; `settings` go to `tests.ranks.gpt.gpt`."""
    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    megatron_moe_opt.register(options)
    try:
        with parallel(**layout):
            return gpt(moe_token_dispatcher_type=dispatcher, **settings).train(steps)
    finally:
        megatron_moe_opt.register()


@contextmanager
def training_log(
    to_wandb: list[dict[str, float]] | None = None,
) -> Iterator[tuple[Callable[[int], None], list[tuple[str, float, int]], io.StringIO]]:
    """A stand-in for the log of Megatron-LM's training loop, at every second iteration, which our reports follow.

    Args:
        to_wandb: grows by what W&B is given; None: there is no W&B.

    Yields:
        What logs an iteration; what TensorBoard was given; what was printed.
    """
    from megatron_moe_opt.integration.observe import reports

    scalars, output = [], io.StringIO()
    writer = SimpleNamespace(add_scalar=lambda name, value, iteration: scalars.append((name, value, iteration)))
    wandb = None if to_wandb is None else SimpleNamespace(log=lambda values, iteration: to_wandb.append(values))
    loop = ModuleType("megatron.training.training")
    loop.training_log = lambda loss_dict, total, rate, iteration, scale: "stock's answer"
    loop.get_args = lambda: SimpleNamespace(log_interval=2)
    loop.get_tensorboard_writer, loop.get_wandb_writer = lambda: writer, lambda: wandb

    def log(iteration: int) -> None:
        assert loop.training_log({}, {}, 1e-3, iteration, scale=1.0) == "stock's answer"

    with mock.patch.dict(sys.modules, {loop.__name__: loop}), redirect_stdout(output):
        reports.report_with_training_log()
        yield log, scalars, output
