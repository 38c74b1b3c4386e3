"""Is what a system chooses by itself the fastest of all?

Every candidate is measured. A choice sees the profile alone, or trials of its own, and its regret is how much slower
it is than the fastest candidate. Its prediction is held against the time that the schedules took.

torchrun --nproc-per-node 8 -m tools.bench.choice --profile cluster.json --tp 4 --ep 2 --expert-tp 4 --tokens 256,1024
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from megatron_moe_opt.cli.bench.measured_layer import shape_of
from megatron_moe_opt.cli.bench.run import check, time_rounds
from megatron_moe_opt.cli.console import report_console, say, table_of
from megatron_moe_opt.cli.layer_options import Ep, Experts, ExpertTp, Hidden, TopK, Tp
from megatron_moe_opt.cli.main import main
from megatron_moe_opt.cli.option_types import DType, byte_budget, finite, whole_numbers
from megatron_moe_opt.cli.ranks import begin, megatron_process_group
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
from megatron_moe_opt.integration.measuring.timing import slowest
from megatron_moe_opt.output_file import check_output_file, write_text_whole
from megatron_moe_opt.planning.costs.cluster import Cluster
from tools.bench.judged_systems import STEPS, Chooser, Chosen, chooser_of
from tools.bench.split_half import noise_floor, regret_of_halves

if TYPE_CHECKING:
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest

RECORDED_STEPS = 3


@dataclass(frozen=True)
class ChoicePoint:
    """One size and way to choose: what was chosen, what was fastest, what was predicted.

    Seconds are medians of the slowest rank.
    """

    tokens: int
    exchanged: int
    """Bytes of the rows that a rank sends in one pass of combine."""
    by: str
    chosen: str
    best: str
    seconds: dict[str, float]
    """Seconds of a step by candidate, the baseline among them."""
    predicted: float | None
    """Seconds that the choice was predicted to take, as Chosen.predicted has them."""
    pipelines: float | None
    """What was predicted, as it was measured; None where not all of it was."""
    overhead: float | None
    """Seconds that choosing took, as Chosen.overhead has them."""
    baseline: str
    predictions: dict[str, float]
    """Seconds of all that it was chosen from, as Chosen.predictions has them."""
    rounds: dict[str, list[float]]
    """Seconds of every round on the slowest rank, by candidate; of what `seconds` is the median."""
    noise_floor: float | None
    """What of a regret is noise: see split_half.noise_floor."""
    regret_of_halves: float | None
    """The regret against a candidate chosen by other rounds: see split_half.regret_of_halves."""

    @property
    def regret(self) -> float:
        """What choosing lost: the time of the chosen over the fastest candidate's, less 1."""
        return self.seconds[self.chosen] / self.seconds[self.best] - 1

    @property
    def error(self) -> float | None:
        """How far the prediction is off: predicted over measured, less 1."""
        return None if None in (self.predicted, self.pipelines) else self.predicted / self.pipelines - 1

    @property
    def ratio(self) -> float:
        """How the chosen compares with the baseline: its time over the baseline's."""
        return self.seconds[self.chosen] / self.seconds[self.baseline]


def bench_choice(
    settings: LayerSettings, tokens: Sequence[int], chooser: Chooser, output: Path | None
) -> list[ChoicePoint]:
    """Runs on the current ranks; rank 0 prints the table and writes `output`.

    Args:
        settings: of everything but the tokens; with a profile.
        tokens: of each rank, one point for each and for each way to choose.

    Raises:
        ConfigurationError: settings that cannot work, a profile of other groups.
    """
    world = begin()
    if settings.capacity_factor is not None and chooser.dispatch_only:
        raise ConfigurationError("--capacity-factor is for whole layers: add --replicated, or leave it out")
    settings = dataclasses.replace(settings, dispatchers=chooser.candidates, dispatch_only=chooser.dispatch_only)
    check_output_file("--output", output)
    cluster = check(settings)
    asked, settings = settings, settings.on(world)
    with megatron_process_group() as device:
        with parallel_layer(settings.tp, settings.ep, settings.expert_tp, settings.seed):
            points = measure(settings, cluster, tokens, chooser, device)
        if dist.get_rank() == 0:
            _print(points, settings, report_console(160))
            if output is not None:
                content = {"settings": asdict(asked), "points": [_as_json(point) for point in points]}
                write_text_whole(output, json.dumps(content, indent=2, default=str) + "\n")
    return points


