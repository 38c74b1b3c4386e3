"""What a rank does by itself: its rows' handling under stock Megatron and under us, and Megatron's experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.loads import Rows, expert_pass
from megatron_moe_opt.integration.measuring.meter import Meter
from megatron_moe_opt.integration.measuring.under_test import layer_under_test, layers_under_test
from megatron_moe_opt.planning.costs.cluster import OURS, STOCK, Points
from megatron_moe_opt.runtime.through_experts.expert_call import Experts
from megatron_moe_opt.topology.nodes import NodeMap

DISPATCHERS = {STOCK: "alltoall", OURS: "monta"}
EXPERTS, TOPK = 8, 2


def local_work(
    rows: Rows, meter: Meter, sizes: Sequence[int], longest: float, alone: Any, seconds: float
) -> dict[str, Points]:
    """Returns what dispatch and combine, forward and backward, take in layers whose experts are all on their rank, on
    all ranks at once.

    Over bytes of the rows: as many sizes as fit into `seconds`, up to one that takes over `longest`. A collective call
    over the world.

    Args:
        alone: Megatron's groups of one rank.
    """
    points: dict[str, list[tuple[int, float]]] = {whose: [] for whose in DISPATCHERS}
    end = None
    for size in sizes:
        tokens = rows.number(size, TOPK) // TOPK
        layers = layers_under_test(_settings(rows, tokens, 1), 1, rows.device, alone)
        steps = [layers[name].step for name in DISPATCHERS.values()]
        if end is None:  # kernels may be compiled at first, which takes seconds and says nothing
            meter.calls(steps, 0)
            end = meter.elapsed() + seconds
        took = meter.calls(steps, end - meter.elapsed())
        for whose, of_one in zip(DISPATCHERS, took, strict=True):
            points[whose].append((tokens * TOPK * rows.bytes, of_one))
        is_late = meter.elapsed() > end and size != sizes[0]  # one point says nothing of larger sizes
        if max(took) > longest or is_late:
            break
    return {whose: tuple(of) for whose, of in points.items()}


def one_expert(rows: Rows, ffn_hidden: int, alone: Any) -> Experts:
    """Returns Megatron's own module with a single expert, in Megatron's groups of one rank, `alone`."""
    settings = replace(_settings(rows, 1, ffn_hidden), experts=1, topk=1)
    experts = layer_under_test(settings, DISPATCHERS[STOCK], 1, rows.device, alone).layer.experts
    # No expert is borrowed here: the parameters of other ranks' are none.
    return Experts(lambda tokens, counts, probs, _: experts(tokens, counts, probs)[0], tuple(experts.parameters()))


def compute_sharing(rows: Rows, meter: Meter, expert: Experts, number: int, nodes: NodeMap, seconds: float) -> float:
    """Returns how much faster an expert computes so many rows on the first rank of each node alone than on all ranks at
    once.

    A collective call over the world, for so many `seconds`.
    """
    first_ranks = {nodes.ranks_of(node)[0] for node in nodes.node_of}
    if len(first_ranks) == len(nodes.node_of):
        return 1.0
    run, is_first = expert_pass(rows, expert, number), dist.get_rank() in first_ranks

    def alone() -> None:
        if is_first:
            run()

    together, one = meter.calls([run, alone], seconds)
    return max(1.0, together / one)


def _settings(rows: Rows, tokens: int, ffn_hidden: int) -> LayerSettings:
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[rows.dtype]
    dispatchers = tuple(DISPATCHERS.values())
    return LayerSettings(dispatchers, tokens, rows.hidden, ffn_hidden, EXPERTS, TOPK, dtype=dtype, dispatch_only=True)
