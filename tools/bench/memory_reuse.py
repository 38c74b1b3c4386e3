"""What a layer holds on the device with and without MPMoE's memory reuse, beside what its eq. 6 says is saved.

torchrun --nproc-per-node 2 -m tools.bench.memory_reuse --tokens 4096
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from megatron_moe_opt.cli.console import report_console, table_of
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType, whole_numbers
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES
from tools.bench.live_memory import device_memory
from tools.papers.formulas.mpmoe import LayerElements

if TYPE_CHECKING:
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest

STATES = 4
"""The tensors that training keeps of a parameter: itself, its gradient and Adam's two moments (MPMoE, eq. 1)."""


@dataclass(frozen=True)
class Shape:
    """A layer of MPMoE's Table III: one expert of two matrices a rank."""

    hidden: int
    ffn_hidden: int


SHAPES = {
    "MoE-GPT-S": Shape(768, 3072),
    "MoE-BERT-L": Shape(1024, 4096),
    "MoE-GPT-XL": Shape(2048, 8192),
}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one step, on the rank that has most, above parameters, gradients, input and its gradient."""

    held: int
    """Bytes on the device between forward and backward."""
    peak: int
    """Bytes on the device at the highest point."""
    host: int
    """Bytes on the host at the highest point."""


@dataclass(frozen=True)
class MemoryRow:
    """One shape, number of partitions and strategy."""

    shape: str
    tokens: int
    partitions: int
    strategy: str
    model_states: int
    """Bytes of parameters, gradients and Adam's moments."""
    without: MemoryUse
    """The memory of the same partitions without reuse."""
    use: MemoryUse
    predicted: float
    """phi of eq. 6."""

    @property
    def saved(self) -> float:
        """Returns the part saved of all that the layer takes on the device without reuse, model states included."""
        return (self.without.peak - self.use.peak) / (self.model_states + self.without.peak)


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def memory(
    shapes: Annotated[
        str, typer.Option(help="Layers of MPMoE's Table III, separated by commas.")
    ] = "MoE-GPT-S,MoE-BERT-L,MoE-GPT-XL",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 4096,
    partitions: Annotated[str, typer.Option(help="Numbers of partitions, separated by commas.")] = "2,4,8",
    strategies: Annotated[str, typer.Option(help="Of memory reuse, separated by commas.")] = "S1,S2,S3,S4",
    dtype: Annotated[DType, typer.Option(help="Tokens and weights.")] = DType.fp32,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the rows to this file too.")] = None,
) -> None:
    """Peak memory of mpmoe's layer with each strategy of memory reuse, against the same partitions without."""
    names, chosen = ([name.strip() for name in text.split(",")] for text in (shapes, strategies))
    bench_memory(names, tokens, whole_numbers("--partitions", partitions), chosen, dtype.value, output)


def bench_memory(
    shapes: Sequence[str],
    tokens: int,
    partitions: Sequence[int],
    strategies: Sequence[str],
    dtype: str,
    output: Path | None,
) -> list[MemoryRow]:
    """Measures on the current ranks, an expert each; rank 0 prints the table and writes `output`.

    Raises:
        ConfigurationError: a shape or strategy that is not known.
    """
    begin()
    check_output_file("--output", output)
    for option, names, known in (("--shapes", shapes, SHAPES), ("--strategies", strategies, STRATEGIES)):
        for name in names:
            if name not in known or name == NONE:
                raise ConfigurationError(
                    f"{option} {name} is unknown: choose from {', '.join(name for name in known if name != NONE)}"
                )
    with megatron_process_group() as device:
        rows = list(_measure_all(shapes, tokens, partitions, strategies, dtype, device))
        if dist.get_rank() == 0:
            console = report_console(160)
            console.print(_table(rows, dtype, device))
            if output is not None:
                content = [asdict(row) | {"saved": row.saved} for row in rows]
                write_text_whole(output, json.dumps(content, indent=2) + "\n")
    return rows


def _measure_all(
    shapes: Sequence[str],
    tokens: int,
    partitions: Sequence[int],
    strategies: Sequence[str],
    dtype: str,
    device: torch.device,
) -> Iterator[MemoryRow]:
    world = dist.get_world_size()
    with parallel_layer(1, world, 1, seed=1):
        for name in shapes:
            shape = SHAPES[name]
            predicted = LayerElements(tokens, shape.hidden, shape.ffn_hidden, world)
            for count in partitions:
                use: dict[str, MemoryUse] = {}
                for strategy in (NONE, *strategies):
                    settings = _settings(shape, tokens, world, dtype, f"mpmoe:{count}:{strategy}")
                    use[strategy], parameters = measure(settings, device)
                for strategy in strategies:
                    yield MemoryRow(
                        name, tokens, count, strategy, STATES * parameters, use[NONE], use[strategy],
                        predicted.saving_ratio(count),
                    )  # fmt: skip


def _settings(shape: Shape, tokens: int, experts: int, dtype: str, variant: str) -> LayerSettings:
    return LayerSettings((variant,), tokens, shape.hidden, shape.ffn_hidden, experts, 1, ep=experts, dtype=dtype)


def measure(settings: LayerSettings, device: torch.device) -> tuple[MemoryUse, int]:
    """One step of the last of the settings' dispatchers. Returns its use, and the bytes of this rank's parameters."""
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test

    layer = layer_under_test(settings, settings.dispatchers[-1], device)
    use = _of_one_step(layer, device)
    largest = torch.tensor([use.held, use.peak, use.host], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in layer.layer.parameters())
    return MemoryUse(*largest.tolist()), parameters


def _of_one_step(layer: LayerUnderTest, device: torch.device) -> MemoryUse:
    layer.clear_grads()
    gc.collect()
    HOST_MEMORY.reset_peak()
    host_before = HOST_MEMORY.used
    with device_memory(device) as memory:
        output = layer.forward()
        held = memory.held
        output.backward(layer.output_grad)
        del output
        peak = memory.peak
    return MemoryUse(held, peak, HOST_MEMORY.peak - host_before)


def _table(rows: Sequence[MemoryRow], dtype: str, device: torch.device) -> Table:
    what = "CUDA's allocator" if device.type == "cuda" else "live tensors"
    table = table_of(
        f"Memory of one MoE layer's step, {dtype}, by {what}; MB of the rank that has most",
        ("shape", "tokens", "partitions", "strategy", "model states", "held without", "peak without", "held", "peak",
         "host", "saved", "eq. 6", "saved / eq. 6"),
        names=4,
        caption="held: from forward to backward; without: the same partitions without reuse; saved: of model states "
        "and peak without reuse; eq. 6: the paper's phi",
    )  # fmt: skip
    for row in rows:
        sizes = row.model_states, row.without.held, row.without.peak, row.use.held, row.use.peak, row.use.host
        table.add_row(
            row.shape, str(row.tokens), str(row.partitions), row.strategy, *(f"{size / 1e6:.1f}" for size in sizes),
            f"{row.saved:.1%}", f"{row.predicted:.1%}", f"{row.saved / row.predicted:.2f}",
        )  # fmt: skip
    for count in sorted({row.partitions for row in rows}):
        mean = statistics.mean(row.saved for row in rows if row.partitions == count)
        table.add_row("mean", "", str(count), "", *[""] * 6, f"{mean:.1%}", "", "")
    return table


if __name__ == "__main__":
    main(app, "tools.bench.memory_reuse")
