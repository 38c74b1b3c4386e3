"""What every further partition of mpmoe's pipeline takes besides its ops."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings, torch_dtype
from megatron_moe_opt.integration.measuring.meter import Meter
from megatron_moe_opt.planning.choosing.choice import schedule_seconds
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.schedules.mpmoe import NONE
from megatron_moe_opt.systems.mpmoe import candidate

COUNTS = (1, 8)
TOKENS, TOPK, EXPERTS_OF_A_RANK = 256, 2, 4
MOST_BYTES = 2**30
"""The most bytes of both layers' weights and gradients on a rank. Of larger experts there are fewer, one at least."""


def partition_overhead(
    cluster: Cluster,
    tp: int,
    hidden: int,
    ffn_hidden: int,
    dtype: str,
    device: torch.device,
    seconds: float,
    fused: Mapping[str, bool],
) -> float:
    """Returns the seconds a further partition, forward and backward, by which a small layer takes longer in many than
    its ops say: calls of the experts, sums of their weights' gradients, lanes that wait for each other.

    A collective call over the world, in Megatron's groups of the cluster's sizes.

    Args:
        cluster: what else was measured; without a partition_overhead.
        ffn_hidden: of a whole expert.
        seconds: to measure for. A turn more than that where the links are slow.
        fused: see measure.Sizes.
    """
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test

    world = cluster.world
    names = [f"mpmoe:{count}" for count in COUNTS]
    bytes_of_one = 2 * hidden * ffn_hidden // world.expert_tp * torch_dtype(dtype).itemsize
    fitting = MOST_BYTES // (len(names) * 2 * bytes_of_one)  # with their gradients
    experts = max(1, min(EXPERTS_OF_A_RANK, fitting)) * world.ep
    topk, sizes = min(TOPK, experts), (tp, world.ep, world.expert_tp)
    settings = LayerSettings(tuple(names), TOKENS, hidden, ffn_hidden, experts, topk, *sizes, dtype)
    layers = [layer_under_test(settings, name, world.ep, device, **fused) for name in names]
    in_one, in_many = Meter(device).calls([layer.step for layer in layers], seconds)
    layer = LayerOnCluster(settings.workload(world.ep), cluster)
    one, many = (schedule_seconds(candidate(layer, count, NONE)) for count in COUNTS)
    longer = (in_many - in_one) - (many - one)
    return max(0.0, longer / (COUNTS[1] - COUNTS[0]))
