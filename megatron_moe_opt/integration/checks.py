"""What our dispatchers cannot run under, refused when the configuration is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import AUTO, PREFIX, Options

FLAG = "--moe-token-dispatcher-type"


def check_name(name: str, stock: Iterable[str], ours: Iterable[str]) -> None:
    """Refuses a dispatcher that neither Megatron nor we have."""
    if name not in {*stock, *ours}:
        known = ", ".join([*stock, *ours])
        raise ConfigurationError(f"{FLAG} {name} is not a dispatcher: choose one of {known}")


def check_config(config: Any, name: str, options: Options) -> None:
    """Refuses a TransformerConfig that the dispatcher `name` with these options cannot run under.

    Args:
        config: a TransformerConfig after its own __post_init__.

    Raises:
        ConfigurationError: names the flag, its value and the way out.
    """
    experts, ep = config.num_moe_experts, config.expert_model_parallel_size
    if experts is None:
        raise ConfigurationError(f"{FLAG} {name} needs a mixture of experts: set --num-experts")
    if experts % ep:
        raise ConfigurationError(
            f"--expert-model-parallel-size {ep} does not divide --num-experts {experts}: choose a divisor of {experts}"
        )
    if name == "parm" and options.parm_schedule == "S2" and config.sequence_parallel:
        raise ConfigurationError(
            f"{PREFIX}parm-schedule S2 splits what all TP ranks hold, but with --sequence-parallel they hold parts of "
            "it: drop one of the two"
        )
    if name == "expert-migration":
        _check_expert_migration(config, options)
    if config.cuda_graph_impl != "none":
        raise ConfigurationError(
            f"--cuda-graph-impl {config.cuda_graph_impl} does not work with {FLAG} {name}, whose message sizes change "
            "every step: leave CUDA graphs off or use alltoall"
        )
    for field, flag in (
        ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
        ("overlap_dispatch_backward_with_experts_wgrad", "--overlap-dispatch-backward-with-experts-wgrad"),
    ):
        if getattr(config, field, False):
            raise ConfigurationError(
                f"{flag} schedules the stages of stock dispatchers itself and does not work with {FLAG} {name}: "
                "drop it or use alltoall"
            )
    if config.transformer_impl == "inference_optimized":
        raise ConfigurationError(
            f"--transformer-impl inference_optimized brings its own dispatchers and does not work with {FLAG} {name}: "
            "use alltoall for inference"
        )


def _check_expert_migration(config: Any, options: Options) -> None:
    name = f"{FLAG} expert-migration"
    if (config.expert_tensor_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {config.expert_tensor_parallel_size} cuts experts, which {name} does not "
            "put together again: set it to 1, or use monta"
        )
    for field, flag in (
        ("moe_pad_expert_input_to_capacity", "--moe-pad-expert-input-to-capacity"),
        ("moe_router_padding_for_quantization", "--moe-router-padding-for-quantization"),
    ):
        if getattr(config, field, False):
            raise ConfigurationError(f"{flag} would have {name} send what nobody routed: drop it, or use monta")
    if not options.experts_may_travel:
        return
    sizes = AUTO if options.chooses_domains else ",".join(map(str, options.domain_sizes))
    travels = f"{PREFIX}domain-sizes {sizes} has experts travel, and"
    if config.gradient_accumulation_fusion:
        raise ConfigurationError(
            f"{travels} gradients of travelling experts have no main_grad to be added to: give "
            "--no-gradient-accumulation-fusion, or take domain size 1"
        )
    for field, flag in (
        ("fp8", "--fp8-format"),
        ("fp4", "--fp4-format"),
        ("delay_wgrad_compute", "--delay-wgrad-compute"),
        ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser"),
    ):
        if getattr(config, field, None):
            raise ConfigurationError(
                f"{travels} {flag} keeps state of weights in the module that they leave: drop it, or take domain size 1"
            )
