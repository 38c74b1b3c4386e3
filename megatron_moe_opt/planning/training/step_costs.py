"""What a training step takes besides computing and the exchanges of MoE layers, so that layouts can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import CostCurve
from megatron_moe_opt.planning.training.memory import BF16, FP32
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.layouts import Layout

PP_NEIGHBOURS = "neighbouring stages"


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step that throughput() adds to those of computing and of MoE layers."""

    block: float = 0.0
    """Seconds of each micro-batch around one attention or MLP, forward and backward."""
    between_stages: float = 0.0
    """Seconds of each micro-batch between two pipeline stages."""
    gradients: float = 0.0
    """Seconds of reducing gradients and gathering parameters, once a step, beside the last micro-batch."""


def communication(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    tokens: int,
    element_bytes: int = BF16,
    sequence_parallel: bool = True,
) -> StepCosts:
    """Returns what tensor, data and pipeline parallelism communicate, as far as the cluster has their curves.

    Over TP an all-gather and a reduce-scatter of a stage's tokens at the attention of every layer, at dense MLPs and at
    shared experts, forward and backward, and between stages the tokens and their gradients: nothing computes meanwhile.
    Over the data-parallel ranks a reduce-scatter of float32 gradients and an all-gather of parameters, of the stage for
    which they take longest, as of Megatron's distributed optimizer. Context parallelism's exchange of keys and values
    is not in it.

    Args:
        tokens: of a micro-batch on the context-parallel rank, before TP splits them.
        sequence_parallel: whether TP splits tokens; else every TP rank sends all of them to the next stage.
    """

    def seconds(kind: Kind, group: str, size: float) -> float:
        points = cluster.curves.get((kind, group))
        return CostCurve(points).seconds(size) + cluster.overhead if points else 0.0

    def both(group: str, gathered: float, scattered: float) -> float:
        return seconds(Kind.ALL_GATHER, group, gathered) + seconds(Kind.REDUCE_SCATTER, group, scattered)

    def gradients(stage: int) -> float:
        held = model.parameters(layout, stage)
        return sum(
            both(group, element_bytes * parameters, FP32 * parameters)
            for group, parameters in (("dp", held.dense), ("expert-dp", held.expert))
        )

    stages = model.telling_stages(layout)
    of_tokens = tokens * model.hidden * element_bytes
    sent = of_tokens / layout.tp if sequence_parallel else of_tokens
    # Two neighbours that gather send half of what they have together.
    between_stages = 2 * seconds(Kind.ALL_GATHER, PP_NEIGHBOURS, 2 * sent)
    return StepCosts(2 * both("tp", of_tokens, of_tokens), between_stages, max(map(gradients, stages)))
