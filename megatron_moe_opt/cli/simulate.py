"""`moe-opt simulate`: what each level and chunk count of `monta` would take, and the training step around it.

The outputs of MoNTA's Fig. 10. Needs neither GPUs nor other ranks: what ops cost comes from a cluster.json or from
bandwidths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.bench import DType
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.planning.curves import CostCurve, Costs
from megatron_moe_opt.planning.model import ModelShape, Parallel
from megatron_moe_opt.planning.monta import CHUNKS, Pass, choose, training_passes
from megatron_moe_opt.planning.simulator import Slowdown
from megatron_moe_opt.planning.simulator import simulate as play
from megatron_moe_opt.planning.throughput import Device, Throughput, throughput
from megatron_moe_opt.schedules.monta import LEVELS, ChunkBytes
from megatron_moe_opt.schedules.picture import check_picture, write_picture
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind
from megatron_moe_opt.schedules.timeline import Span, Timeline, one_after_another
from megatron_moe_opt.schedules.trace import write_trace

_PASSES = ("forward dispatch", "forward combine", "backward of combine", "backward of dispatch")
"""The names of `training_passes`."""


@dataclass(frozen=True)
class Network:
    """What ops cost, between groups of which sizes."""

    costs: Costs
    slowdown: Slowdown
    parallel: Parallel


@dataclass(frozen=True)
class Candidate:
    """A level and chunk count, played over the four passes of a layer."""

    level: str
    chunks: int
    timelines: tuple[Timeline, ...]

    @property
    def seconds(self) -> float:
        """Of dispatch and combine, forward and backward."""
        return sum(timeline.seconds for timeline in self.timelines)

    @property
    def exposed(self) -> float:
        """Seconds in which at least one collective runs: the layer waits for communication."""
        spans = ([span for span in timeline.spans if span.op.kind in COLLECTIVES] for timeline in self.timelines)
        return sum(map(_covered, spans))

    @property
    def hidden(self) -> float:
        """Seconds saved against all ops one after another."""
        return max(sum(timeline.hidden for timeline in self.timelines), 0.0)  # rounding may leave less


def simulate(
    cluster: Annotated[
        Path | None, typer.Argument(help="cluster.json of moe-opt profile; else give bandwidths.")
    ] = None,
    *,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank in a MoE layer.")],
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")],
    ffn_hidden: Annotated[int, typer.Option(min=1, help="Hidden size inside an expert.")],
    experts: Annotated[int, typer.Option(min=1, help="Experts of a layer.")],
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with experts.")],
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")],
    vocabulary: Annotated[int, typer.Option(min=1, help="Padded size of the vocabulary.")],
    peak_tflops: Annotated[float, typer.Option(min=0.001, help="Of a GPU, dense, in the training dtype.")],
    gemm_efficiency: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="Part of the peak that the model's compute reaches.")
    ],
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads.  [default: --heads]")] = None,
    gated: Annotated[bool, typer.Option(help="Experts with SwiGLU or the like.")] = True,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.  [default: one sequence a micro-batch]")
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step and data-parallel rank.")] = 1,
    dtype: Annotated[DType, typer.Option(help="Elements of the rows.")] = DType.bf16,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallelism.  [default: the file's, or 1]")] = None,
    cp: Annotated[int | None, typer.Option(min=1, help="Context parallelism.  [default: the file's, or 1]")] = None,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallelism.")] = 1,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert parallelism.  [default: the file's, or 1]")] = None,
    expert_tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor parallelism inside an expert.  [default: the file's, or 1]")
    ] = None,
    inter_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s of a GPU in its EP group, such as its link between nodes.")
    ] = None,
    intra_bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s of a GPU in its expert-TP group, such as NVLink.")
    ] = None,
    copy_bandwidth: Annotated[float | None, typer.Option(min=0.001, help="GB/s of rows copied on the device.")] = None,
    bandwidth_efficiency: Annotated[
        float | None, typer.Option(min=0.001, max=1.0, help="Part of these bandwidths that is reached.  [default: 1]")
    ] = None,
    op_microseconds: Annotated[
        float | None, typer.Option(min=0.0, help="What every op takes besides.  [default: 0]")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the chosen timeline for ui.perfetto.dev.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the chosen timeline (.png, .svg or .pdf).")] = None,
) -> None:
    """Predict the time of monta's levels and chunk counts, the choice among them, and tokens/s and MFU of a step.

    moe-opt simulate cluster.json --tokens 4096 --hidden 4096 --ffn-hidden 14336 --experts 8 --topk 2 --layers 32
    --heads 32 --vocabulary 32000 --peak-tflops 312 --gemm-efficiency 0.5
    """
    _check_files(trace, png)
    bandwidths = {
        "--inter-bandwidth": inter_bandwidth,
        "--intra-bandwidth": intra_bandwidth,
        "--copy-bandwidth": copy_bandwidth,
        "--bandwidth-efficiency": bandwidth_efficiency,
        "--op-microseconds": op_microseconds,
    }
    sizes = {"tp": tp, "cp": cp, "ep": ep, "expert_tp": expert_tp}
    network = _measured(cluster, sizes, pp, bandwidths) if cluster else _given(sizes, pp, bandwidths)
    parallel = network.parallel
    micro_batch_tokens = tokens * parallel.tp * parallel.cp
    sequence = sequence or micro_batch_tokens
    for name, size, by, divisor in (
        ("--hidden", hidden, "--heads", heads),
        ("--heads", heads, "--tp", parallel.tp),
        ("--heads", heads, "--kv-heads", kv_heads or heads),
        ("--experts", experts, "--ep", parallel.ep),
        ("--ffn-hidden", ffn_hidden, "--expert-tp", parallel.etp),
        ("--layers", layers, "--pp", pp),
    ):
        if size % divisor:
            raise ConfigurationError(f"{by} {divisor} does not divide {name} {size}: choose a divisor")
    if micro_batch_tokens % sequence:
        raise ConfigurationError(
            f"--sequence {sequence} does not divide the {micro_batch_tokens} tokens of a micro-batch (--tokens x TP x "
            "CP): choose a divisor"
        )
    if topk > experts:
        raise ConfigurationError(f"--topk {topk} is more than --experts {experts}: choose at most that")
    model = ModelShape(layers, hidden, heads, vocabulary, experts, topk, ffn_hidden, kv_heads, gated=gated)
    device = Device(peak_tflops * 1e12, gemm_efficiency)

    row_bytes = hidden * {DType.fp32: 4, DType.bf16: 2}[dtype]
    passes = training_passes(tokens * topk, row_bytes, row_bytes + _lane_bytes())
    candidates = predict(passes, network)
    choice = choose(passes, parallel.ep, parallel.etp, network.costs, network.slowdown)
    chosen = next(one for one in candidates if (one.level, one.chunks) == (choice.level, choice.chunks))

    console = Console()
    console.print(
        f"{tokens * topk} rows of {row_bytes} bytes on each rank, spread evenly; EP {parallel.ep}, expert-TP "
        f"{parallel.etp}; costs {f'from {cluster}' if cluster else 'from bandwidths'}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(_candidates_table(candidates, chosen))
    work = (model, parallel, device, micro_batch_tokens // sequence, sequence, micro_batches)
    console.print(
        _steps_table({_name(one): throughput(*work, one.seconds) for one in dict.fromkeys((candidates[0], chosen))})
    )
    timelines = {"predicted": one_after_another(_name(chosen), dict(zip(_PASSES, chosen.timelines, strict=True)))}
    for file, write in ((trace, write_trace), (png, write_picture)):
        if file is not None:
            write(file, timelines)
            console.print(f"written to {file}", markup=False, highlight=False, soft_wrap=True)


def predict(passes: Sequence[Pass], network: Network) -> list[Candidate]:
    """Every level and chunk count that differs from the others, O1 first."""
    wanted = [("O1", 1)] + [(level, count) for level in LEVELS if level != "O1" for count in CHUNKS if count > 1]
    return [Candidate(level, count, _play(passes, level, count, network)) for level, count in wanted]


def _play(passes: Sequence[Pass], level: str, count: int, network: Network) -> tuple[Timeline, ...]:
    ep, etp = network.parallel.ep, network.parallel.etp
    timelines = []
    for one in passes:
        size = -(-one.exchanged // count)
        schedule = one.schedule(level, [ChunkBytes(size, size * etp)] * count, ep, etp)
        timelines.append(play(schedule, network.costs, network.slowdown))
    return tuple(timelines)


def _measured(
    file: Path, sizes: Mapping[str, int | None], pp: int, bandwidths: Mapping[str, float | None]
) -> Network:  # fmt: skip
    for flag, value in bandwidths.items():
        if value is not None:
            raise ConfigurationError(
                f"{flag} {value:g} has no meaning beside {file}, which holds costs: drop one of them"
            )
    cluster = Cluster.load(file)
    world = cluster.world
    for flag, asked, measured in (
        ("--ep", sizes["ep"], world.ep),
        ("--expert-tp", sizes["expert_tp"], world.expert_tp),
    ):
        if asked not in (None, measured):
            raise ConfigurationError(
                f"{flag} {asked} is not what {file} was measured with ({measured}): give a file of that layout, or "
                "bandwidths"
            )
    known = {"tp": world.tp, "cp": world.cp, "ep": world.ep, "expert_tp": world.expert_tp}
    return Network(cluster.costs(), cluster.slowdown, _parallel({**known, **_asked(sizes)}, pp))


def _given(sizes: Mapping[str, int | None], pp: int, bandwidths: Mapping[str, float | None]) -> Network:
    inter, intra, copy, efficiency, microseconds = bandwidths.values()
    if inter is None or intra is None or copy is None:
        raise ConfigurationError(
            "there are no costs to simulate with: give a cluster.json of moe-opt profile, or --inter-bandwidth, "
            "--intra-bandwidth and --copy-bandwidth"
        )
    parallel = _parallel({"tp": 1, "cp": 1, "ep": 1, "expert_tp": 1, **_asked(sizes)}, pp)

    def curve(bandwidth: float, ranks: int | None = None) -> CostCurve:
        crossing = 1.0 if ranks is None else max(ranks - 1, 1) / ranks  # groups of one rank have no ops
        return CostCurve.from_efficiency(bandwidth * 1e9, [(1, efficiency or 1.0)], crossing)

    curves = {
        (Kind.ALL_TO_ALL, "ep"): curve(inter, parallel.ep),
        (Kind.ALL_GATHER, "expert-tp"): curve(intra, parallel.etp),
        (Kind.REDUCE_SCATTER, "expert-tp"): curve(intra, parallel.etp),
        (Kind.COPY, None): curve(copy),
    }
    return Network(Costs(curves, overhead=(microseconds or 0.0) * 1e-6), {}, parallel)


def _asked(sizes: Mapping[str, int | None]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size is not None}


def _parallel(sizes: Mapping[str, int], pp: int) -> Parallel:
    """In the smallest world that has room for these sizes: data parallelism changes nothing that is predicted."""
    tp, cp, ep, etp = (sizes[name] for name in ("tp", "cp", "ep", "expert_tp"))
    return Parallel(math.lcm(tp * cp, ep * etp) * pp, tp, pp, cp, ep, etp)


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans runs."""
    covered, until = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(span.end - max(span.start, until), 0.0)
        until = max(until, span.end)
    return covered


