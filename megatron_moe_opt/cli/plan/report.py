"""`moe-opt plan`: candidates for a model on a cluster, the choice among them, and what to start a training with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.console import report_console, say, say_written, table_of
from megatron_moe_opt.cli.plan.advice import advice, does_not_fit, expansion_advice, pipeline_of
from megatron_moe_opt.cli.plan.case import Case, fits_part
from megatron_moe_opt.cli.plan.layout_search import Wanted, layouts_table, search
from megatron_moe_opt.cli.plan.settings import PlanSettings, Site, site_of
from megatron_moe_opt.cli.report.timeline_files import check_timeline_files, timelines_table, write_timelines
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.gpu_settings import CONNECTIONS
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.planning.costs.cluster import EXPERT, OURS, ROW, STOCK, TYPE
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.costs.expert_costs import costs_with_experts
from megatron_moe_opt.planning.costs.known_clusters import GIB
from megatron_moe_opt.planning.predicting.baselines import baselines
from megatron_moe_opt.planning.predicting.layer_on_cluster import EXPERTS, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal, told_together
from megatron_moe_opt.planning.training.known_models import MONTA_CHOICES
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import OVERLAP
from megatron_moe_opt.planning.training.step_costs import PP_NEIGHBOURS
from megatron_moe_opt.schedules.mpmoe import HOPS
from megatron_moe_opt.schedules.schedule import CODEC, Kind
from megatron_moe_opt.schedules.timeline import numbered, one_after_another
from megatron_moe_opt.systems.system import FLAG, PREFIX
from megatron_moe_opt.topology.layouts import Layout, mixes_expert_gradients
from megatron_moe_opt.variants import FLEX, split_variant

WIDTH = 100
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
"""The flags of the optimizer that the memory and the time of a step are predicted for."""
RECOMPUTE_FLAGS = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
}
FASTEST = 10
"""The number of candidates that are shown, besides the best of each system."""
_FLEX = Refusal(FLEX, "no times of DeepEP or HybridEP here: auto tries it where they are installed, --all guesses")
MIB = 2**20
_EXPERTS = {Kind.COMPUTE: "experts, forward", Kind.GRADIENT: "experts, backward"}


@dataclass(frozen=True)
class Drawing:
    """Which candidates' lanes to write, and where to."""

    variants: tuple[str, ...]
    """The candidates to draw, one under the other; empty: the chosen one."""
    files: tuple[Path, ...]

    def check(self, settings: PlanSettings) -> None:
        """Refuses, with ConfigurationError, files that cannot be written, and a candidate without a file."""
        check_timeline_files("--lanes", self.files, [("--cluster", settings.cluster)])
        if self.variants and not self.files:
            raise ConfigurationError(f"--draw {','.join(self.variants)} has no file to draw in: give --lanes FILE")