def measure(
    settings: LayerSettings, cluster: Cluster, tokens: Sequence[int], chooser: Chooser, device: torch.device
) -> list[ChoicePoint]:
    """Returns the points for each number of tokens, in Megatron's groups of the settings' sizes. A collective call."""
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test

    points = []
    for count in tokens:
        of_size = dataclasses.replace(settings, tokens=count)
        of_size = dataclasses.replace(of_size, dispatchers=chooser.measured(of_size, device))
        allowed = chooser.allowed(of_size)
        layers = layers_under_test(of_size, device)
        rounds = time_rounds(layers, of_size, device)
        seconds = {name: statistics.median(times) for name, times in rounds.items()}
        judged = {name: rounds[name] for name in allowed}
        for chosen in chooser.choose(of_size, cluster, seconds, device):
            points.append(
                ChoicePoint(
                    tokens=count,
                    exchanged=count * settings.topk * settings.hidden * torch_dtype(settings.dtype).itemsize,
                    by=chosen.by,
                    chosen=chosen.candidate,
                    best=min(allowed, key=lambda name: seconds[name]),
                    seconds=seconds,
                    predicted=chosen.predicted,
                    pipelines=_measured(chooser, chosen, layers, seconds, device),
                    overhead=chosen.overhead,
                    baseline=settings.baseline,
                    predictions=dict(chosen.predictions),
                    rounds=rounds,
                    noise_floor=noise_floor(judged),
                    regret_of_halves=regret_of_halves(judged, chosen.candidate),
                )  # fmt: skip
            )
    return points


def _measured(
    chooser: Chooser,
    chosen: Chosen,
    layers: Mapping[str, LayerUnderTest],
    seconds: Mapping[str, float],
    device: torch.device,
) -> float | None:
    """Returns, as it was measured, what was predicted; None where not all of it was recorded."""
    if chooser.whole_layer:
        return seconds[chosen.candidate]
    return _pipeline_seconds(layers[chosen.candidate], device) if chooser.recorded else None


def _pipeline_seconds(layer: LayerUnderTest, device: torch.device) -> float:
    """Returns the time in the pipelines of a step: the median over steps of the slowest rank's sum."""
    sums = [sum(timeline.seconds for timeline in layer.observed_step()[0]) for _ in range(RECORDED_STEPS)]
    return statistics.median(slowest(sums, device))


def _as_json(point: ChoicePoint) -> dict[str, Any]:
    return asdict(point) | {"regret": point.regret, "error": point.error, "ratio": point.ratio}


def _print(points: list[ChoicePoint], settings: LayerSettings, console: Console) -> None:
    say(console, f"Choice by {settings.profile}. {shape_of(settings)}")
    what = "Dispatch and combine alone" if settings.dispatch_only else "MoE layer"
    headers = ["tokens", "MB a rank", "by", "chosen", "ms", "fastest", "ms", "regret", f"ratio to {settings.baseline}"]
    recorded = any(point.pipelines is not None for point in points)
    costly = any(point.overhead is not None for point in points)
    headers += ["predicted ms", "measured ms", "error"] if recorded else []
    headers += [f"choosing, of {STEPS} steps"] if costly else []
    table = table_of(f"{what}, forward + backward", headers, names=0)
    for point in points:
        ms = [f"{point.seconds[name] * 1e3:.1f}" for name in (point.chosen, point.best)]
        cells = [
            str(point.tokens), f"{point.exchanged / 1e6:.2f}", point.by, point.chosen, ms[0], point.best, ms[1],
            f"{point.regret:.1%}", f"{point.ratio:.3f}",
        ]  # fmt: skip
        if recorded:
            predicted = "-" if point.predicted is None else f"{point.predicted * 1e3:.1f}"
            error = "-" if point.error is None else f"{point.error:+.1%}"
            cells += [predicted, f"{point.pipelines * 1e3:.1f}", error]
        if costly:
            steps = STEPS * point.seconds[point.chosen]
            cells.append("-" if point.overhead is None else f"{point.overhead / steps:.2%}")
        table.add_row(*cells)
    console.print(table)
    for by in dict.fromkeys(point.by for point in points):
        _print_regrets(by, [point for point in points if point.by == by], console)


