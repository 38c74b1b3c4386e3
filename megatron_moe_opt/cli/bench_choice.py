"""`moe-opt bench choice`: is what a profile leads to the fastest of all?

For monta that is a level and chunk count; for parm, on tokens that all TP ranks hold, a schedule or one of monta's
levels behind the split. Every candidate is measured, the choice is made by the profile alone, and its regret is how
much slower it is than the fastest candidate. monta's prediction is held against the time that its pipelines took.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.bench_layer import check, time_rounds
from megatron_moe_opt.cli.layer_report import shape_of
from megatron_moe_opt.cli.layer_settings import LayerSettings
from megatron_moe_opt.cli.output_files import check_output
from megatron_moe_opt.cli.process_group import adopt_slurm_ranks, megatron_process_group, parallel_layer, world_size
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.planning import monta, parm
from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.schedules.parm import SCHEDULES

if TYPE_CHECKING:
    from megatron_moe_opt.cli.moe_layer import LayerUnderTest

RECORDED_STEPS = 3


@dataclass(frozen=True)
class ChoicePoint:
    """One size: what was chosen, what was fastest, what was predicted. Seconds are medians of the slowest rank."""

    tokens: int
    exchanged: int
    """Bytes of the rows that a rank sends in one pass of combine."""
    chosen: str
    best: str
    seconds: dict[str, float]
    """Of a step, by candidate; with the baseline."""
    predicted: float
    """Seconds of the four pipelines of a step: dispatch and combine, forward and backward; of parm, with the
    AllGathers at the layer's edge."""
    pipelines: float | None
    """The same, measured; None of parm, whose AllGathers are not recorded."""
    baseline: str

    @property
    def regret(self) -> float:
        """Time of the chosen over the fastest candidate's, less 1."""
        return self.seconds[self.chosen] / self.seconds[self.best] - 1

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return None if self.pipelines is None else self.predicted / self.pipelines - 1

    @property
    def ratio(self) -> float:
        """Time of the chosen over the baseline's."""
        return self.seconds[self.chosen] / self.seconds[self.baseline]


def bench_choice(
    settings: LayerSettings, tokens: Sequence[int], chunks: Sequence[int], json_file: Path | None
) -> list[ChoicePoint]:
    """Runs on the current ranks; rank 0 prints the table and writes `json_file`.

    Args:
        settings: of everything but the tokens; with a profile.
        tokens: of each rank, one point each.
        chunks: counts to choose from, at O2 and O3.

    Raises:
        ConfigurationError: settings that cannot work, a profile of other groups.
    """
    warnings.filterwarnings("ignore", module=r"megatron|torch")
    if settings.capacity_factor is not None and not settings.replicated:
        raise ConfigurationError("--capacity-factor is for whole layers: add --replicated, or leave it out")
    candidates = ["monta:O1", *(f"monta:{level}x{count}" for level in ("O2", "O3") for count in chunks if count > 1)]
    if settings.replicated:
        candidates += [f"parm:{schedule}" for schedule in SCHEDULES]
    settings = dataclasses.replace(settings, dispatchers=tuple(candidates), dispatch_only=not settings.replicated)
    adopt_slurm_ranks()
    check_output("--json", json_file)
    cluster = check(settings)
    ep = settings.ep_size(world_size())
    with megatron_process_group() as device:
        with parallel_layer(settings.tp, ep, settings.expert_tp, settings.seed):
            points = measure(settings, ep, cluster, tokens, chunks, device)
        if dist.get_rank() == 0:
            _print(points, settings, ep, Console(width=None if sys.stdout.isatty() else 160))
            if json_file is not None:
                content = {"settings": asdict(settings), "points": [_as_json(point) for point in points]}
                json_file.write_text(json.dumps(content, indent=2, default=str) + "\n")
    return points


