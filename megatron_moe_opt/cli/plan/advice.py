"""What `moe-opt plan` advises, in a sentence that says why."""

from __future__ import annotations

from megatron_moe_opt.cli.plan.case import Case, fits_part
from megatron_moe_opt.planning.costs.known_clusters import GIB
from megatron_moe_opt.planning.planner import WINS_BY
from megatron_moe_opt.planning.predicting.layer_on_cluster import EXPERTS
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction
from megatron_moe_opt.planning.training.pipeline import OVERLAP
from megatron_moe_opt.topology.expansion import Expansion
from megatron_moe_opt.topology.layouts import HORIZONTAL, VERTICAL, Layout

TELLS = 0.1
"""The least part of what a layer takes less than stock's that is given as a reason."""
SENDS_LESS = 0.9
"""The largest ratio of what a rank sends to what it sends under stock, in bytes, at which that is given as a reason."""


def advice(case: Case, fastest_of_stock: Case | None) -> str:
    """Returns what to run, what to expect of it and why; or why stock is best.

    Args:
        fastest_of_stock: the layout that is best for stock, where layouts have been searched.
    """
    chosen, stock = case.chosen, case.stock
    if chosen.variant == ALLTOALL:
        no_room = [one for one in case.candidates if not case.fits(one)]
        is_bounded = bool(no_room) or case.settings.activation_budget is not None
        nothing = "nothing that fits" if is_bounded else "nothing"
        return (
            f"Stay with stock alltoall: {nothing} is predicted to take less than {1 - WINS_BY:.0%} of its time; it "
            f"waits for communication in {_ms(stock.exposed)} of {_ms(stock.seconds)} ms of a MoE layer."
        )
    if stock is None:
        return (
            f"Use {chosen.variant}: it is predicted to take {_ms(chosen.seconds)} ms a MoE layer, and stock Megatron "
            "does not train under TP without --sequence-parallel."
        )
    if not case.fits(stock):
        return (
            f"Use {chosen.variant}: the fastest of what fits; stock alltoall needs {case.memory(stock) / GIB:.1f} GiB. "
            f"A MoE layer is predicted to take {_ms(chosen.seconds)} ms, stock's {_ms(stock.seconds)}."
        )
    gain, reason = _gain(case, fastest_of_stock), _reason(chosen, stock)
    return f"Use {chosen.variant}: {gain}, because {reason}. Predicted, not measured."


def expansion_advice(expansion: Expansion) -> str:
    """Returns whether CP is to lie along EP or across it, why, which network that needs and how to ask Megatron for it.

    What is predicted, and what the flags ask for, is the vertical layout: the one that Megatron-LM's scripts can make.
    """
    cp, ep, why = expansion.chosen.cp, expansion.chosen.ep, f"{expansion.reason} (MoNTA)"
    if expansion.chosen.order == VERTICAL:
        return (
            f"Lay CP {cp} along EP {ep} (vertical), as the flags do: {why}. A switch network has to connect "
            f"{expansion.network} ranks of a TP position."
        )
    return (
        f"Lay CP {cp} across EP {ep} (horizontal) if a switch network connects {expansion.network} ranks of a TP "
        f"position: {why}. Megatron-LM's scripts cannot ask for it, parallel_state.initialize_model_parallel("
        f"order={HORIZONTAL!r}) can; the flags, and what is predicted, are of CP along EP (vertical), for which "
        f"{max(cp, ep)} suffice."
    )


def does_not_fit(case: Case) -> str:
    """Returns that no candidate fits into a GPU's memory, and what to do."""
    least = min(case.candidates, key=case.memory)
    known, part = case.site.memory, fits_part(case.settings.overlaps)
    search = ""
    if case.settings.known is not None:  # else it was measured in a layout
        search = (
            "leave out --tp, --pp, --vpp, --ep, --expert-tp and --micro-batches to have a layout searched that fits, "
        )
    if case.settings.overlaps:
        less = f", or leave out {OVERLAP}"
    else:
        less = "" if case.settings.recompute == "full" else ", or --recompute full"
    return (
        f"It does not fit: {least.variant} needs {case.memory(least) / GIB:.1f} GiB, and {part:.0%} of a GPU's "
        f"{known / GIB:.1f} are {part * known / GIB:.1f}: {search}take more GPUs{less}"
    )


def _gain(case: Case, fastest_of_stock: Case | None) -> str:
    chosen, stock = case.chosen, case.stock
    gains = [f"MoE layers {stock.seconds / chosen.seconds:.2f} times as fast as with stock alltoall"]
    if case.site.device is not None:
        rate, of_stock = (case.step(one).tokens_per_second for one in (chosen, stock))
        gains.append(f"{rate / of_stock - 1:.0%} more tokens a second than stock in this layout")
        if fastest_of_stock is not None:
            there = fastest_of_stock
            gain = rate / there.step(there.stock).tokens_per_second - 1
            gains.append(
                f"{f'{gain:.0%} more than' if gain >= WINS_BY else 'about as many as'} stock in its own best "
                f"({_where(there)})"
            )
    return ", ".join(gains)


def pipeline_of(layout: Layout) -> str:
    """Returns the stages of a layout in words."""
    return f"PP {layout.pp}" + (f" of {layout.vpp} virtual stages each" if layout.vpp > 1 else "")


def _where(case: Case) -> str:
    layout = case.site.layout
    overlap = f", {OVERLAP}" if case.settings.overlaps else ""
    return f"TP {layout.tp}, {pipeline_of(layout)}, EP {layout.ep}, expert-TP {layout.expert_tp}{overlap}"


def _reason(chosen: Prediction, stock: Prediction) -> str:
    sent, of_stock = (one.inter_bytes or one.intra_bytes for one in (chosen, stock))
    where = "between nodes" if stock.inter_bytes else "inside nodes"
    parts = [("waits for communication", stock.exposed, chosen.exposed)]
    if EXPERTS in chosen.terms:  # else experts compute beside copies
        in_memory = (one.seconds - one.exposed - one.terms[EXPERTS] for one in (stock, chosen))
        parts.append(("moves rows in memory for", *in_memory))
    telling = [one for one in parts if one[1] - one[2] > TELLS * (stock.seconds - chosen.seconds)]
    reasons = [f"{does} {_ms(now)} in place of {_ms(before)} ms a layer" for does, before, now in telling or parts]
    if of_stock and sent <= SENDS_LESS * of_stock:
        reasons.append(f"sends {sent / 1e6:.0f} in place of {of_stock / 1e6:.0f} MB {where}")
    *others, last = reasons
    return f"it {', '.join(others)} and {last}" if others else f"it {last}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
