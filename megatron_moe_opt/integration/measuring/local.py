"""What a rank does by itself: its rows' handling under stock Megatron and under us, and Megatron's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.loads import RankExperts, Rows
from megatron_moe_opt.integration.measuring.meter import Meter
from megatron_moe_opt.integration.measuring.under_test import layer_under_test, layers_under_test
from megatron_moe_opt.planning.costs.cluster import OURS, STOCK, Points
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.runtime.through_experts.expert_call import Experts
from megatron_moe_opt.topology.nodes import NodeMap

DISPATCHERS = {STOCK: ALLTOALL, OURS: "monta"}
EXPERTS, TOPK = 8, 2
MOST_EXPERTS, MOST_BYTES = 4, 2**30
"""Experts that a rank computes to learn what one takes, and the most bytes that they take there."""


def local_work(
    rows: Rows,
    meter: Meter,
    sizes: Sequence[int],
    longest: float,
    alone: Any,
    seconds: float,
    fused: Mapping[str, bool],
) -> dict[str, Points]:
    """Returns what dispatch and combine, forward and backward, take in layers whose experts are all on their rank, on
    all ranks at once.

    Over bytes of the rows: as many sizes as fit into `seconds`, but two at least, up to one that takes over `longest`.
    A collective call over the world.

    Args:
        alone: Megatron's groups of one rank.
        fused: see Sizes.
    """
    points: dict[str, list[tuple[int, float]]] = {whose: [] for whose in DISPATCHERS}

    def steps(tokens: int) -> list[Callable[[], Any]]:
        layers = layers_under_test(_settings(rows, tokens, 1), rows.device, alone, **fused)
        return [layers[name].step for name in DISPATCHERS.values()]

    tokens = [rows.number(size, TOPK) // TOPK for size in sizes]
    meter.calls(steps(tokens[0]), 0)  # kernels may be compiled, which takes seconds and says nothing
    end = meter.elapsed() + seconds
    for number, of_size in enumerate(tokens):
        took = meter.calls(steps(of_size), end - meter.elapsed())
        for whose, of_one in zip(DISPATCHERS, took, strict=True):
            points[whose].append((of_size * TOPK * rows.bytes, of_one))
        is_late = meter.elapsed() > end and number > 0  # one point says nothing of larger sizes
        if max(took) > longest or is_late:
            break
    return {whose: tuple(of) for whose, of in points.items()}


def rank_experts(
    rows: Rows, ffn_hidden: int, most: float, room: float, alone: Any, fused: Mapping[str, bool]
) -> RankExperts:
    """Returns Megatron's own module with experts of a rank, in Megatron's groups of one rank, `alone`.

    Args:
        most: how many at most.
        room: bytes that they may take with their gradients and sums of these; one expert is made in any case.
        fused: see Sizes.
    """
    of_expert = 2 * rows.hidden * ffn_hidden * (2 * rows.dtype.itemsize + torch.float32.itemsize)
    number = int(max(1, min(most, MOST_EXPERTS, min(MOST_BYTES, room) // of_expert)))
    settings = replace(_settings(rows, 1, ffn_hidden), experts=number, topk=1)
    experts = layer_under_test(settings, DISPATCHERS[STOCK], rows.device, alone, **fused).layer.experts
    # No expert is borrowed here: the parameters of other ranks' are none.
    own = Experts(lambda tokens, counts, probs, _: experts(tokens, counts, probs)[0], tuple(experts.parameters()))
    return RankExperts(own, number)


def compute_sharing(
    rows: Rows, meter: Meter, experts: RankExperts, of_each: int, nodes: NodeMap, seconds: float
) -> float:
    """Returns how much faster experts compute, each so many rows, on the first rank of each node alone than on all
    ranks at once.

    A collective call over the world, for so many `seconds`.
    """
    first_ranks = {nodes.ranks_of(node)[0] for node in nodes.node_of}
    if len(first_ranks) == len(nodes.node_of):
        return 1.0
    run, is_first = experts.passes(rows, of_each), dist.get_rank() in first_ranks

    def alone() -> None:
        if is_first:
            run()

    together, one = meter.calls([run, alone], seconds)
    return max(1.0, together / one)


def _settings(rows: Rows, tokens: int, ffn_hidden: int) -> LayerSettings:
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[rows.dtype]
    return LayerSettings(
        tuple(DISPATCHERS.values()), tokens, rows.hidden, ffn_hidden, EXPERTS, TOPK, ep=1, dtype=dtype,
        dispatch_only=True,
    )  # fmt: skip
