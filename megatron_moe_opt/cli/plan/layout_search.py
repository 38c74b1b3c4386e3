"""Which layout of a known cluster trains a model fastest, of those whose memory suffices."""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rich.progress import Progress
from rich.table import Table

from megatron_moe_opt.cli.console import progress_console, table_of
from megatron_moe_opt.cli.plan.case import Case, fits_part
from megatron_moe_opt.cli.plan.settings import PlanSettings, Site, check_model, check_overlap, site_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.known_clusters import GIB, KNOWN_CLUSTERS
from megatron_moe_opt.planning.planner import bound_and_stock, candidates
from megatron_moe_opt.planning.training.arrangements import Arrangement, arrangements
from megatron_moe_opt.planning.training.memory import RECOMPUTE, BytesPerParameter, layer_activations, telling_stages
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import OVERLAP
from megatron_moe_opt.topology.layouts import Layout, divisors

SHOWN = 8
TOKENS_OF_STEP = 4 * 2**20
"""The tokens of a step, nearly, where --global-batch does not say how many sequences it has."""


@dataclass(frozen=True)
class Wanted:
    """The training that a layout is searched for."""

    global_batch: int | None
    """Sequences of a training step; None: as many as have TOKENS_OF_STEP."""
    micro_batch: int | None
    """Sequences of a micro-batch; None: it is searched too."""
    recompute: str | None
    """A value of memory.RECOMPUTE; None: none or full, whichever is faster."""
    overlaps: bool | None
    """Whether micro-batches overlap; None: whichever is faster."""


def wanted_of(
    cluster: str,
    of_layout: Mapping[str, int | str | None],
    global_batch: int | None,
    micro_batch: int | None,
    recompute: str | None,
    overlaps: bool | None,
) -> Wanted | None:
    """Returns what to search a layout for; None where the options have one, or the cluster was measured with one.

    Args:
        of_layout: values of the options that say how ranks are laid out, None where not given.

    Raises:
        ConfigurationError: --global-batch beside a layout.
    """
    given = [f"{flag} {value}".strip() for flag, value in of_layout.items() if value is not None]
    if given or cluster not in KNOWN_CLUSTERS:
        if global_batch is not None:
            beside = given[0] if given else f"--cluster {cluster}, which was measured in a layout"
            raise ConfigurationError(
                f"--global-batch {global_batch} is for layouts that are searched, beside {beside}: give --micro-batches"
            )
        return None
    return Wanted(global_batch, micro_batch, recompute, overlaps)


@dataclass(frozen=True)
class Searched:
    """The fastest layouts, and how many there were."""

    cases: tuple[Case, ...]
    """The SHOWN fastest cases, each with predictions of what runs its MoE layers fastest, not of all candidates."""
    stock: Case | None
    """The case in which stock `alltoall` has the most tokens a second; None where it fits in none."""
    compared: int
    """The number of arrangements of layout, micro-batch and recomputation that may fit."""
    too_large: int
    """Number of arrangements that do not fit, whatever the dispatcher."""
    global_batch: int
    """The sequences of a step."""