def report_plan(
    settings: PlanSettings,
    wanted: Wanted | None,
    explain: bool,
    everything: bool,
    output: Path | None,
    drawing: Drawing,
) -> None:
    """Prints the tables, the advice and the flags, and writes the plan and the planned lanes.

    Args:
        wanted: the training whose layout is to be found; None: the settings have one.

    Raises:
        ConfigurationError: settings that contradict each other, a file that cannot be written, or a plan to write of
            what does not fit.
    """
    drawing.check(settings)
    lanes = [("--lanes", file) for file in drawing.files]
    check_output_file("--output", output, others=[("--cluster", settings.cluster), *lanes])
    flag = f"--output {output}" if output is not None else "--explain" if explain else None
    if flag is None and drawing.files:
        flag = f"--lanes {drawing.files[0]}"
    if len(settings.sequences) > 1 and flag is not None:
        raise ConfigurationError(f"{flag} is of one length of sequences: give --sequence a single number")
    model, console, stock = settings.model_shape(), report_console(WIDTH), None
    if wanted is not None:
        searched = search(settings, model, wanted)
        console.print(layouts_table(searched))
        cases, stock = [searched.cases[0].predicted()], searched.stock
    else:
        site = site_of(settings, model)
        cases = [Case.of(settings, model, site, sequence) for sequence in settings.sequences]
    for doubt in _doubts(cases[0]):
        say(console, f"warning: {doubt}")
    if len(cases) > 1:
        console.print(_choices_table(cases))
        return
    (case,) = cases
    drawn = [case.candidate(variant) for variant in drawing.variants] or [case.chosen]
    say(console, _heading(case))
    console.print(_candidates_table(case, everything))
    console.print(_wires_table(case))
    console.print(_refused_table((*case.refused, _FLEX)))
    if everything:
        console.print(_baselines_table(case))
    if explain:
        _explain(case, console)
    if drawing.files:
        _draw(drawn, drawing, console)
    if not case.fits(case.chosen):
        if output is not None:
            raise ConfigurationError(f"--output {output}: there is nothing to run by: {does_not_fit(case)}")
        say(console, does_not_fit(case))
        return
    if output is not None:
        case.plan().save(output)
        say_written(output, console)
    say(console, advice(case, stock))
    if case.expansion is not None:
        say(console, expansion_advice(case.expansion))
    say(
        console,
        "Flags for Megatron-LM, beside the model's own (layers, hidden size, activation, dtype), behind `python -m "
        f"megatron_moe_opt.launch pretrain_gpt.py`, with {CONNECTIONS}={_queues(case)}:",
    )
    say(console, " ".join(megatron_flags(case, output)))


def _doubts(case: Case) -> Iterator[str]:
    """Yields why times may not hold, or a training may not: what the file of the measurements warns of, that they are
    of another layer, that memory is not known, and a layout in which Megatron sums experts' gradients wrongly.
    """
    cluster, file, layout = case.site.cluster, case.settings.cluster, case.site.layout
    yield from (f"{file}: {warning}" for warning in cluster.warnings)
    here = {ROW: case.model.hidden, EXPERT: case.model.ffn, TYPE: case.settings.dtype}
    others = cluster.made_otherwise(here)
    if others is not None:
        yield f"{file}: measured for another layer, and its times may not hold: {others}"
    if case.site.memory is None:
        yield (
            f"{file}: a profile does not hold the memory of a GPU, and nothing is left out for want of it: give its "
            f"GiB, as in --cluster {file},memory=80"
        )
    if mixes_expert_gradients(layout.tp, layout.ep, layout.expert_tp):
        yield (
            f"--expert-tp {layout.expert_tp} beside --tp {layout.tp} at --ep 1: Megatron before 0.19 sums experts' "
            f"gradients over ranks that do not hold the same experts: set --expert-tp {layout.tp}, raise --ep, or "
            "train with megatron-core 0.19"
        )


def _queues(case: Case) -> str:
    """Returns the number of hardware queues to train with, and what is to be said of it."""
    cluster, layout, file = case.site.cluster, case.site.layout, case.settings.cluster
    measured = str((cluster.gpu_settings or {}).get(CONNECTIONS, "32"))
    if cluster.one_queue:
        return "1, which Megatron demands here"
    if case.settings.known is not None or case.settings.overlaps or max(layout.tp, layout.cp) == 1 or measured == "1":
        return measured
    return (
        f"1 on GPUs before Blackwell, as Megatron demands at TP {layout.tp} and CP {layout.cp}, though {file} does not "
        f"say that it was measured so, else {measured}"
    )


def _draw(drawn: Sequence[Prediction], drawing: Drawing, console: Console) -> None:
    """Prints how the lanes of each candidate overlap, and writes them."""
    timelines = {}
    for one in drawn:
        parts = numbered(one.timelines)
        console.print(timelines_table(one.variant, parts))
        timelines["planned" if len(drawn) == 1 else one.variant] = one_after_another(one.variant, parts)
    write_timelines(timelines, drawing.files, console)


