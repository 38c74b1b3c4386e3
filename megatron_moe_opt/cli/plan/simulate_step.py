"""What each level and chunk count of `monta` would take, the training step around it, and what `parm` and `mpmoe` take.

The outputs of MoNTA's Fig. 10. Needs neither GPUs nor other ranks: what ops cost comes from a cluster.json or from
bandwidths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.cli.plan.model_checks import check_model
from megatron_moe_opt.cli.plan.simulate_mpmoe import mpmoe_report
from megatron_moe_opt.cli.plan.simulate_parm import parm_report
from megatron_moe_opt.cli.report.timeline_files import check_timeline_files, write_timelines
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.cluster import OUR_FLAGS, Cluster
from megatron_moe_opt.planning.curves import CostCurve, Costs
from megatron_moe_opt.planning.model import ModelShape, Parallel
from megatron_moe_opt.planning.monta import AS_IN_TRAINING, CHUNKS, PASSES, Pass, choose, training_passes
from megatron_moe_opt.planning.mpmoe_choice import MpmoeLayer
from megatron_moe_opt.planning.parm import ParmLayer
from megatron_moe_opt.planning.simulator import Slowdown, simulate
from megatron_moe_opt.planning.throughput import Device, Throughput, throughput
from megatron_moe_opt.schedules.monta import LEVELS, even_chunks
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.schedules.timeline import Timeline, one_after_another


@dataclass(frozen=True)
class StepSettings:
    """The options of `moe-opt simulate`."""

    cluster: Path | None
    model: ModelShape
    device: Device
    tokens: int
    """Of each rank in a MoE layer."""
    sequence: int | None
    """Tokens; None: one sequence a micro-batch."""
    micro_batches: int
    element_bytes: int
    """Of the rows."""
    sizes: Mapping[str, int | None]
    """Of parallelism, by flag. None: the cluster's, or 1."""
    bandwidths: Mapping[str, float | None]
    """And what goes with them, by flag."""


@dataclass(frozen=True)
class Network:
    """What ops cost, between groups of which sizes."""

    costs: Costs
    slowdown: Slowdown
    parallel: Parallel
    cluster: Cluster | None
    """What was measured, if it was."""


@dataclass(frozen=True)
class Candidate:
    """A level and chunk count, played over the four passes of a layer."""

    level: str
    chunks: int
    timelines: tuple[Timeline, ...]

    def __str__(self) -> str:
        return self.level if self.level == "O1" else f"{self.level}, {self.chunks} chunks"

    @property
    def seconds(self) -> float:
        """Of dispatch and combine, forward and backward."""
        return sum(timeline.seconds for timeline in self.timelines)

    @property
    def exposed(self) -> float:
        """Seconds in which at least one collective runs: the layer waits for communication."""
        return sum(timeline.exposed for timeline in self.timelines)

    @property
    def hidden(self) -> float:
        """Seconds saved against all ops one after another."""
        return max(sum(timeline.hidden for timeline in self.timelines), 0.0)  # rounding may leave less


