"""What an expert takes besides its curve in each partition of mpmoe's pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.meter import CALLS, Meter
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.runtime.engine.recording import recording
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.schedule import Lane
from megatron_moe_opt.systems.mpmoe import candidate
from megatron_moe_opt.topology.agreement import known_to_all

COUNT = 4
TOKENS, TOPK, EXPERTS_OF_A_RANK = 256, 2, 4
MOST_BYTES = 2**30
"""The most bytes that the layer's experts take on a rank. Of larger experts there are fewer, one at least."""


def expert_overhead(
    cluster: Cluster,
    tp: int,
    hidden: int,
    ffn_hidden: int,
    dtype: str,
    device: torch.device,
    seconds: float,
    fused: Mapping[str, bool],
    room: float,
) -> tuple[float, float] | None:
    """Returns the seconds by which an expert takes longer in a partition of a small layer, forward and backward, than
    simulated by its curve, which is of calls that follow each other: here its weights have left the caches since the
    last partition, gradients of weights are summed, and links are busy. None: there is no room for one such expert.

    A collective call over the world, in Megatron's groups of the cluster's sizes.

    Args:
        cluster: what else was measured; without an expert_overhead.
        ffn_hidden: of a whole expert.
        seconds: to measure for. A step more than that where the links are slow.
        fused: see measure.Sizes.
        room: bytes that a layer's experts may take on every rank.
    """
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test

    world, meter = cluster.world, Meter(device)
    # Of each weight: itself and its gradient, that of the last partition, and the sum of these in float32.
    of_weight = 3 * torch_dtype(dtype).itemsize + torch.float32.itemsize
    of_expert = 2 * hidden * ffn_hidden // world.expert_tp * of_weight
    if of_expert > room:
        return None
    here = int(max(1, min(EXPERTS_OF_A_RANK, min(MOST_BYTES, room) // of_expert)))
    experts, variant = here * world.ep, f"mpmoe:{COUNT}"
    topk, sizes = min(TOPK, experts), (tp, world.ep, world.expert_tp)
    settings = LayerSettings((variant,), TOKENS, hidden, ffn_hidden, experts, topk, *sizes, dtype)
    layer = layer_under_test(settings, variant, world.ep, device, **fused)
    steps: list[list[float]] = []  # forward and backward
    for step in range(CALLS + 1):
        if step > 1 and meter.elapsed() > seconds:
            break
        layer.clear_grads()
        dist.barrier()
        with recording() as timelines:
            layer.step()
        steps.append([one.busy(Lane.COMPUTE) for one in timelines])
    of_all_ranks = [step for of_rank in known_to_all(steps[1:]) for step in of_rank]
    measured = [statistics.median(of_pass) for of_pass in zip(*of_all_ranks, strict=True)]
    simulated = candidate(LayerOnCluster(settings.workload(world.ep), cluster), COUNT, NONE).timelines[: len(measured)]
    longer = (took - one.busy(Lane.COMPUTE) for took, one in zip(measured, simulated, strict=True))
    forward, backward = (max(0.0, one / (COUNT * here)) for one in longer)
    return forward, backward
