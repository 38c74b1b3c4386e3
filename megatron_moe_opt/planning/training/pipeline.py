"""How micro-batches go through pipeline stages: Megatron's 1F1B, plain, interleaved, and with overlapped micro-batches.

Interleaved, a stage has several parts of the model (virtual stages), and a pass is one micro-batch in one of them. With
overlapped micro-batches (OVERLAP) the forward pass of one runs beside the backward pass of another, and what the MoE
layers of each communicate beside what the other computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe_opt.topology.layouts import Layout

OVERLAP = "--overlap-moe-expert-parallel-comm"
"""The flag, Megatron's and that of `moe-opt plan`, by which micro-batches overlap."""


@dataclass(frozen=True)
class StagePasses:
    """Seconds of the forward and backward pass of a micro-batch on the stage that takes longest, all its virtual
    stages together.
    """

    alone: float
    beside: float
    """Seconds where the forward pass runs beside the backward pass of another micro-batch; `alone`: it does not."""
    between: float
    """Seconds in which tokens and their gradients go from one stage to the next."""


def takes(layout: Layout, micro_batches: int, overlaps: bool = False) -> bool:
    """Whether Megatron runs so many micro-batches: of virtual stages a multiple of the stages; overlapped ones need
    virtual stages wherever there is a pipeline.
    """
    if layout.vpp == 1:
        return layout.pp == 1 or not overlaps
    return micro_batches % layout.pp == 0


def warm_up(layout: Layout, stage: int, overlaps: bool = False) -> int:
    """Returns how many forward passes of virtual stages a stage runs before its first backward pass has a forward pass
    before it: Megatron's `get_pp_rank_microbatches`.
    """
    ahead = layout.pp - stage - 1
    if layout.vpp > 1:
        ahead = 2 * ahead + (layout.vpp - 1) * layout.pp
    return ahead + overlaps


def under_way(layout: Layout, stage: int, micro_batches: int, layers: int, overlaps: bool = False) -> float:
    """Returns how many micro-batches a stage holds the activations of at once, those in one of its virtual stages as
    a part each: virtual stages are taken to hold as much as each other.

    A forward pass that runs beside a backward pass adds a layer as that lets one go, so that two layers are there
    besides (Megatron's TransformerModelChunkSchedulePlan.run).

    Args:
        layers: of the stage, in all its virtual stages.
    """
    held: float = warm_up(layout, stage, overlaps)
    if overlaps:
        held += min(1.0, 2 * layout.vpp / layers) if layers else 0.0
    else:
        held += 1
    return min(held, micro_batches * layout.vpp) / layout.vpp


def unpaired(layout: Layout, micro_batches: int, overlaps: bool) -> int:
    """Returns how many of a step's passes of virtual stages run beside no other on the last stage."""
    return min(warm_up(layout, layout.pp - 1, overlaps), micro_batches * layout.vpp)


def step_seconds(passes: StagePasses, layout: Layout, micro_batches: int) -> float:
    """Returns the seconds of all micro-batches, as the last stage sees them: it waits for its first pass until that
    has come through the other stages, runs forward passes alone, then one forward beside one backward pass each, then
    the backward passes that are left, and the other stages end behind it.

    Passes between stages take their time beside computation where stages are interleaved (Megatron's default), else
    they are waited for.
    """
    alone, beside = passes.alone / layout.vpp, passes.beside / layout.vpp
    filling = (layout.pp - 1) * (alone + passes.between)
    if layout.vpp > 1:
        alone, beside = max(alone, passes.between), max(beside, passes.between)
    else:
        alone, beside = alone + passes.between, beside + passes.between
    of_all, by_themselves = micro_batches * layout.vpp, unpaired(layout, micro_batches, overlaps=beside < alone)
    return filling + by_themselves * alone + (of_all - by_themselves) * beside
