"""What `auto` says: what it plans to try, and what stays."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_moe_opt.planning.choosing.contenders import median_within
from megatron_moe_opt.planning.choosing.trials import shortlist
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, told_together
from megatron_moe_opt.systems import moves_samples
from megatron_moe_opt.systems.system import FLAG
from megatron_moe_opt.variants import FLEX, split_variant

if TYPE_CHECKING:
    from megatron_moe_opt.integration.auto.controller import Controller
    from megatron_moe_opt.integration.auto.first_step import Alike, FirstStep


def plan_lines(controller: Controller) -> list[str]:
    """Returns what was planned and why, as a table."""
    source = controller.options.plan or controller.costs.source
    lines = [f"plan from {source}:"] if len(controller.shapes) > 1 else []
    for of_shape in controller.shapes:
        lines += _lines_of(of_shape, f"{_named(of_shape)}:" if len(controller.shapes) > 1 else f"plan from {source}:")
    if any(moves_samples(one.variant) for of_shape in controller.shapes for one in of_shape.predicted):
        saving = f"{controller.first_step.placement_saving:.1%}"
        lines.append(f"placing the samples of one step would have sent {saving} less between nodes")
    return lines


def _named(of_shape: Alike) -> str:
    one = of_shape.shape
    return f"layers with rows of {one.hidden}, {one.experts} experts of {one.ffn * one.etp}, top-{one.topk}"


def _lines_of(of_shape: Alike, begin: str) -> list[str]:
    predicted = {one.variant: one for one in of_shape.predicted}
    stock = predicted.get(ALLTOALL)
    tried = shortlist(of_shape.predicted, of_shape.planned, of_shape.kept)
    lines = [
        f"{begin} {of_shape.planned}; {len(tried) + len(of_shape.beside)} variants are tried now"
        + (", stock among them" if ALLTOALL in tried else "")
        + (f", {' and '.join(of_shape.beside)} without a prediction" if of_shape.beside else "")
        + ", and what is near the fastest of them joins",
        f"{'':24}{'ms a layer':>12}{'of stock':>10}{'exposed':>9}{'MB between nodes':>18}{'in a node':>11}{'held':>9}",
    ]
    for variant in tried:
        one = predicted[variant]
        ratio = f"{one.seconds / stock.seconds:.2f}" if stock else "-"
        lines.append(
            f"{variant:24}{one.seconds * 1e3:12.3f}{ratio:>10}{one.exposed * 1e3:9.3f}{one.inter_bytes / 1e6:18.2f}"
            f"{one.intra_bytes / 1e6:11.2f}{one.activation_bytes / 1e6:9.1f}"
        )
    return lines + [f"not {variants}: {why}" for variants, why in told_together(of_shape.refused)]


def settled_lines(controller: Controller, chosen: str) -> list[str]:
    """Returns what was measured, beside what was predicted, and what stays."""
    alike, trials = controller.turns.alike, controller.turns.trials
    measured, predicted = trials.medians(), {one.variant: one.seconds for one in alike.predicted}
    without_trials = f"to run it without trials: {' '.join(_flags(chosen))}"
    if not measured:
        return [f"{chosen} stays: nothing else has room", without_trials]
    listed = ", ".join(_measured(*one) for one in trials.times.items())
    where = f" of {_named(alike)}" if len(controller.shapes) > 1 else ""
    lines = [
        f"measured ms a step (in brackets between which times its median lies), in {trials.steps} steps of "
        f"trials{where}: {listed}"
    ]
    if ALLTOALL not in measured:
        return [*lines, f"{chosen} stays", without_trials]
    if chosen == ALLTOALL:
        return [*lines, f"{chosen} stays: nothing is surely faster"]
    lines.append(
        f"{chosen} stays"
        + (", as planned" if chosen == alike.planned else f"; {alike.planned} was planned")
        + f": {measured[chosen] / measured[ALLTOALL]:.3f} of stock's step; it saves "
        f"{(measured[ALLTOALL] - measured[chosen]) * 1e3:.1f} ms of it"
        + _predicted_saving(predicted, chosen, alike.passes)
    )
    return [*lines, without_trials]


def _measured(variant: str, times: Sequence[float]) -> str:
    median, low, high = (seconds * 1e3 for seconds in (statistics.median(times), *median_within(times)))
    return f"{variant} {median:.1f} ({low:.1f}-{high:.1f})"


def _predicted_saving(predicted: Mapping[str, float], chosen: str, passes: int) -> str:
    if chosen not in predicted:
        return ", which nobody predicts"
    saved = (predicted[ALLTOALL] - predicted[chosen]) * passes * 1e3
    if saved < 0:
        return f", where it was predicted to take {-saved:.1f} ms more"
    return f", {saved:.1f} ms were predicted"


def _flags(variant: str) -> list[str]:
    """Returns the flags that name a variant on the command line."""
    name, _, setting = variant.partition(":")
    backend = ["--moe-flex-dispatcher-backend", setting] if name == FLEX else []
    return [FLAG, name, *backend, *split_variant(variant, None)[1].words()]


def changed_line(planned: Sequence[Alike], now: Sequence[Alike], before: FirstStep, after: FirstStep) -> str:
    """Returns the line that says what has changed from one plan to the next, of what takes longest now."""
    first = now[0]
    then = next((one for one in planned if one.shape == first.shape), planned[0])
    changes = [
        f"{what} {new} ({old} then)"
        for (what, new), (_, old) in zip(_planned_by(first, after), _planned_by(then, before), strict=True)
        if new != old
    ]
    return f"since the last plan: {', '.join(changes) or 'nothing has changed'}"


def _planned_by(of_shape: Alike, seen: FirstStep) -> list[tuple[str, str]]:
    saving, spare = seen.placement_saving, seen.spare
    return [
        ("tokens of a pass", str(of_shape.workload.tokens)),
        ("rows of the busiest rank over the mean", f"{of_shape.workload.imbalance:.2f}"),
        ("bytes between nodes that placing samples saves", "unknown" if saving is None else f"{saving:.1%}"),
        ("GB of a GPU to be had", "uncounted" if spare is None else f"{spare / 1e9:.1f}"),
        ("planned", of_shape.planned),
    ]


def no_start_line(variant: str, rank: int, failure: str) -> str:
    """Returns the line that says why a variant is not tried: what a rank could not make, as its library says."""
    return f"not {variant}: what it communicates with cannot be made on rank {rank} ({failure}): no rank tries it"


def no_room_line(variant: str, lacking: Sequence[int], ranks: int) -> str:
    """Returns the line that says why a variant is not tried.

    Args:
        lacking: bytes that each rank could not allocate which had too few.
    """
    return (
        f"not {variant}: {len(lacking)} of {ranks} ranks could not allocate the {max(lacking) / 1e9:.1f} GB that a "
        "step is predicted to take: no rank tries it"
    )


def no_layer_line() -> str:
    """Returns the line that says why nothing was planned after a step."""
    return "no MoE layer has run in this step of an optimizer: it is planned by the first one in which some have"


def no_step_line(schedules: int) -> str:
    """Returns the line that says why nothing is planned."""
    return (
        f"Megatron's schedules have run {schedules} times without a step of one of its optimizers to plan by: if none "
        f"comes, {FLAG} auto runs on as it began; name a dispatcher"
    )


def later_layers_line() -> str:
    """Returns the line that says what becomes of layers that are built when others have been planned."""
    return (
        "layers that are built after the first plan stay with what they begin with until it is planned anew: call "
        "megatron_moe_opt.register() before they are built, and they are planned by themselves"
    )


def unlike_levels_line(size: int, levels: Sequence[tuple[int, ...]]) -> str:
    """Returns the line that says why no tokens hop and no experts travel.

    Args:
        size: of the expert-parallel groups.
        levels: the workers of each level as they lie, in one group or another; empty: of nodes that make no levels.
    """
    lie = " or ".join("x".join(map(str, workers)) or "unevenly" for workers in levels)
    return (
        f"no tokens hop and no experts travel: expert-parallel groups of {size} ranks lie on nodes as {lie}, and those "
        "that hold the same experts must run alike: have groups begin where nodes do, or name --moe-opt-levels"
    )