def _print_regrets(by: str, points: list[ChoicePoint], console: Console) -> None:
    """Prints the regrets of one way to choose and, where there are several rounds, how much of them is noise."""
    errors = [abs(point.error) for point in points if point.error is not None]
    prediction = f"; prediction off by {statistics.median(errors):.1%} in the median point" if errors else ""
    say(console, f"{by}: regret {_at_most([point.regret for point in points])}{prediction}")
    floors = [point.noise_floor for point in points if point.noise_floor is not None]
    of_halves = [point.regret_of_halves for point in points if point.regret_of_halves is not None]
    if floors:
        say(
            console,
            f"    chosen by one half of the rounds and judged by the other, the fastest itself: regret "
            f"{_at_most(floors)}; {by} against it: {_at_most(of_halves)}",
        )


def _at_most(regrets: Sequence[float]) -> str:
    few = sum(regret <= 0.05 for regret in regrets)
    return f"at most 5 % in {few} of {len(regrets)} points, largest {max(regrets):.1%}"


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def choice(
    profile: Annotated[Path, typer.Option(help="cluster.json of moe-opt profile, of the same groups.")],
    tokens: Annotated[str, typer.Option(help="Tokens of each rank, one point each, separated by commas.")] = "256,1024",
    chunks: Annotated[
        str | None,
        typer.Option(help="Chunk counts at O2 and O3, or partitions.", show_default="2,4,8,16; 1 to 8 with --mpmoe"),
    ] = None,
    hidden: Hidden = 1024,
    ffn_hidden: Annotated[
        int | None,
        typer.Option(min=1, help="Hidden size inside an expert; with --mpmoe or --auto.", show_default="--hidden"),
    ] = None,
    experts: Experts = 8,
    topk: TopK = 2,
    tp: Tp = 1,
    ep: Ep = None,
    expert_tp: ExpertTp = 1,
    dtype: Annotated[DType, typer.Option(help="Tokens.")] = DType.fp32,
    routing: Annotated[str, typer.Option(help="As in moe-opt bench.")] = "uniform",
    capacity_factor: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Pad every expert to this capacity; with --replicated."),
    ] = None,
    replicated: Annotated[
        bool,
        typer.Option("--replicated", help="parm's choice, on tokens that all TP ranks hold, in a whole MoE layer."),
    ] = False,
    mpmoe: Annotated[
        bool, typer.Option("--mpmoe", help="mpmoe's choice of partitions and memory reuse, in a whole MoE layer.")
    ] = False,
    auto: Annotated[
        bool, typer.Option("--auto", help="auto's choice among all systems, in a whole MoE layer.")
    ] = False,
    reuse: Annotated[
        str, typer.Option(help="Memory reuse: none, one of S1 to S4, or auto to choose from all; with --mpmoe.")
    ] = "none",
    activation_budget: Annotated[
        int | None,
        typer.Option(
            parser=byte_budget,
            metavar="BYTES",
            help="What activations may take of a choice, such as 512MiB; with --mpmoe.",
            show_default="no limit",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed rounds before them.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of inputs and routing.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything.")] = None,
) -> None:
    """How much slower a choice is than the fastest of all: monta's of level and chunks, parm's of its schedule, mpmoe's
    of partitions and memory reuse, by the profile; auto's of all of these, planned and after its trials.
    """
    sizes, counts = whole_numbers("--tokens", tokens), None if chunks is None else whole_numbers("--chunks", chunks)
    systems = [flag for flag, given in {"--replicated": replicated, "--mpmoe": mpmoe, "--auto": auto}.items() if given]
    if len(systems) > 1:
        raise ConfigurationError(f"{' and '.join(systems)} are choices of different systems: give one of them")
    chooser = chooser_of(systems[0] if systems else None, counts, reuse, activation_budget)
    settings = LayerSettings(
        dispatchers=(), tokens=sizes[0], hidden=hidden,
        ffn_hidden=(ffn_hidden or hidden) if mpmoe or auto else expert_tp, experts=experts, topk=topk, tp=tp, ep=ep,
        expert_tp=expert_tp, dtype=dtype.value, routing=routing, capacity_factor=capacity_factor,
        pad_to_capacity=capacity_factor is not None, steps=steps, warmup=warmup, seed=seed, profile=profile,
        replicated=replicated,
    )  # fmt: skip
    bench_choice(settings, sizes, chooser, output)


if __name__ == "__main__":
    main(app, "tools.bench.choice")
