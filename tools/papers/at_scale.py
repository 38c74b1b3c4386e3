"""What grows with the number of GPUs where EP does not: what data parallelism communicates once a step."""

from __future__ import annotations

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.step_costs import communication
from megatron_moe_opt.topology.layouts import Layout

HEAD = 64
"""Elements of an attention head; decides nothing but what TP divides."""


def gradients(hidden: int, ffn: int, experts: int, layout: Layout, cluster: Cluster) -> float:
    """Returns the seconds in which the gradients of a layer's attention and experts, float32, are reduced over the
    ranks that hold the same, and its parameters, 16 bits, gathered, as by Megatron's distributed optimizer.

    Args:
        ffn: of an expert of two matrices, all its shards.
        experts: of the layer.
    """
    layer = ModelShape(1, hidden, hidden // HEAD, vocabulary=0, experts=experts, topk=1, ffn=ffn, gated=False)
    return communication(layer, layout, cluster, tokens=0).gradients
