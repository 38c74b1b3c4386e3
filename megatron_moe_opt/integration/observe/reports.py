"""What the package has to say at the logging interval of a training loop: one place for all reports.

A report is a number by layer and name. Each module of SOURCES has `take()` (what there is of this rank's layers since
the last time, a collective call over their groups), `lines(values)` and `PREFIX`, the first part of its names in
TensorBoard and W&B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch.distributed as dist

from megatron_moe_opt.integration.observe import netmoe_report, telemetry_report
from megatron_moe_opt.integration.patching import when_imported, wrap_once
from megatron_moe_opt.topology.agreement import known_to_all

Reports = dict[str, telemetry_report.Values]
"""Reports by the name of their source, without sources that have nothing to say."""

SOURCES = {"netmoe": netmoe_report, "telemetry": telemetry_report}


def collect() -> Reports:
    """Returns what there is to report of all layers of the model since the last time. A collective call over all ranks.

    Of the ranks that share a layer this is what they agree on; of data-parallel replicas, each has its own.
    """
    from megatron.core import parallel_state

    own = {name: source.take() for name, source in SOURCES.items()}
    pipeline = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)  # None: groups of others' own
    # A stage without such layers takes part: it does not know of the others'.
    stages = known_to_all(own, pipeline) if pipeline is not None and pipeline.size() > 1 else [own]
    of_layers = {name: [layer for stage in stages for layer in stage[name].items()] for name in SOURCES}
    reports = {name: dict(sorted(found, key=itemgetter(0))) for name, found in of_layers.items()}
    return {name: values for name, values in reports.items() if values}


def lines(reports: Reports) -> list[str]:
    """Returns all reports as lines of the training log."""
    return [line for name, values in reports.items() for line in SOURCES[name].lines(values)]


def scalars(reports: Reports) -> Iterator[tuple[str, float]]:
    """Yields names and values for TensorBoard and W&B."""
    for source, values in reports.items():
        for number, by_name in values.items():
            for name, value in by_name.items():
                yield f"{SOURCES[source].PREFIX}/{name}/layer {number}", value


def add_scalars(reports: Reports, writer: Any, iteration: int) -> None:
    """Writes the `scalars` of reports to a TensorBoard writer, at an iteration."""
    for name, value in scalars(reports):
        writer.add_scalar(name, value, iteration)


def report_with_training_log() -> None:
    """Lets Megatron-LM's training loop, where a script uses it, report after each line of its log."""
    when_imported("megatron.training.training", _follow)


def _follow(training: ModuleType) -> None:
    def reporting(
        stock: Callable[..., Any], loss_dict: Any, total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = stock(loss_dict, total, rate, iteration, *args, **kwargs)
        if iteration % training.get_args().log_interval == 0:
            report(iteration, training.get_tensorboard_writer(), training.get_wandb_writer())
        return result

    if hasattr(training, "training_log"):
        wrap_once(training, "training_log", reporting)


def report(iteration: int, writer: Any, wandb: Any) -> None:
    """Collects the reports; called on all ranks. Ranks that have a writer write, and the last rank, which prints
    Megatron's own lines, prints.

    Args:
        writer: of TensorBoard; None: this rank has none.
        wandb: of W&B; None: likewise.
    """
    reports = collect()
    if dist.get_rank() == dist.get_world_size() - 1:
        for line in lines(reports):
            print(f"moe-opt: {line}", flush=True)
    if writer is not None:
        add_scalars(reports, writer, iteration)
    if wandb and reports:
        wandb.log(dict(scalars(reports)), iteration)
