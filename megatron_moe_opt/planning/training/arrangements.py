"""Which layouts, micro-batches and recomputation a cluster of equal nodes could train a model with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.training.memory import RECOMPUTE
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import takes
from megatron_moe_opt.topology.layouts import Layout, divisors, mixes_expert_gradients

MICRO_BATCHES = (1, 2, 4, 8)
"""Sequences of a micro-batch that are tried."""


@dataclass(frozen=True)
class Arrangement:
    """How a step of training is laid out."""

    layout: Layout
    micro_batch: int
    """Sequences of a micro-batch."""
    micro_batches: int
    """Micro-batches of a training step on one data-parallel rank."""
    recompute: str = RECOMPUTE[0]
    """What is recomputed: a value of memory.RECOMPUTE."""
    overlaps: bool = False
    """Whether micro-batches overlap (--overlap-moe-expert-parallel-comm)."""


def arrangements(
    model: ModelShape,
    world: int,
    node: int,
    global_batch: int,
    micro_batch: int | None = None,
    recompute: str | None = None,
    cp: int = 1,
    overlaps: bool | None = False,
) -> Iterator[Arrangement]:
    """Yields all arrangements of a step that Megatron takes, without regard to memory.

    TP and expert-TP are powers of two inside a node. The number of pipeline stages divides the layers, or is a power of
    two, where the last stage has fewer. Stages have no virtual stages, or as many as divide their layers, or as a power
    of two can be: fewer leave more of a bubble, and hold more. With flash attention selective recomputation frees next
    to nothing, and is not tried.

    Args:
        node: GPUs of a node.
        global_batch: sequences of a step.
        micro_batch: None: each of MICRO_BATCHES.
        recompute: None: none and full.
        overlaps: None: with and without overlapping micro-batches.
    """
    micro_batches = MICRO_BATCHES if micro_batch is None else (micro_batch,)
    recomputes = (RECOMPUTE[0], RECOMPUTE[-1]) if recompute is None else (recompute,)
    inside = [size for size in _powers_of_two(node) if node % size == 0]
    stages = sorted(set(filter(model.fills, {*divisors(model.layers), *_powers_of_two(model.layers)})))
    beside = (False, True) if overlaps is None else (overlaps,)
    for pp, tp, expert_tp, ep in product(stages, inside, inside, divisors(model.experts)):
        layout = _layout(model, world, tp, cp, pp, ep, expert_tp)
        if layout is None or global_batch % layout.dp:
            continue
        of_rank = global_batch // layout.dp
        layouts = _interleaved(model, layout)
        for interleaved, size, again, is_beside in product(layouts, micro_batches, recomputes, beside):
            one = Arrangement(interleaved, size, of_rank // size, again, is_beside)
            if of_rank % size == 0 and _runs(one):
                yield one


def _interleaved(model: ModelShape, layout: Layout) -> list[Layout]:
    """Returns the layout without virtual stages, and with as many as there can be, of equal size or a power of two."""
    if layout.pp == 1:
        return [layout]
    each = -(-model.layers // layout.pp)
    equal = max(divisors(each)) if model.layers % layout.pp == 0 else 1
    most = max(vpp for vpp in _powers_of_two(each) if model.fills(layout.pp * vpp))
    return [replace(layout, vpp=vpp) for vpp in sorted({1, equal, most})]


def _runs(one: Arrangement) -> bool:
    """Whether Megatron runs these micro-batches, and overlaps them where that is asked for."""
    if one.overlaps and (one.layout.ep == 1 or one.recompute == RECOMPUTE[-1]):
        return False
    return takes(one.layout, one.micro_batches, one.overlaps)


def _layout(model: ModelShape, world: int, tp: int, cp: int, pp: int, ep: int, expert_tp: int) -> Layout | None:
    """Returns the layout; None where Megatron would refuse it, or some versions mix experts' gradients."""
    if mixes_expert_gradients(tp, ep, expert_tp):
        return None
    if world % (tp * cp * pp) or world % (expert_tp * ep * pp):
        return None
    layout = Layout(world, tp, cp, ep, expert_tp, pp)
    try:
        model.parameters(layout)
    except ConfigurationError:  # a size of the model that its parallelism does not divide
        return None
    return layout


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]
