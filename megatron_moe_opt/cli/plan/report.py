"""`moe-opt plan`: candidates for a model on a cluster, the choice among them, and what to start a training with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.cli.plan.settings import PlanSettings, Site, site_of, workload_of
from megatron_moe_opt.cli.report.timeline_files import say_written
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.planning.cluster import OURS, STOCK
from megatron_moe_opt.planning.curves import CostCurve
from megatron_moe_opt.planning.known_models import MONTA_CHOICES
from megatron_moe_opt.planning.layer_workload import LayerWorkload
from megatron_moe_opt.planning.memory import StageMemory, training_memory
from megatron_moe_opt.planning.model import ModelShape
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import WINS_BY, best, candidates
from megatron_moe_opt.planning.prediction import ALLTOALL, Prediction, Refusal
from megatron_moe_opt.planning.throughput import throughput
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.variants import split_variant

WIDTH = 150
FASTEST = 10
"""Candidates that are shown, besides the best of each system."""
MIB, GIB = 2**20, 2**30
_EXPERTS = {Kind.COMPUTE: "experts, forward", Kind.GRADIENT: "experts, backward"}


@dataclass(frozen=True)
class Choice:
    """What was found for one length of sequences."""

    workload: LayerWorkload
    candidates: tuple[Prediction, ...]
    """The fastest first."""
    refused: tuple[Refusal, ...]

    @property
    def chosen(self) -> Prediction:
        """What to run in all MoE layers, which are alike."""
        return best(self.candidates)

    @property
    def stock(self) -> Prediction | None:
        """None where stock Megatron does not train."""
        return next((one for one in self.candidates if one.variant == ALLTOALL), None)

    def best_of(self, family: str) -> Prediction | None:
        """The fastest of a system."""
        return next((one for one in self.candidates if one.family == family), None)

    @property
    def families(self) -> list[str]:
        """Systems that have candidates, the fastest first."""
        return list(dict.fromkeys(one.family for one in self.candidates))


def report_plan(settings: PlanSettings, explain: bool, everything: bool, output: Path | None) -> None:
    """Prints the tables and the flags, and writes the plan.

    Raises:
        ConfigurationError: settings that contradict each other, or a file that cannot be written.
    """
    check_output_file("--output", output)
    if len(settings.sequences) > 1 and (output is not None or explain):
        flag = "--explain" if output is None else f"--output {output}"
        raise ConfigurationError(f"{flag} is of one length of sequences: give --sequence a single number")
    model = settings.model_shape()
    site = site_of(settings, model)
    found = {sequence: _choice(settings, model, site, sequence) for sequence in settings.sequences}
    console = report_console(WIDTH)
    if len(found) > 1:
        console.print(_choices_table(settings, site, found))
        return
    ((sequence, choice),) = found.items()
    _say(console, _heading(settings, site, choice.workload))
    console.print(_candidates_table(settings, model, site, sequence, choice, everything))
    for line in _warnings(settings, model, site, sequence, choice):
        _say(console, line)
    if choice.refused:
        console.print(_refused_table(choice.refused))
    if explain:
        console.print(_terms_table(choice))
        console.print(_costs_table(site, choice.workload))
    if output is not None:
        _plan_of(settings, model, site, choice).save(output)
        say_written(output, console)
    _say(console, "Flags for Megatron-LM, behind `python -m megatron_moe_opt.launch pretrain_gpt.py`:")
    _say(console, " ".join(megatron_flags(settings, model, site, sequence, choice.chosen.variant, output)))


def _choice(settings: PlanSettings, model: ModelShape, site: Site, sequence: int) -> Choice:
    """All MoE layers of a model are alike: one stands for them."""
    workload = workload_of(settings, model, site, sequence)
    return Choice(workload, *candidates(workload, site.cluster, settings.activation_budget))


def _plan_of(settings: PlanSettings, model: ModelShape, site: Site, choice: Choice) -> Plan:
    layers = range(model.dense_layers + 1, model.layers + 1)  # Megatron counts from 1
    sizes = {"ep": site.layout.ep, "etp": site.layout.expert_tp, "experts": model.experts}
    measured_with = site.cluster.gpu_settings
    return Plan.uniform(
        layers, choice.chosen.variant, choice.candidates, settings.cluster, gpu_settings=measured_with, **sizes
    )


def megatron_flags(
    settings: PlanSettings, model: ModelShape, site: Site, sequence: int, variant: str, plan: Path | None
) -> list[str]:
    """Arguments of pretrain_gpt.py for the layout, the MoE layers and the dispatcher.

    Args:
        plan: to run by; None: the variant's own options are given.
    """
    layout = site.layout.flags()
    if not settings.sequence_parallel:
        layout = tuple(flag for flag in layout if flag != "--sequence-parallel")
    sizes = {
        "--num-experts": model.experts,
        "--moe-router-topk": model.topk,
        "--moe-ffn-hidden-size": model.ffn,
        "--seq-length": sequence,
        "--micro-batch-size": settings.micro_batch,
    }
    flags = [*layout, *(part for flag, size in sizes.items() for part in (flag, str(size)))]
    name, options = split_variant(variant, None)
    sizes_of_domains = options.domain_sizes
    # A plan's runners-up may migrate experts where what is chosen does not.
    needs_levels = site.levels_named and (plan is not None or sizes_of_domains)
    levels = ",".join(map(str, site.workers)) if needs_levels else None
    ours = {"plan": plan, "levels": levels}
    if plan is not None:
        name = AUTO
    else:
        ours |= {
            "monta-level": options.monta_level,
            "chunks": options.chunks,
            "parm-schedule": options.parm_schedule,
            "partitions": options.partitions,
            "memory-reuse": options.memory_reuse,
            "domain-sizes": ",".join(map(str, sizes_of_domains)) if isinstance(sizes_of_domains, tuple) else None,
        }
    if options.experts_may_travel:
        flags.append("--no-gradient-accumulation-fusion")  # or training refuses them
    flags += ["--moe-token-dispatcher-type", name]
    return flags + [part for flag, value in ours.items() if value for part in (f"--moe-opt-{flag}", str(value))]


def _heading(settings: PlanSettings, site: Site, workload: LayerWorkload) -> str:
    layout, described = site.layout, site.cluster.host.get("described as")
    where = f"{settings.cluster} ({described})" if described else settings.cluster
    split = "split" if settings.sequence_parallel else "replicated"
    levels = " x ".join(map(str, workload.workers))
    return (
        f"{where}: {layout.world} GPUs, TP {layout.tp} (tokens {split}), CP {layout.cp}, PP {layout.pp}, "
        f"EP {layout.ep} ({levels}, the slowest level first), expert-TP {layout.expert_tp}; "
        f"{workload.rows} rows of {workload.row_bytes} bytes a GPU"
    )


def _candidates_table(
    settings: PlanSettings, model: ModelShape, site: Site, sequence: int, choice: Choice, everything: bool
) -> Table:
    best_of = {choice.best_of(family).variant for family in choice.families}
    shown = [
        one for number, one in enumerate(choice.candidates) if everything or number < FASTEST or one.variant in best_of
    ]
    hidden = len(choice.candidates) - len(shown)
    table = Table(
        title="A MoE layer with its experts, forward and backward of a micro-batch",
        caption="exposed: a collective runs and no expert computes; MB of 10^6: what a GPU sends; activations: rows, "
        "and what experts save; memory: of the first pipeline stage, counted with sequence parallelism"
        + (f"; {hidden} slower ones: --all" if hidden else ""),
    )
    table.add_column("dispatcher", no_wrap=True)
    headers = [
        "ms",
        "of stock",
        "exposed (ms)",
        "between nodes (MB)",
        "inside (MB)",
        "activations (MiB)",
        "memory (GiB)",
    ]
    for header in [*headers, "tokens/s a GPU", "MFU"] if site.device else headers:
        table.add_column(header, justify="right")
    table.add_column("")
    for one in shown:
        is_chosen = one is choice.chosen
        cells = _cells(settings, model, site, sequence, choice, one)
        table.add_row(one.variant, *cells, "chosen" if is_chosen else "", style="bold" if is_chosen else None)
    return table


def _cells(
    settings: PlanSettings, model: ModelShape, site: Site, sequence: int, choice: Choice, one: Prediction
) -> Iterator[str]:
    yield f"{one.seconds * 1e3:.3f}"
    yield "-" if choice.stock is None else f"{one.seconds / choice.stock.seconds:.0%}"
    yield f"{one.exposed * 1e3:.3f}"
    yield f"{one.inter_bytes / 1e6:.1f}"
    yield f"{one.intra_bytes / 1e6:.1f}"
    yield f"{one.activation_bytes / MIB:.0f}"
    yield f"{_memory(settings, model, site, sequence, choice, one) / GIB:.1f}"
    if site.device is not None:
        step = throughput(
            model, site.parallel, site.device, settings.micro_batch, sequence, settings.micro_batches, one.seconds,
            with_experts=True,
        )  # fmt: skip
        yield f"{step.tokens_per_second:.0f}"
        yield f"{step.mfu:.1%}"


def _memory(
    settings: PlanSettings, model: ModelShape, site: Site, sequence: int, choice: Choice, one: Prediction
) -> float:
    """Bytes of a GPU of the first stage: stock's, and what the candidate's layers hold more, or less."""
    parallel = site.parallel
    stock: StageMemory = training_memory(model, parallel, settings.micro_batch, sequence, settings.micro_batches)
    unpartitioned = choice.workload.mpmoe.activation_bytes(choice.workload.rows, 1, "none")
    layers = model.layers // parallel.pp - min(model.dense_layers, model.layers // parallel.pp)
    held = layers * min(parallel.pp, settings.micro_batches)
    return stock.total + held * (one.activation_bytes - unpartitioned)


def _warnings(settings: PlanSettings, model: ModelShape, site: Site, sequence: int, choice: Choice) -> Iterator[str]:
    if choice.chosen.variant == ALLTOALL:
        yield f"Nothing takes less than {1 - WINS_BY:.0%} of what stock Megatron's alltoall takes: stock it is."
    needs = _memory(settings, model, site, sequence, choice, choice.chosen)
    if site.memory is not None and needs > site.memory:
        yield (
            f"{choice.chosen.variant} needs {needs / GIB:.1f} GiB, a GPU has {site.memory / GIB:.1f}: recompute "
            "activations, or choose more parallelism or smaller micro-batches"
        )


def _refused_table(refused: Sequence[Refusal]) -> Table:
    """One row for all refusals of a system that differ in their numbers alone."""
    alike: dict[tuple[str, str], list[Refusal]] = {}
    for one in refused:
        alike.setdefault((one.variant.partition(":")[0], re.sub(r"[0-9]+", "", one.reason)), []).append(one)
    table = Table(title="Not candidates")
    table.add_column("dispatcher")
    table.add_column("why")
    for first, *others in alike.values():
        table.add_row(first.variant + (f" and {len(others)} more" if others else ""), first.reason)
    return table


def _terms_table(choice: Choice) -> Table:
    """Of the best of each system."""
    shown = [choice.best_of(family) for family in choice.families]
    table = Table(title="What the times are made of (ms)")
    table.add_column("dispatcher")
    names = list(dict.fromkeys(name for one in shown for name in one.terms))
    for name in (*names, "sum"):
        table.add_column(name, justify="right")
    for one in shown:
        terms = (one.terms.get(name) for name in names)
        cells = ("" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in terms)
        table.add_row(one.variant, *cells, f"{one.seconds * 1e3:.3f}")
    return table


def _costs_table(site: Site, workload: LayerWorkload) -> Table:
    """Of the ops that candidates are made of, at the sizes of one pass that is not cut."""
    table = Table(
        title="What ops cost, in one piece",
        caption=f"Every op takes {site.cluster.overhead * 1e6:g} us besides; GB/s: bytes of the op over its time",
    )
    for header in ("op", "group", "MB", "ms", "GB/s"):
        table.add_column(header, justify="left" if header in ("op", "group") else "right")
    costs = workload.mpmoe.costs(site.cluster)
    own = workload.rows * workload.row_bytes
    for (kind, group), curve in costs.curves.items():
        if group in ("dp", "cp"):
            continue  # no part of a MoE layer
        size = own if kind is Kind.ALL_TO_ALL and group == "ep" else own * workload.etp
        if group == "tp":
            size = workload.tokens * workload.row_bytes
        if group is not None and " level " in group:  # expert-migration: tokens once, or a rank's experts
            size = workload.tokens * workload.row_bytes if kind is Kind.ALL_TO_ALL else workload.expert_bytes
        seconds = curve.seconds(size)
        rate = "" if kind in _EXPERTS else f"{size / seconds / 1e9:.1f}"
        table.add_row(_EXPERTS.get(kind, kind.value), group or "", f"{size / 1e6:.1f}", f"{seconds * 1e3:.3f}", rate)
    for whose in (STOCK, OURS):
        points = site.cluster.local_work.get(whose)
        if points:
            seconds = CostCurve(points).seconds(own)
            table.add_row("rows on the rank", whose, f"{own / 1e6:.1f}", f"{seconds * 1e3:.3f}", "")
    return table


def _choices_table(settings: PlanSettings, site: Site, found: dict[int, Choice]) -> Table:
    """A row for each length of sequences, and the best of each system."""
    families = list(dict.fromkeys(one for choice in found.values() for one in sorted(choice.families)))
    paper = MONTA_CHOICES if _is_montas(settings, site) else {}
    table = Table(title=f"{settings.cluster}: a MoE layer with its experts (ms), forward and backward of a micro-batch")
    table.add_column("sequence", justify="right")
    table.add_column("rows a GPU", justify="right")
    table.add_column("chosen")
    for family in families:
        table.add_column(family)
    if paper:
        table.add_column("MoNTA's paper")
    for sequence, choice in found.items():
        of_families = [choice.best_of(family) for family in families]
        cells = ("-" if one is None else _with_setting(one) for one in of_families)
        last = [paper.get(sequence, "-")] if paper else []
        table.add_row(str(sequence), str(choice.workload.rows), choice.chosen.variant, *cells, *last)
    return table


def _with_setting(one: Prediction) -> str:
    setting = one.variant.partition(":")[2]
    return f"{one.seconds * 1e3:.2f}" + (f" {setting}" if setting else "")


def _is_montas(settings: PlanSettings, site: Site) -> bool:
    """Whether this is what MoNTA's paper publishes its choices for."""
    layout = site.layout
    sizes = layout.world, layout.tp, layout.ep, layout.expert_tp
    return (settings.cluster, settings.model, sizes) == ("a800-ib200", "monta-2x70b", (16, 8, 2, 8))


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
