"""Latency, throughput and MFU of a training step under a chosen strategy (the outputs of MoNTA, Fig. 10)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe_opt.planning.training.memory import RECOMPUTE
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import StagePasses, step_seconds
from megatron_moe_opt.planning.training.step_costs import StepCosts
from megatron_moe_opt.topology.layouts import Layout


@dataclass(frozen=True)
class GpuSpeed:
    """How fast one GPU computes: what turns FLOPs of a model into seconds."""

    peak_flops: float
    """FLOP/s, dense, of the training dtype, as its maker gives it."""
    efficiency: float
    """The part of it that the model's matrix products reach: measured or assumed, in (0, 1]."""


@dataclass(frozen=True)
class Throughput:
    """What one training step takes, and what that is of what the GPUs could do."""

    step_seconds: float
    tokens_per_second: float
    """Tokens a second of one GPU."""
    mfu: float
    """Model FLOPs utilization: the model's FLOPs over what the GPUs could do in the time."""


def flops_per_token(model: ModelShape, sequence: int) -> float:
    """Returns the FLOPs of the forward and backward pass of one token: 6 N + 6 L s q.

    N: elements of the matrices that the token is multiplied with; 2 FLOPs each forward, 4 backward (Kaplan et al. 2020,
    sec. 2.1). L s q: attention of L layers, q query elements over s / 2 tokens, the causal half, in two products.
    Megatron-LM counts the same, without the router.
    """
    return 6.0 * model.active_matrices + 6.0 * model.layers * sequence * model.query_size


def outside_experts(
    model: ModelShape, layout: Layout, device: GpuSpeed, micro_batch: int, sequence: int, besides: StepCosts
) -> float:
    """Returns the seconds of a MoE layer outside its routed experts, forward and backward of a micro-batch: of
    attention, router and shared experts, and what TP exchanges for them.
    """
    each = 6.0 * micro_batch * sequence / (layout.tp * layout.cp) / (device.peak_flops * device.efficiency)
    shared = model.mlp_matrices(model.shared_ffn)
    matrices = model.layer_matrices() - model.expert_matrices + sequence * model.query_size
    return each * matrices + (1 + (shared > 0)) * besides.block


def throughput(
    model: ModelShape,
    layout: Layout,
    device: GpuSpeed,
    micro_batch: int,
    sequence: int,
    micro_batches: int,
    exchange_seconds: float,
    with_experts: bool = False,
    besides: StepCosts | None = None,
    recompute: str = RECOMPUTE[0],
    exchange_again: float = 0.0,
    hidden: float = 0.0,
) -> Throughput:
    """Returns the time of a step in which every GPU computes its share and waits for its exchanges.

    The pipeline stage that takes longest sets the pace, of equal ones the last, which computes the logits too.
    Gradients are reduced beside the last micro-batch, and what of that takes longer is added.

    Args:
        micro_batch: sequences.
        sequence: tokens of a sequence.
        micro_batches: of one step and data-parallel rank.
        exchange_seconds: dispatch and combine, forward and backward, of one layer and micro-batch, such as
            `Choice.seconds`.
        with_experts: these seconds contain the computation of the experts, as those of a pipeline that runs them do.
        besides: what a step takes besides; None: nothing, or it is in the device's efficiency.
        recompute: a value of memory.RECOMPUTE. "full": a third of what layers compute, half of what they communicate
            and `exchange_again` come again; "selective": the forward pass of attention's products.
        exchange_again: seconds of what runs again of `exchange_seconds`, where layers are recomputed in full.
        hidden: seconds of a MoE layer that are not in `exchange_seconds` because another micro-batch computes
            meanwhile: passes that none runs beside take them too.

    Raises:
        ValueError: a peak or efficiency that is out of range.
    """
    if not (device.peak_flops > 0 and 0 < device.efficiency <= 1):
        raise ValueError(f"peak {device.peak_flops} FLOP/s at efficiency {device.efficiency} is not a device")
    tokens = micro_batch * sequence
    flops = tokens * flops_per_token(model, sequence) / (layout.tp * layout.cp * layout.pp)  # of one GPU, in the mean
    besides = besides or StepCosts()

    is_again, attends_again = (recompute == which for which in (RECOMPUTE[-1], RECOMPUTE[1]))

    def seconds(stage: int) -> float:
        layers, moe_layers = model.layers_of_stage(layout, stage), model.moe_layers(layout, stage)
        attention = layers * sequence * model.query_size
        products = moe_layers * model.layer_matrices() + (layers - moe_layers) * model.layer_matrices(moe=False)
        if with_experts:
            products -= moe_layers * model.expert_matrices
        products += attention
        if is_again:
            products += products / 3
        elif attends_again:
            products += attention / 3
        if stage == layout.pp - 1:
            products += model.hidden * model.vocabulary
        computed = 6.0 * tokens * products / (layout.tp * layout.cp)
        communicated = moe_layers * (exchange_seconds + is_again * exchange_again)
        communicated += model.blocks(layers, moe_layers) * besides.block * (1.5 if is_again else 1)
        return computed / (device.peak_flops * device.efficiency) + communicated

    of_stages = {stage: seconds(stage) for stage in model.telling_stages(layout)}
    alone = max(beside + model.moe_layers(layout, stage) * hidden for stage, beside in of_stages.items())
    passes = StagePasses(alone, max(of_stages.values()), besides.between_stages)
    step = step_seconds(passes, layout, micro_batches) + max(0.0, besides.gradients - alone)
    tokens_of_step = tokens * micro_batches * layout.dp
    return Throughput(
        step_seconds=step,
        tokens_per_second=tokens_of_step / step / layout.world,
        mfu=flops * micro_batches / (step * device.peak_flops),
    )