def megatron_flags(case: Case, plan: Path | None) -> list[str]:
    """Returns the arguments of pretrain_gpt.py for the layout, the MoE layers and the dispatcher.

    Args:
        plan: to run by; None: the chosen variant's own options are given.
    """
    settings, site = case.settings, case.site
    layout = site.layout.flags()
    if not settings.sequence_parallel:
        layout = tuple(flag for flag in layout if flag != "--sequence-parallel")
    sizes = {
        "--num-experts": case.model.experts,
        "--moe-router-topk": case.model.topk,
        "--moe-ffn-hidden-size": case.model.ffn,
        "--seq-length": case.sequence,
        "--micro-batch-size": settings.micro_batch,
        "--global-batch-size": settings.micro_batch * settings.micro_batches * site.layout.dp,
    }
    flags = [*layout, *DISTRIBUTED_OPTIMIZER, *RECOMPUTE_FLAGS[settings.recompute]]
    if settings.dtype != "fp32":  # Megatron-LM has grouped products of bf16 alone
        flags.append("--moe-grouped-gemm")
    if case.model.topk == 1:  # or Megatron refuses the router's softmax, which would always be 1
        flags.append("--moe-router-pre-softmax")
    sizes |= pipeline_flags(case.model, site.layout)
    if settings.overlaps:
        flags.append(OVERLAP)
    if dense := case.model.dense_layers:
        sizes["--moe-layer-freq"] = f'"([0]*{dense}+[1]*{case.model.layers - dense})"'
        sizes["--ffn-hidden-size"] = case.model.dense_ffn
    if case.model.shared_ffn:
        sizes["--moe-shared-expert-intermediate-size"] = case.model.shared_ffn
    if settings.capacity_factor is not None:
        sizes["--moe-expert-capacity-factor"] = f"{settings.capacity_factor:g}"
        flags.append("--moe-pad-expert-input-to-capacity")
    flags += [part for flag, size in sizes.items() for part in (flag, str(size))]
    name, options = split_variant(case.chosen.variant, None)
    # A plan's runners-up may migrate experts where what is chosen does not.
    needs_levels = site.levels_named and (plan is not None or options.domain_sizes or HOPS in options.ways)
    if plan is not None:
        name, options = AUTO, Options(plan=plan)
    if needs_levels:
        options = replace(options, network_levels=site.workers)
    return [*flags, FLAG, name, *options.words()]