def default_batch(sequence: int, world: int) -> int:
    """Returns how many sequences a step has, of TOKENS_OF_STEP tokens or nearly: a multiple of the largest divisor of
    the GPUs that is not above it, so that layouts can share them out evenly.
    """
    sequences = max(1, TOKENS_OF_STEP // sequence)
    ranks = max(one for one in divisors(world) if one <= sequences)
    return round(sequences / ranks) * ranks


@contextmanager
def _no_collections() -> Iterator[None]:
    """Has nobody look for garbage in cycles, of which a search leaves none: it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collections()
def search(settings: PlanSettings, model: ModelShape, wanted: Wanted) -> Searched:
    """Predicts a training step under the arrangements that fit, as far as they could be among the fastest.

    The step time of stock without any wait for communication is a lower bound for every dispatcher. Arrangements are
    predicted in the order of the tokens a second that this bound allows, the most first. The search ends where it
    allows fewer than the slowest of the SHOWN fastest has, or than stock has in SHOWN arrangements. Candidates that are
    known to have fewer are not predicted.

    Raises:
        ConfigurationError: nothing fits, and what is needed at least; no layout can be planned, and why; or several
            lengths of sequences.
    """
    check_model(model, Layout())
    sequence, *others = settings.sequences
    if others:
        listed = ",".join(map(str, settings.sequences))
        raise ConfigurationError(
            f"--sequence {listed}: a layout is searched for one length of sequences: give one, or --ep and the like"
        )
    known, world = KNOWN_CLUSTERS[settings.cluster], settings.needs_world()
    global_batch = wanted.global_batch or default_batch(sequence, world)
    known.levels(world)  # refuses GPUs that fill no nodes
    cp = settings.sizes["--cp"] or 1
    if wanted.overlaps:
        check_overlap(wanted.recompute, settings.dtype)
    overlaps = False if settings.dtype == "fp32" else wanted.overlaps
    sizes_of_step = model, world, known.node, global_batch, wanted.micro_batch, wanted.recompute, cp
    of_step = list(arrangements(*sizes_of_step, overlaps))
    if not of_step and overlaps and any(True for _ in arrangements(*sizes_of_step)):
        raise ConfigurationError(
            f"{OVERLAP} needs EP above 1 and, in a pipeline, virtual stages, and no layout of --world {world} has "
            "them: drop it, or take more GPUs"
        )
    if not of_step:
        sizes = {
            "--world": world, "--cp": settings.sizes["--cp"], "--micro-batch": wanted.micro_batch,
            "--global-batch": wanted.global_batch,
        }  # fmt: skip
        given = " ".join(f"{flag} {size}" for flag, size in sizes.items() if size is not None)
        raise ConfigurationError(
            f"{given}: no layout cuts the model and the {global_batch} sequences of a step into equal parts: choose "
            "sizes that divide the GPUs and the sequences, or a --global-batch that is a multiple of the GPUs"
        )
    if not any(one.layout.cuts(sequence) for one in of_step):
        raise ConfigurationError(
            f"--sequence {sequence} is cut by no layout with --cp {cp}: choose a multiple of "
            f"{min(one.layout.least_sequence for one in of_step)}"
        )
    needed = {one: _least_memory(model, one, sequence, settings.element_bytes) for one in of_step}
    small = [one for one in of_step if needed[one] <= fits_part(one.overlaps) * settings.memory]
    if not small:
        raise ConfigurationError(
            f"--world {world}: no layout holds the model, a GPU of the smallest would need "
            f"{min(needed.values()) / GIB:.1f} GiB and has {settings.memory / GIB:.1f}: take more GPUs"
        )
    found: list[Case] = []
    overlapping: dict[Hashable, Case] = {}
    console = progress_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bounded = _bounded(settings, model, progress.track(small, description="layouts"))
        of_stock = _with_stock(bounded)
        enough = _tokens_of_stock(of_stock)
        for bound in progress.track(bounded, description="dispatchers"):
            least = enough
            if len(found) == SHOWN:
                least = max(least, found[-1].step(found[-1].chosen).tokens_per_second)
            if _most_tokens(bound) <= least:
                break
            case = _predicted(bound, least, overlapping)
            if case.fits(case.chosen):
                found = sorted([*found, case], key=lambda one: -one.step(one.chosen).tokens_per_second)[:SHOWN]
    if not found:
        raise ConfigurationError(f"--world {world}: no layout holds the model's activations: take more GPUs, or --cp")
    _, stock = max(of_stock, key=lambda one: one[0], default=(0.0, None))
    return Searched(tuple(found), stock, len(small), len(of_step) - len(small), global_batch)


def _predicted(bound: Case, least: float, overlapping: dict[Hashable, Case]) -> Case:
    """Returns an arrangement with its candidates; without overlap only with those that may be chosen there, and have
    more than so many tokens a second.

    Args:
        overlapping: the cases so far in which micro-batches overlap, by what decides a MoE layer.
    """
    if not bound.settings.overlaps:
        return bound.predicted(partial(candidates, below=_seconds_for(bound, least), has_room=bound.has_room))
    of_layer = _of_layer(bound.site.layout, bound.settings, bound.model)
    if of_layer not in overlapping:
        overlapping[of_layer] = bound.predicted()
    return replace(overlapping[of_layer], settings=bound.settings, site=bound.site)


def _of_layer(layout: Layout, settings: PlanSettings, model: ModelShape) -> Hashable:
    """Returns what decides the MoE layers of an arrangement: recomputation and virtual stages make no difference."""
    groups = replace(layout, vpp=1)
    return groups, settings.overlaps, settings.micro_batch, model.most_moe_layers(layout)


def _bounded(settings: PlanSettings, model: ModelShape, ones: Iterable[Arrangement]) -> list[Case]:
    """Returns the arrangements, each with a lower bound on its step time, the one with the most possible tokens a
    second first.

    Layouts whose EP groups lie on the network unevenly are left out: their costs cannot be described.

    Raises:
        ConfigurationError: all are refused, and the last one why.
    """
    sites: dict[tuple[Layout, bool], Site | None] = {}
    alike: dict[Hashable, Case] = {}
    found: list[Case] = []
    refusal: ConfigurationError | None = None
    for one in ones:
        if not one.layout.cuts(settings.sequences[0]):
            continue
        of_layout = settings.arranged(one)
        groups = replace(one.layout, vpp=1), one.overlaps
        if groups not in sites:
            try:
                sites[groups] = site_of(of_layout, model)
            except ConfigurationError as error:
                sites[groups], refusal = None, error
        site = sites[groups]
        if site is not None:
            of_layer = _of_layer(one.layout, of_layout, model)
            if of_layer not in alike:
                alike[of_layer] = Case.of(of_layout, model, site, settings.sequences[0], bound_and_stock)
            found.append(replace(alike[of_layer], settings=of_layout, site=replace(site, layout=one.layout)))
    if refusal is not None and not found:
        raise refusal
    return sorted(found, key=lambda one: (-_most_tokens(one), not one.settings.overlaps))


def _most_tokens(bound: Case) -> float:
    return bound.step(bound.candidates[0]).tokens_per_second


def _with_stock(bounded: Iterable[Case]) -> list[tuple[float, Case]]:
    """Returns (stock's tokens a second, case) of each arrangement in which stock fits; the case has no lower bound any
    more.
    """
    of_stock = (replace(one, candidates=one.candidates[1:]) for one in bounded)
    return [(one.step(one.stock).tokens_per_second, one) for one in of_stock if one.fits(one.stock)]


def _tokens_of_stock(of_stock: Iterable[tuple[float, Case]]) -> float:
    """Returns tokens a second that stock has in SHOWN of the arrangements: what is shown has no fewer.

    Where all layers are run again, what takes less time may have fewer tokens a second: it may wait for more of it.
    """
    found = [tokens for tokens, one in of_stock if one.settings.recompute != RECOMPUTE[-1]]
    return sorted(found)[-SHOWN] * (1 - 1e-6) if len(found) >= SHOWN else 0.0  # stock itself is to be shown, too


def _seconds_for(bound: Case, least: float) -> float:
    """Returns what a MoE layer may take, so that a step has more than so many tokens a second if it hides all that it
    communicates: with as many seconds, and with more, no step has.
    """
    if not least:
        return math.inf

    def suffices(seconds: float) -> bool:
        return bound.step(replace(bound.candidates[0], seconds=seconds)).tokens_per_second > least

    enough = bound.candidates[0].seconds
    too_many = 2 * enough
    while suffices(too_many):
        enough, too_many = too_many, 2 * too_many
    while too_many > enough * (1 + 1e-6):
        middle = (enough + too_many) / 2
        enough, too_many = (middle, too_many) if suffices(middle) else (enough, middle)
    return too_many


def _least_memory(model: ModelShape, one: Arrangement, sequence: int, element_bytes: int) -> float:
    """Returns bytes that a GPU of the pipeline stage that holds most has even where its experts save nothing."""
    layout, batch = one.layout, (one.micro_batch, sequence)
    terms = layer_activations(model, layout, *batch, element_bytes=element_bytes)
    of_experts = sum(size for name, size in terms.items() if name.startswith("expert"))
    if one.recompute == RECOMPUTE[-1]:
        of_experts = 0
    stages = telling_stages(
        model, layout, *batch, one.micro_batches, one.recompute, BytesPerParameter.of(element_bytes),
        overlaps=one.overlaps,
    )  # fmt: skip
    return max(stage.memory.total - of_experts * stage.moe_layers * stage.passes + stage.logits for stage in stages)


def layouts_table(searched: Searched) -> Table:
    """Returns one row for each layout, the fastest first."""
    headers = (
        "dispatcher", "1F1B", "TP", "PP", "VPP", "EP", "expert-TP", "batch", "recompute", "tokens/s", "x stock", "MFU",
        "GiB",
    )  # fmt: skip
    table = table_of(
        f"Layouts that fit, a training step of {searched.global_batch} sequences of each",
        headers,
        caption=f"1F1B: micro-batches overlap ({OVERLAP}); VPP: virtual pipeline stages; batch: sequences of a "
        "micro-batch; tokens/s of a GPU; x stock: times those of stock alltoall in its own best layout; GiB of a GPU "
        f"of the fullest stage. {searched.compared} layouts with micro-batches, recomputation and overlap compared, "
        f"{searched.too_large} do not fit",
    )
    table.padding = (0, 0)  # for 100 columns
    for number, case in enumerate(searched.cases):
        table.add_row(*_cells(case, searched.stock), style="bold" * (number == 0))
    return table


def _cells(case: Case, stock: Case | None) -> tuple[str, ...]:
    layout, chosen = case.site.layout, case.chosen
    step = case.step(chosen)
    return (
        chosen.variant,
        "yes" if case.settings.overlaps else "no",
        *map(str, (layout.tp, layout.pp, layout.vpp, layout.ep, layout.expert_tp, case.settings.micro_batch)),
        case.settings.recompute,
        f"{step.tokens_per_second:.0f}",
        "-" if stock is None else f"{step.tokens_per_second / stock.step(stock.stock).tokens_per_second:.2f}",
        f"{step.mfu:.1%}",
        f"{case.memory(chosen) / GIB:.1f}",
    )
