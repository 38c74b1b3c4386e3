"""What the ops of a layer's schedules cost on a cluster, those of its experts too."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.schedule import Kind

LEAST_GRADIENT = 0.5
"""The least part of the forward pass's time that a backward pass takes: less is a disturbed measurement."""


def costs_with_experts(layer: LayerWorkload, cluster: Cluster, holds: int = 1) -> Costs:
    """Returns the cluster's curves, and those of the layer's experts: a compute op costs what its bytes of T_DI make.

    Experts of other sizes than the measured one take as much longer as they have more operations.

    Args:
        holds: a rank's rows are spread over the experts of so many ranks.

    Raises:
        ConfigurationError: no expert was measured.
    """
    cluster.check_expert()
    gemm, measured = cluster.expert_gemm, cluster.costs
    work = layer.hidden * layer.ffn * (1.5 if layer.gated else 1.0) / (gemm.hidden * gemm.ffn_hidden)
    forward = CostCurve(gemm.points)
    training = gemm.training or tuple((rows, 3 * seconds) for rows, seconds in gemm.points)
    gradient = [
        (rows, max(seconds - forward.seconds(rows), LEAST_GRADIENT * forward.seconds(rows)))
        for rows, seconds in training
    ]
    num_experts = layer.local_experts * holds

    def all_experts(points: Sequence[tuple[float, float]]) -> CostCurve:
        """Returns the cost of all experts here over the bytes of their inputs (T_DI), spread evenly."""
        return CostCurve(tuple((size * num_experts * layer.row_bytes, s * num_experts * work) for size, s in points))

    experts = {
        (Kind.COMPUTE, None): all_experts(gemm.points),
        (Kind.GRADIENT, None): all_experts(gradient),
    }
    return Costs({**measured.curves, **experts}, measured.overhead)