def _candidates_table(candidates: Sequence[Candidate], chosen: Candidate) -> Table:
    table = Table(
        title="Dispatch and combine of a layer, forward and backward",
        caption="exposed: at least one collective runs; hidden: saved against all ops one after another",
    )
    table.add_column("monta")
    for header in ("ms", "of O1", "exposed (ms)", "hidden (ms)"):
        table.add_column(header, justify="right")
    table.add_column("")
    for one in candidates:
        table.add_row(
            _name(one),
            f"{one.seconds * 1e3:.3f}",
            f"{one.seconds / candidates[0].seconds:.0%}",
            f"{one.exposed * 1e3:.3f}",
            f"{one.hidden * 1e3:.3f}",
            "chosen" if one is chosen else "",
            style="bold" if one is chosen else None,
        )
    return table


def _steps_table(steps: Mapping[str, Throughput]) -> Table:
    table = Table(title="Training step")
    table.add_column("monta")
    for header in ("layer (ms)", "step (ms)", "tokens/s a GPU", "MFU"):
        table.add_column(header, justify="right")
    for name, step in steps.items():
        table.add_row(
            name,
            f"{step.layer_seconds * 1e3:.3f}",
            f"{step.step_seconds * 1e3:.3f}",
            f"{step.tokens_per_second:.1f}",
            f"{step.mfu:.2%}",
        )
    return table


def _name(one: Candidate) -> str:
    return one.level if one.level == "O1" else f"{one.level}, {one.chunks} chunks"


def _check_files(trace: Path | None, png: Path | None) -> None:
    for flag, file in (("--trace", trace), ("--png", png)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigurationError(f"{flag} {file}: its folder does not exist; create it or choose another")
    if png is not None:
        check_picture(png)


def _lane_bytes() -> int:
    """What a row of dispatch has behind it for its probability."""
    try:
        from megatron_moe_opt.kernels import LANE_BYTES
    except ImportError as error:  # the extension is missing or stale; its message says how to build it
        raise ConfigurationError(str(error)) from error
    return LANE_BYTES
