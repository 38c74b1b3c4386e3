"""What netmoe's moves saved, as lines and TensorBoard values, at the log interval of a training loop."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch.distributed as dist

from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher

Report = dict[int, dict[str, float]]
"""By layer number, what SampleTraffic.take returns."""

_layers: weakref.WeakKeyDictionary[NetmoeDispatcher, int] = weakref.WeakKeyDictionary()
"""The numbers of the MoE layers that move samples."""


def watch(dispatcher: NetmoeDispatcher, layer_number: int) -> None:
    """Reports this layer from now on."""
    _layers[dispatcher] = layer_number


def collect() -> Report:
    """What the training passes since the last call sent, in this rank's EP groups and those of its pipeline.

    A collective call over pipeline groups. Empty where no layer moves samples.
    """
    from megatron.core import parallel_state

    own = {number: means for dispatcher, number in _layers.items() if (means := dispatcher.take_traffic())}
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Report] = [{}] * pipeline.size()
    dist.all_gather_object(stages, own, group=pipeline)
    return dict(sorted(layer for stage in stages for layer in stage.items()))


def lines(report: Report) -> list[str]:
    """One for each layer."""
    return [_line(number, values) for number, values in report.items()]


def add_scalars(report: Report, writer: Any, iteration: int) -> None:
    """Writes a report to TensorBoard."""
    for number, values in report.items():
        for name, value in values.items():
            writer.add_scalar(f"netmoe/{name}/layer {number}", value, iteration)


def _line(number: int, values: dict[str, float]) -> str:
    def change(link: str) -> str:
        before, after = values[f"stock {link} MB"], values[f"{link} MB"]
        percent = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
        return f"{link} {before:.3f} -> {after:.3f} MB{percent}"

    return (
        f"netmoe: layer {number}: {change('inter-node')}, {change('intra-node')} a forward pass; moved "
        f"{values['moved across nodes %']:.1f} % of the samples across nodes, {values['moved across devices %']:.1f} % "
        f"across devices; solved in {values['solve ms']:.3f} ms, waited for {values['exposed ms']:.3f} ms of it"
    )


def report_with_training_log() -> None:
    """Lets Megatron-LM's training loop report after each line of its log; nothing where it is not in use.

    To be called when training is under way: its module is imported after us.
    """
    training = sys.modules.get("megatron.training.training")
    stock = getattr(training, "training_log", None)
    if stock is None or hasattr(stock, "_moe_opt"):
        return

    @functools.wraps(stock)
    def training_log(loss_dict: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = stock(loss_dict, total, rate, iteration, *args, **kwargs)
        if iteration % training.get_args().log_interval == 0:
            report, writer = collect(), training.get_tensorboard_writer()
            if dist.get_rank() == dist.get_world_size() - 1:  # which prints Megatron's own lines
                for line in lines(report):
                    print(f"moe-opt: {line}", flush=True)
            if writer is not None:
                add_scalars(report, writer, iteration)
        return result

    training_log._moe_opt = True
    training.training_log = training_log
