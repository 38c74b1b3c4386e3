"""What every further partition of mpmoe's pipeline takes besides its ops."""

from __future__ import annotations

import torch

from megatron_moe_opt.cli.layer_settings import LayerSettings
from megatron_moe_opt.cli.meter import Meter
from megatron_moe_opt.planning import mpmoe_choice
from megatron_moe_opt.planning.cluster import Cluster
from megatron_moe_opt.schedules.mpmoe import NONE

COUNTS = (1, 8)
TOKENS, TOPK, EXPERTS_OF_A_RANK = 256, 2, 4


def partition_overhead(
    cluster: Cluster, tp: int, hidden: int, ffn_hidden: int, dtype: str, device: torch.device
) -> float:
    """Seconds a further partition, forward and backward, by which a small layer takes longer in many than its
    ops say: calls of the experts, sums of their weights' gradients, lanes that wait for each other.

    A collective call over the world, in Megatron's groups of the cluster's sizes.

    Args:
        cluster: what else was measured; without a partition_overhead.
        ffn_hidden: of a whole expert.
    """
    from megatron_moe_opt.cli.moe_layer import layer_under_test, mpmoe_shape

    world = cluster.world
    names = [f"mpmoe:{count}" for count in COUNTS]
    settings = LayerSettings(
        dispatchers=tuple(names), tokens=TOKENS, hidden=hidden, ffn_hidden=ffn_hidden,
        experts=EXPERTS_OF_A_RANK * world.ep, topk=TOPK, tp=tp, ep=world.ep, expert_tp=world.expert_tp, dtype=dtype,
        routing="uniform", capacity_factor=None, pad_to_capacity=False, steps=1, warmup=0, seed=1,
    )  # fmt: skip
    layers = [layer_under_test(settings, name, world.ep, device) for name in names]
    in_one, in_many = Meter(device).calls([layer.step for layer in layers])
    layer = mpmoe_shape(settings, world.ep)
    one, many = mpmoe_choice.predict(layer, TOKENS * TOPK, cluster, COUNTS, (NONE,))
    longer = (in_many - in_one) - (many.seconds - one.seconds)
    return max(0.0, longer / (COUNTS[1] - COUNTS[0]))