def measure(
    settings: LayerSettings,
    ep: int,
    cluster: Cluster,
    tokens: Sequence[int],
    chunks: Sequence[int],
    device: torch.device,
) -> list[ChoicePoint]:
    """One point for each number of tokens, in Megatron's groups of the settings' sizes. A collective call."""
    from megatron_moe_opt.cli.moe_layer import layers_under_test

    points = []
    for count in tokens:
        of_size = dataclasses.replace(settings, tokens=count)
        layers = layers_under_test(of_size, ep, device, permute_fusion=False)
        chosen, predicted = _choose(of_size, ep, cluster, chunks)
        rounds = time_rounds(layers, of_size, device)
        seconds = {name: statistics.median(times) for name, times in rounds.items()}
        points.append(
            ChoicePoint(
                tokens=count,
                exchanged=count * settings.topk * settings.hidden * settings.torch_dtype.itemsize,
                chosen=chosen,
                best=min((name for name in seconds if name != settings.baseline), key=lambda name: seconds[name]),
                seconds=seconds,
                predicted=predicted,
                pipelines=None if settings.replicated else _pipeline_seconds(layers[chosen], device),
                baseline=settings.baseline,
            )
        )
    return points


def _choose(settings: LayerSettings, ep: int, cluster: Cluster, chunks: Sequence[int]) -> tuple[str, float]:
    """The candidate that the profile leads to, and the seconds that it predicts."""
    row_bytes, counts = settings.hidden * settings.torch_dtype.itemsize, (1, *chunks)
    sizes = row_bytes, row_bytes + LANE_BYTES
    if settings.replicated:
        routing = settings.topk, settings.experts, settings.tp, ep, settings.expert_tp, settings.capacity_factor
        choice = parm.choices(parm.ParmLayer(*sizes, *routing), cluster, chunks=counts)[settings.tokens]
        if choice.level is None:
            return f"parm:{choice.schedule}", choice.seconds
    else:
        choice = monta.choices(cluster, ep, settings.expert_tp, *sizes, chunks=counts)[settings.tokens * settings.topk]
    level = "" if choice.level == "O1" else f"x{choice.chunks}"
    return f"monta:{choice.level}{level}", choice.seconds


def _pipeline_seconds(layer: LayerUnderTest, device: torch.device) -> float:
    """Time in the pipelines of a step: median over steps of the slowest rank's sum."""
    sums = torch.zeros(RECORDED_STEPS, dtype=torch.float64)
    for step in range(RECORDED_STEPS):
        sums[step] = sum(timeline.seconds for timeline in layer.recorded_step())
    sums = sums.to(device)
    dist.all_reduce(sums, dist.ReduceOp.MAX)
    return statistics.median(sums.tolist())


def _as_json(point: ChoicePoint) -> dict[str, Any]:
    return asdict(point) | {"regret": point.regret, "error": point.error, "ratio": point.ratio}


def _print(points: list[ChoicePoint], settings: LayerSettings, ep: int, console: Console) -> None:
    console.print(f"Choice by {settings.profile}. {shape_of(settings, ep)}", markup=False, soft_wrap=True)
    what = "MoE layer" if settings.replicated else "Dispatch and combine alone"
    table = Table(title=f"{what}, forward + backward")
    headers = ["tokens", "MB a rank", "chosen", "ms", "fastest", "ms", "regret", f"ratio to {settings.baseline}"]
    if not settings.replicated:
        headers += ["pipelines predicted ms", "measured ms", "error"]
    for header in headers:
        table.add_column(header, justify="right")
    for point in points:
        cells = [
            str(point.tokens),
            f"{point.exchanged / 1e6:.2f}",
            point.chosen,
            f"{point.seconds[point.chosen] * 1e3:.1f}",
            point.best,
            f"{point.seconds[point.best] * 1e3:.1f}",
            f"{point.regret:.1%}",
            f"{point.ratio:.3f}",
        ]
        if point.pipelines is not None:
            cells += [f"{point.predicted * 1e3:.1f}", f"{point.pipelines * 1e3:.1f}", f"{point.error:+.1%}"]
        table.add_row(*cells)
    console.print(table)
    regrets = [point.regret for point in points]
    errors = [abs(point.error) for point in points if point.error is not None]
    prediction = f"; prediction off by {statistics.median(errors):.1%} in the median point" if errors else ""
    console.print(
        f"regret at most 5 % in {sum(regret <= 0.05 for regret in regrets)} of {len(points)} points, largest "
        f"{max(regrets):.1%}{prediction}"
    )