def simulate_step(settings: StepSettings, trace: Path | None, png: Path | None) -> None:
    """Prints the candidates and the step, and writes the chosen timeline.

    Raises:
        ConfigurationError: settings that contradict each other, or files that cannot be written.
    """
    check_timeline_files(trace, png)
    network = _measured(settings) if settings.cluster else _given(settings)
    parallel = network.parallel
    micro_batch_tokens = settings.tokens * parallel.tp * parallel.cp
    sequence = settings.sequence or micro_batch_tokens
    _check(settings, parallel, micro_batch_tokens, sequence)

    rows, row_bytes = settings.tokens * settings.model.topk, settings.model.hidden * settings.element_bytes
    passes = training_passes(rows, row_bytes, row_bytes + _lane_bytes())
    candidates = predict(passes, network)
    choice = choose(passes, parallel.ep, parallel.etp, network.costs, network.slowdown, **AS_IN_TRAINING)
    chosen = next(one for one in candidates if (one.level, one.chunks) == (choice.level, choice.chunks))
    micro_batch = micro_batch_tokens // sequence
    steps = {
        str(one): throughput(
            settings.model, parallel, settings.device, micro_batch, sequence, settings.micro_batches, one.seconds
        )
        for one in (candidates[0], chosen)
    }

    console = report_console()
    console.print(
        f"{rows} rows of {row_bytes} bytes on each rank, spread evenly; EP {parallel.ep}, expert-TP {parallel.etp}; "
        f"costs from {settings.cluster or 'bandwidths'}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_candidates_table(candidates, chosen))
    console.print(_steps_table(steps))
    for part in (*_parm_report(settings, network, row_bytes), *_mpmoe_report(settings, network)):
        console.print(part, highlight=False, soft_wrap=True)
    timeline = one_after_another(str(chosen), dict(zip(PASSES, chosen.timelines, strict=True)))
    write_timelines({"predicted": timeline}, trace, png, console)


def predict(passes: Sequence[Pass], network: Network) -> list[Candidate]:
    """Every level and chunk count that differs from the others, O1 first."""
    ep, etp = network.parallel.ep, network.parallel.etp

    def play(one: Pass, level: str, count: int) -> Timeline:
        schedule = one.schedule(level, even_chunks(one.exchanged, etp, count), ep, etp)
        return simulate(schedule, network.costs, network.slowdown)

    wanted = [("O1", 1)] + [(level, count) for level in LEVELS if level != "O1" for count in CHUNKS if count > 1]
    return [Candidate(level, count, tuple(play(one, level, count) for one in passes)) for level, count in wanted]


def _parm_report(settings: StepSettings, network: Network, row_bytes: int) -> list[Table | str]:
    """Nothing where costs were not measured, or where no expert or attention is cut: parm is like monta's O1 there."""
    model, parallel, cluster = settings.model, network.parallel, network.cluster
    if cluster is None or max(parallel.tp, parallel.etp) == 1 or parallel.ep * parallel.etp == 1:
        return []
    layer = ParmLayer(
        row_bytes, row_bytes + _lane_bytes(), model.topk, model.experts, parallel.tp, parallel.ep, parallel.etp
    )
    try:
        cluster.check_groups(settings.cluster, OUR_FLAGS, ep=parallel.ep, expert_tp=parallel.etp, tp=parallel.tp)
        return list(parm_report(layer, settings.tokens, cluster))
    except ConfigurationError as error:  # a file that is older than parm, or of other TP groups, is still monta's
        return [f"parm: {error}"]


def _mpmoe_report(settings: StepSettings, network: Network) -> list[Table | str]:
    """Nothing where costs were not measured, or where no row leaves its rank. Gated activations are taken as fused."""
    model, parallel, cluster = settings.model, network.parallel, network.cluster
    if cluster is None or parallel.ep * parallel.etp == 1:
        return []
    layer = MpmoeLayer.of_experts(
        model.hidden, model.ffn, model.experts, parallel.ep, parallel.etp, settings.element_bytes, _lane_bytes(),
        model.gated, fused=model.gated,
    )  # fmt: skip
    try:
        return list(mpmoe_report(layer, settings.tokens * model.topk, cluster))
    except ConfigurationError as error:  # a file that is older than mpmoe is still good for the others
        return [f"mpmoe: {error}"]


def _check(settings: StepSettings, parallel: Parallel, micro_batch_tokens: int, sequence: int) -> None:
    check_model(settings.model, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, expert_tp=parallel.etp)
    if micro_batch_tokens % sequence:
        raise ConfigurationError(
            f"--sequence {sequence} does not divide the {micro_batch_tokens} tokens of a micro-batch (--tokens x TP x "
            "CP): choose a divisor"
        )


def _measured(settings: StepSettings) -> Network:
    file, sizes = settings.cluster, settings.sizes
    for flag, value in settings.bandwidths.items():
        if value is not None:
            raise ConfigurationError(
                f"{flag} {value:g} has no meaning beside {file}, which holds costs: drop one of them"
            )
    cluster = Cluster.load(file)
    world = cluster.world
    known = {"--tp": world.tp, "--cp": world.cp, "--ep": world.ep, "--expert-tp": world.expert_tp}
    parallel = _parallel({flag: size or known.get(flag, 1) for flag, size in sizes.items()})
    cluster.check_groups(file, OUR_FLAGS, ep=parallel.ep, expert_tp=parallel.etp)
    return Network(cluster.costs(), cluster.slowdown, parallel, cluster)


def _given(settings: StepSettings) -> Network:
    inter, intra, copy, efficiency, microseconds = settings.bandwidths.values()
    if inter is None or intra is None or copy is None:
        raise ConfigurationError(
            "there are no costs to simulate with: give a cluster.json of moe-opt profile, or --inter-bandwidth, "
            "--intra-bandwidth and --copy-bandwidth"
        )
    parallel = _parallel({flag: size or 1 for flag, size in settings.sizes.items()})

    def curve(bandwidth: float, ranks: int | None = None) -> CostCurve:
        crossing = 1.0 if ranks is None else max(ranks - 1, 1) / ranks  # groups of one rank have no ops
        return CostCurve.from_efficiency(bandwidth * 1e9, [(1, efficiency or 1.0)], crossing)

    curves = {
        (Kind.ALL_TO_ALL, "ep"): curve(inter, parallel.ep),
        (Kind.ALL_GATHER, "expert-tp"): curve(intra, parallel.etp),
        (Kind.REDUCE_SCATTER, "expert-tp"): curve(intra, parallel.etp),
        (Kind.COPY, None): curve(copy),
    }
    return Network(Costs(curves, overhead=(microseconds or 0.0) * 1e-6), {}, parallel, None)


def _parallel(sizes: Mapping[str, int]) -> Parallel:
    """In the smallest world that has room for these sizes: data parallelism changes nothing that is predicted."""
    tp, cp, pp, ep, etp = (sizes[flag] for flag in ("--tp", "--cp", "--pp", "--ep", "--expert-tp"))
    return Parallel(math.lcm(tp * cp, ep * etp) * pp, tp, pp, cp, ep, etp)


def _lane_bytes() -> int:
    """What a row of dispatch has behind it for its probability."""
    from megatron_moe_opt.kernels import LANE_BYTES

    return LANE_BYTES


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
            str(one),
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