def pipeline_flags(model: ModelShape, layout: Layout) -> dict[str, int | str]:
    """Returns the arguments, besides the pipeline's size, by which Megatron lays the layers as ModelShape does."""
    if model.layers % layout.chunks == 0:
        return {"--num-virtual-stages-per-pipeline-rank": layout.vpp} if layout.vpp > 1 else {}
    last = model.layers_of_stage(layout, layout.pp - 1)
    if layout.vpp == 1 and last:
        return {"--decoder-last-pipeline-num-layers": last}
    # E, t and L are the embedding, a transformer layer and the logits with the loss.
    each = -(-model.layers // layout.chunks)
    alike, left = divmod(model.layers, each)
    others = [f"t*{left}"] * (left > 0) + [""] * (layout.chunks - alike - (left > 0))
    return {"--pipeline-model-parallel-layout": f'"E(t*{each}|)*{alike}{"|".join(others)}L"'}


def _heading(case: Case) -> str:
    settings, workload, layout = case.settings, case.workload, case.site.layout
    described = case.site.cluster.host.get("described as")
    where = f"{settings.cluster} ({described})" if described else settings.cluster
    split = "split" if settings.sequence_parallel else "replicated"
    levels = f" ({' x '.join(map(str, workload.workers))}, the slowest level first)" if workload.workers else ""
    return (
        f"{where}: {layout.world} GPUs, TP {layout.tp} (tokens {split}), CP {layout.cp}, {pipeline_of(layout)}, "
        f"EP {layout.ep}{levels}, expert-TP {layout.expert_tp}; "
        f"{workload.rows} rows of {workload.row_bytes} bytes a GPU"
    )


def _candidates_table(case: Case, everything: bool) -> Table:
    best_of = {case.best_of(family).variant for family in case.families}
    shown = [
        one for number, one in enumerate(case.candidates) if everything or number < FASTEST or one.variant in best_of
    ]
    hidden = len(case.candidates) - len(shown)
    headers = [
        "dispatcher", "ms", "of stock", "exposed ms", "between nodes MB", "inside MB", "held MiB", "GPU GiB",
    ]  # fmt: skip
    table = table_of(
        "A MoE layer with its experts, forward and backward of a micro-batch",
        [*headers, "tokens/s", "MFU"] if case.site.device else headers,
        caption="exposed: a collective runs and no expert computes; MB of 10^6: what a GPU sends; held: rows, and what "
        "experts save; GPU: all memory, of the fullest pipeline stage, with sequence parallelism; tokens/s of a GPU"
        + (f"; {hidden} slower ones: --all" if hidden else ""),
    )
    table.add_column("")
    table.padding = (0, 0)  # for 100 columns
    for one in shown:
        is_chosen = one is case.chosen
        table.add_row(one.variant, *_cells(case, one), "chosen" if is_chosen else "", style="bold" * is_chosen)
    return table


def _wires_table(case: Case) -> Table:
    """Returns the fastest candidate for each format in which rows would take fewer bytes; none of them is chosen."""
    table = table_of(
        f"With rows narrower on the wire ({PREFIX}wire): lossy, and never chosen here",
        ("format", "fastest dispatcher", "ms", "of the chosen", "between nodes MB", "inside MB"),
        names=2,
    )
    for wire, one in case.narrowed.items():
        table.add_row(
            str(wire),
            one.variant,
            f"{one.seconds * 1e3:.3f}",
            f"{one.seconds / case.chosen.seconds:.0%}",
            f"{one.inter_bytes / 1e6:.1f}",
            f"{one.intra_bytes / 1e6:.1f}",
        )
    return table


def _cells(case: Case, one: Prediction) -> Iterator[str]:
    yield f"{one.seconds * 1e3:.3f}"
    yield "-" if case.stock is None else f"{one.seconds / case.stock.seconds:.0%}"
    yield f"{one.exposed * 1e3:.3f}"
    yield f"{one.inter_bytes / 1e6:.1f}"
    yield f"{one.intra_bytes / 1e6:.1f}"
    yield f"{one.activation_bytes / MIB:.0f}"
    yield f"{case.memory(one) / GIB:.1f}"
    step = case.step(one)
    if step is not None:
        yield f"{step.tokens_per_second:.0f}"
        yield f"{step.mfu:.1%}"


def _refused_table(refused: Sequence[Refusal]) -> Table:
    return table_of("Not candidates", ("dispatcher", "why"), told_together(refused), names=2)


def _baselines_table(case: Case) -> Table:
    """Returns what others would take, on the same costs; where micro-batches overlap, those that can."""
    found = baselines(LayerOnCluster(case.workload, case.site.cluster))
    if case.beside is not None:
        found = tuple(case.beside(one) for one in found if EXPERTS in one.terms)
    rows = ((one.variant, f"{one.seconds * 1e3:.3f}", f"{one.seconds / case.chosen.seconds:.2f}") for one in found)
    return table_of("For comparison, not to choose from", ("schedule", "ms", "of the chosen"), rows)


def _explain(case: Case, console: Console) -> None:
    """Prints what the times are made of, what ops cost, and what Parm's own rule says where it applies."""
    from megatron_moe_opt.cli.plan.algorithm_1 import algorithm_1_of

    console.print(_terms_table(case))
    console.print(_costs_table(case.site, case.workload))
    for part in algorithm_1_of(case.workload, case.site.cluster):
        console.print(part, highlight=False, soft_wrap=True)


def _terms_table(case: Case) -> Table:
    """Returns what the time of the best candidate of each system is the sum of."""
    shown = [case.best_of(family) for family in case.families]
    names = list(dict.fromkeys(name for one in shown for name in one.terms))
    table = table_of("What the times are made of (ms)", ("dispatcher", *names, "sum"))
    for one in shown:
        terms = (one.terms.get(name) for name in names)
        cells = ("" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in terms)
        table.add_row(one.variant, *cells, f"{one.seconds * 1e3:.3f}")
    return table


def _costs_table(site: Site, workload: LayerWorkload) -> Table:
    """Returns what the ops that candidates are made of cost, at the sizes of one pass that is not cut."""
    table = table_of(
        "What ops cost, in one piece",
        ("op", "group", "MB", "ms", "GB/s"),
        names=2,
        caption=f"Every op takes {site.cluster.overhead * 1e6:g} us besides; GB/s: bytes of the op over its time",
    )
    costs = costs_with_experts(workload, site.cluster)
    own = workload.rows * workload.row_bytes
    for (kind, group), curve in costs.curves.items():
        if group in ("dp", "expert-dp", "cp", PP_NEIGHBOURS):
            continue  # no part of a MoE layer
        size = own if kind is Kind.ALL_TO_ALL and group == "ep" else own * workload.etp
        if group == "tp":
            size = workload.tokens * workload.row_bytes
        if group is not None and " level " in group:  # expert-migration: tokens once, or a rank's experts
            size = workload.tokens * workload.row_bytes if kind is Kind.ALL_TO_ALL else workload.expert_bytes
        if kind in CODEC:  # a rank's experts, or in float32 their gradients
            in_float32 = 4 / workload.element_bytes if kind in (Kind.ENCODE_GRADIENT, Kind.DECODE_GRADIENT) else 1
            size = int(workload.expert_bytes * in_float32)
        seconds = curve.seconds(size)
        rate = "" if kind in _EXPERTS else f"{size / seconds / 1e9:.1f}"
        table.add_row(_EXPERTS.get(kind, kind.value), group or "", f"{size / 1e6:.1f}", f"{seconds * 1e3:.3f}", rate)
    for whose in (STOCK, OURS):
        points = site.cluster.local_work.get(whose)
        if points:
            seconds = CostCurve(points).seconds(own)
            table.add_row("rows on the rank", whose, f"{own / 1e6:.1f}", f"{seconds * 1e3:.3f}", "")
    return table


def _choices_table(cases: Sequence[Case]) -> Table:
    """Returns a row for each length of sequences, with the best candidate of each system."""
    families = list(dict.fromkeys(one for case in cases for one in sorted(case.families)))
    paper = MONTA_CHOICES if _is_montas(cases[0]) else {}
    fit = all(case.fits(case.chosen) for case in cases)
    too_large = f"does not fit: nothing does in {fits_part(cases[0].settings.overlaps):.0%} of a GPU's memory"
    table = table_of(
        f"{cases[0].settings.cluster}: a MoE layer with its experts (ms), forward and backward of a micro-batch",
        ("sequence", "rows a GPU"),
        names=0,
        caption=None if fit else too_large,
    )
    for header in ("chosen", *families, *(["MoNTA's paper"] if paper else [])):
        table.add_column(header, overflow="fold")
    for case in cases:
        of_families = [case.best_of(family) for family in families]
        cells = ("-" if one is None else _with_setting(one) for one in of_families)
        last = [paper.get(case.sequence, "-")] if paper else []
        chosen = case.chosen.variant + ("" if case.fits(case.chosen) else " (does not fit)")
        table.add_row(str(case.sequence), str(case.workload.rows), chosen, *cells, *last)
    return table


def _with_setting(one: Prediction) -> str:
    setting = one.variant.partition(":")[2]
    return f"{one.seconds * 1e3:.2f}" + (f" {setting}" if setting else "")


def _is_montas(case: Case) -> bool:
    """Whether the case is the cluster, model and layout for which MoNTA's paper publishes its choices."""
    layout = case.site.layout
    sizes = layout.world, layout.tp, layout.ep, layout.expert_tp
    return (case.settings.cluster, case.settings.model.name, sizes) == ("a800-ib200", "monta-2x70b", (16, 8, 2, 8))
