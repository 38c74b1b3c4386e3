"""Rows that come back from their experts and are shared over TP: peer by peer (SAA), or one after the other (AAS).

torchrun --nproc-per-node 4 -m tools.bench.saa --tp 4 --sizes 256,1024
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from megatron_moe_opt.cli.console import report_console, table_of
from megatron_moe_opt.cli.layer_options import Ep, ExpertTp
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType, whole_numbers
from megatron_moe_opt.cli.profile.run import ProfileSettings
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring import loads
from megatron_moe_opt.integration.measuring.layer_settings import torch_dtype
from megatron_moe_opt.integration.measuring.loads import Rows
from megatron_moe_opt.integration.measuring.megatron_moves import expert_groups, megatron_groups
from megatron_moe_opt.integration.measuring.meter import SizedPipeline
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.integration.measuring.timing import slowest
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.schedules.timeline import Timeline


@dataclass(frozen=True)
class SaaPoint:
    """What one size took; the seconds of each round are the slowest rank's."""

    size: int
    """Bytes of the rows that come back to a rank for itself, times expert-TP."""
    all_to_all: tuple[float, ...]
    """Seconds of AAS before its AllGather."""
    all_gather: tuple[float, ...]
    """Seconds of AAS after its all-to-all."""
    aas: tuple[float, ...]
    """Seconds of both, one after the other."""
    saa: tuple[float, ...]
    """Seconds of both, peer by peer."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times faster SAA is, round by round."""
        return tuple(aas / saa for aas, saa in zip(self.aas, self.saa, strict=True))


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def saa(
    sizes: Annotated[str, typer.Option(help="KiB of a rank's own rows, times expert-TP, separated by commas.")] = (
        "256,1024,4096"
    ),
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size: elements of a row.")] = 1024,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.")] = 2,
    ep: Ep = None,
    expert_tp: ExpertTp = 1,
    dtype: Annotated[DType, typer.Option(help="Elements of the rows.")] = DType.fp32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 9,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write every round's times.")] = None,
) -> None:
    """Parm's all-to-all that shares rows over TP as they come, against the same one after the other."""
    settings = ProfileSettings(tp, 1, ep, expert_tp, hidden, expert_tp, dtype.value, 0.0)
    bench_saa(settings, [size * 1024 for size in whole_numbers("--sizes", sizes)], rounds, output)


def bench_saa(settings: ProfileSettings, sizes: Sequence[int], rounds: int, output: Path | None) -> list[SaaPoint]:
    """Runs on the current ranks; rank 0 prints the table and writes `output`.

    Raises:
        ConfigurationError: settings that cannot work, or under which there is nothing to overlap.
    """
    world = begin()
    check_output_file("--output", output)
    layout = settings.layout(world)
    if layout.tp == 1 or layout.ep == 1:
        raise ConfigurationError(
            f"--tp {layout.tp} --ep {layout.ep}: an AllGather over TP can overlap with an all-to-all where both are "
            "above 1"
        )
    with megatron_process_group() as device:
        points = measure(settings, sizes, rounds, device)
        if dist.get_rank() == 0:
            _print(points, report_console(160))
            if output is not None:
                content = [asdict(point) | {"ratios": point.ratios} for point in points]
                write_text_whole(output, json.dumps(content, indent=2) + "\n")
    return points


def measure(settings: ProfileSettings, sizes: Sequence[int], rounds: int, device: torch.device) -> list[SaaPoint]:
    """A collective call over the world; the same answer on every rank."""
    rows = Rows(settings.hidden, torch_dtype(settings.dtype), device)
    layout = settings.layout(dist.get_world_size())
    with parallel_layer(layout.tp, layout.ep, layout.expert_tp, seed=1):
        groups = megatron_groups()
        of_experts = expert_groups(groups)
        aas, saa = (loads.combine_and_gather(rows, of_experts, groups[TP], overlap) for overlap in (False, True))
        return [_compare(aas(size), saa(size), rounds, device) for size in sizes]


def _compare(aas: SizedPipeline, saa: SizedPipeline, rounds: int, device: torch.device) -> SaaPoint:
    """Interleaved rounds, behind one that warms up."""
    seconds = torch.zeros(4, rounds + 1, dtype=torch.float64)
    for index in range(rounds + 1):
        one_after_another, overlapped = _run(aas, device), _run(saa, device)
        all_to_all = max(span.end for span in one_after_another.spans if span.op.kind is Kind.ALL_TO_ALL)
        seconds[:, index] = torch.tensor(
            [all_to_all, one_after_another.seconds - all_to_all, one_after_another.seconds, overlapped.seconds]
        )
    return SaaPoint(saa.size, *map(tuple, slowest(seconds[:, 1:], device)))


def _run(pipeline: SizedPipeline, device: torch.device) -> Timeline:
    schedule, bound = pipeline.bind()
    dist.barrier()
    timeline = executor(device).run(schedule, bound, record=True)
    assert timeline is not None
    return timeline


def _print(points: list[SaaPoint], console: Console) -> None:
    headers = "MB", "all-to-all ms", "AllGather ms", "one after the other ms", "SAA ms", "times faster", "min-max"
    table = table_of("Rows back from their experts, and shared over TP", headers, names=0)
    for point in points:
        medians = (point.all_to_all, point.all_gather, point.aas, point.saa)
        table.add_row(
            f"{point.size / 1e6:.2f}",
            *(f"{statistics.median(seconds) * 1e3:.1f}" for seconds in medians),
            f"{statistics.median(point.ratios):.2f}",
            f"{min(point.ratios):.2f}-{max(point.ratios):.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main(app, "tools.bench.saa")
