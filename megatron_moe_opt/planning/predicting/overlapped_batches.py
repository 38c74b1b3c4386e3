"""What a layer takes whose micro-batches overlap: it communicates beside another micro-batch's computation.

This is Megatron's --overlap-moe-expert-parallel-comm. The forward pass of a layer runs beside the backward pass of a
layer of another micro-batch, in four pieces: what one of the two does on the stream for communication beside what the
other computes. On that stream are dispatch and combine: of stock its collectives, of ours all that their schedules
have. Copies and sums among that hide nothing, and are taken not to hide either: they need what the other computes with.
Shared experts are computed with attention.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_moe_opt.planning.costs.curves import Slowdown
from megatron_moe_opt.planning.predicting.layer_on_cluster import DISPATCH
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction
from megatron_moe_opt.planning.predicting.simulator import lane_rate
from megatron_moe_opt.schedules.schedule import Lane

TERM = "beside another micro-batch"


def overlapped(one: Prediction, attention: float, slowdown: Slowdown) -> Prediction:
    """Returns the prediction of a candidate without what is hidden in passes of two micro-batches at once.

    The pieces are a combine's gradient beside attention, dispatch beside the experts' backward pass, the gradient of a
    dispatch beside the experts, and a combine beside attention's backward pass. All four exchanges are taken to be
    alike, and backward passes to compute twice as long as forward passes.

    Args:
        attention: seconds of attention, router and shared experts, forward and backward of a micro-batch.
    """
    on_the_way = one.exposed if one.variant == ALLTOALL else one.terms.get(DISPATCH, one.exposed)
    exchange, experts = one.exposed / 4, one.seconds - on_the_way
    links = Lane.INTER if one.inter_bytes else Lane.INTRA
    both = one.parts > 1 and one.inter_bytes and one.intra_bytes  # chunks are on the links of all levels at once
    busy = (Lane.INTER, Lane.INTRA) if both else (links,)
    rates = lane_rate(links, (Lane.COMPUTE,), slowdown), lane_rate(Lane.COMPUTE, busy, slowdown)
    pieces = (attention / 3, 2 * experts / 3, experts / 3, 2 * attention / 3)
    hidden = min(one.exposed, sum(_saved(exchange, piece, rates) for piece in pieces))  # not above it by rounding
    return replace(
        one,
        seconds=one.seconds - hidden,
        exposed=one.exposed - hidden,
        hidden=hidden,
        terms={**one.terms, TERM: -hidden},
    )


def _saved(exchange: float, computation: float, rates: tuple[float, float]) -> float:
    """Returns how many seconds fewer the two take side by side, at these rates while both run, than in turn."""
    together = min(exchange / rates[0], computation / rates[1])
    return together * (sum(rates) - 1)
