"""What our dispatchers cannot run under, refused when the configuration is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.expert_order import check_expert_order
from megatron_moe_opt.integration.replicated_tokens import drawn_by_each_rank
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.options import AUTO, PREFIX, Options
from megatron_moe_opt.schedules.mpmoe import NONE
from megatron_moe_opt.schedules.parm import AAS

FLAG = "--moe-token-dispatcher-type"

_MIGRATION = ("expert-migration",)
_SYSTEMS: dict[str, tuple[str, ...]] = {
    "compression_ratio": _MIGRATION,
    "gradient_compression_ratio": _MIGRATION,
    "monta_level": ("monta",),
    "chunks": ("monta",),
    "parm_schedule": ("parm",),
    "partitions": ("mpmoe",),
    "memory_reuse": ("mpmoe",),
    "tuner": ("mpmoe",),
    "activation_budget": ("mpmoe", AUTO),
    "domain_sizes": _MIGRATION,
    "residuals": _MIGRATION,
    "shared_expert_interval": _MIGRATION,
    "network_levels": (*_MIGRATION, AUTO),
    "prefetch_layers": (*_MIGRATION, AUTO),
    "resident_layers": (*_MIGRATION, AUTO),
    "profile": ("monta", "parm", "mpmoe", *_MIGRATION, AUTO),
    "plan": (AUTO,),
}
"""By option: the dispatchers that read it."""

_NEVER_UNREAD = ("compression_ratio", "gradient_compression_ratio", "plan")


def check_name(name: str, stock: Iterable[str], ours: Iterable[str]) -> None:
    """Refuses a dispatcher that neither Megatron nor we have."""
    if name not in {*stock, *ours}:
        known = ", ".join([*stock, *ours])
        raise ConfigurationError(f"{FLAG} {name} is not a dispatcher: choose one of {known}")


def check_never_unread(name: str, options: Options) -> None:
    """Refuses compression, and a plan, under a dispatcher that has none, wherever options come from."""
    _check_fields(name, options, _NEVER_UNREAD)


def check_options_are_read(name: str, options: Options) -> None:
    """Refuses options that the dispatcher `name`, ours or stock, does not read: they would change nothing."""
    _check_fields(name, options, _SYSTEMS)
    if options.profile is None:
        return
    for system, is_read, way_out in (
        ("parm", options.schedule_profile is not None, f"leave {PREFIX}parm-schedule at {AUTO}"),
        ("expert-migration", options.chooses_domains, f"leave {PREFIX}domain-sizes at {AUTO}"),
        ("mpmoe", options.tuner == "model", f"give {PREFIX}partitions {AUTO} and {PREFIX}tuner model"),
    ):
        if name == system and not is_read:
            raise ConfigurationError(
                f"{PREFIX}profile {options.profile} has nothing to choose for {FLAG} {name}: drop it, or {way_out}"
            )


def _check_fields(name: str, options: Options, fields: Iterable[str]) -> None:
    without = Options()
    for field in fields:
        value, systems = getattr(options, field), _SYSTEMS[field]
        if name not in systems and value != getattr(without, field):
            raise ConfigurationError(
                f"{_flag(field)} {_shown(value)} is for {FLAG} {', '.join(systems)}, not {name}: drop one of the two"
            )


def _flag(field: str) -> str:
    return PREFIX + {"network_levels": "levels"}.get(field, field.replace("_", "-"))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    if options.expert_order is not None:
        check_expert_order(config, options.expert_order)
    if name == AUTO:
        _check_auto(options)
    check_never_unread(name, options)
    for flag in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if name in ("expert-migration", "mpmoe") and getattr(training_arguments(), flag, False):
            raise ConfigurationError(
                f"--{flag.replace('_', '-')} takes weights out of their modules between uses, and {FLAG} {name} "
                "calls experts in its own order: drop it, or use monta"
            )
    if name == "netmoe":
        _check_netmoe(config)
    if name == "parm" and options.parm_schedule == "S2" and config.sequence_parallel:
        raise ConfigurationError(
            f"{PREFIX}parm-schedule S2 splits what all TP ranks hold, but with --sequence-parallel they hold parts of "
            "it: drop one of the two"
        )
    takes_copies = name == "parm" and options.parm_schedule in ("S2", AAS) or name == "deepspeed"
    if takes_copies and (drawn := drawn_by_each_rank(config)) is not None:
        schedule = f"{PREFIX}parm-schedule {options.parm_schedule}" if name == "parm" else f"{FLAG} {name}"
        raise ConfigurationError(
            f"{drawn} has each rank of a TP group route the tokens that all of them hold in its own way, which "
            f"{schedule} cannot bring together: drop it, use {FLAG} parm with {PREFIX}parm-schedule S1, or add "
            "--sequence-parallel"
        )
    if name == "mpmoe":
        _check_mpmoe(config, options)
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


def check_telemetry(config: Any) -> None:
    """Refuses a TransformerConfig whose MoE layers do not run stage by stage, under whatever dispatcher.

    Raises:
        ConfigurationError: names the flag, its value and the way out.
    """
    for wrong, flag in (
        (config.cuda_graph_impl != "none", f"--cuda-graph-impl {config.cuda_graph_impl}"),
        (config.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm"),
        (
            getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
            "--overlap-dispatch-backward-with-experts-wgrad",
        ),
        (config.transformer_impl == "inference_optimized", "--transformer-impl inference_optimized"),
    ):
        if wrong:
            raise ConfigurationError(
                f"{flag} does not run the stages of a MoE layer one after another, as {PREFIX}telemetry observes them: "
                "drop one of the two"
            )


def _recomputed_modules(config: Any) -> list[str]:
    return config.recompute_modules or [] if config.recompute_granularity == "selective" else []


def _check_auto(options: Options) -> None:
    """What there is to plan by, and what cannot change between steps."""
    if (options.profile is None) == (options.plan is None):
        raise ConfigurationError(
            f"{FLAG} {AUTO} needs measurements or a plan: give {PREFIX}profile (run `moe-opt profile`) or {PREFIX}plan "
            "(run `moe-opt plan`), one of them"
        )
    if options.expert_order is not None:
        raise ConfigurationError(
            f"{PREFIX}expert-order {options.expert_order} is for a dispatcher that stays, and {FLAG} {AUTO} tries "
            "several: choose one of them"
        )
    for flag, ratio in options.compression.items():
        raise ConfigurationError(
            f"{flag} {ratio:g} is lossy, which {FLAG} {AUTO} never is: drop it, or choose expert-migration"
        )
    for field in ("monta_level", "chunks", "parm_schedule", "domain_sizes", "partitions", "memory_reuse", "tuner"):
        value = getattr(options, field)
        if value is not None:
            raise ConfigurationError(
                f"{_flag(field)} {_shown(value)} is what {FLAG} {AUTO} chooses: drop it, or name the dispatcher it is "
                "for"
            )


def _check_netmoe(config: Any) -> None:
    """What cannot move with samples, or would not be what it is without moves."""
    ranks, tp = (
        config.expert_model_parallel_size * config.expert_tensor_parallel_size,
        config.tensor_model_parallel_size,
    )
    if ranks == tp or ranks % tp:
        raise ConfigurationError(
            f"{FLAG} netmoe moves samples between the TP groups that share experts, but --expert-model-parallel-size x "
            f"--expert-tensor-parallel-size = {ranks} is no multiple, from 2 on, of --tensor-model-parallel-size {tp}: "
            "choose one, or use monta"
        )
    recompute = _recomputed_modules(config)
    for wrong, flags in (
        (config.context_parallel_size > 1, f"--context-parallel-size {config.context_parallel_size}"),
        (
            config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
            "--tensor-model-parallel-size without --sequence-parallel",
        ),
        (config.hidden_dropout > 0, f"--hidden-dropout {config.hidden_dropout}"),
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (getattr(config, "fused_residual_rmsnorm", False), "--fused-residual-rmsnorm"),
        (config.recompute_granularity == "full", "--recompute-granularity full"),
        ("moe" in recompute, "--recompute-modules moe"),
        ("layernorm" in recompute, "--recompute-modules layernorm"),
        (config.fine_grained_activation_offloading, "--fine-grained-activation-offloading"),
        (config.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor"),
        (config.moe_shared_expert_overlap, "--moe-shared-expert-overlap"),
        (config.moe_latent_size, "--moe-latent-size"),
        (config.mrope_section is not None, "--mrope-section"),
        (getattr(config, "mlp_chunks_for_training", 1) > 1, "--mlp-chunks-for-training"),
        (config.moe_router_load_balancing_type == "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
        (getattr(training_arguments(), "reset_attention_mask", False), "--reset-attention-mask"),
    ):
        if wrong:
            raise ConfigurationError(
                f"{flags} does not work with {FLAG} netmoe, which moves samples between ranks: change it, or use monta"
            )


def _check_mpmoe(config: Any, options: Options) -> None:
    """What does not fit experts that run partition by partition, and what they save."""
    if config.moe_router_padding_for_quantization:
        raise ConfigurationError(
            f"--moe-router-padding-for-quantization pads an expert's rows before {FLAG} mpmoe cuts them: drop it, and "
            "the experts pad each partition themselves"
        )
    if options.activation_budget is not None and not options.tunes_partitions:
        raise ConfigurationError(
            f"{PREFIX}activation-budget {options.activation_budget} has nothing to choose: add {PREFIX}partitions auto "
            f"or {PREFIX}memory-reuse auto, or drop it"
        )
    reuse = options.memory_reuse or NONE
    if reuse == NONE:
        return
    flag = f"{PREFIX}memory-reuse {reuse}"
    if config.fp8 or config.fp4:
        raise ConfigurationError(
            f"{flag} does not know what experts in {'--fp8-format' if config.fp8 else '--fp4-format'} save: use "
            f"{PREFIX}memory-reuse {NONE}"
        )
    if "moe_act" in _recomputed_modules(config):
        raise ConfigurationError(
            f"{flag} restores all that experts save, and --recompute-modules moe_act a part of it: drop one of the two"
        )
    if getattr(config, "fine_grained_activation_offloading", False):
        raise ConfigurationError(
            f"--fine-grained-activation-offloading offloads what {flag} restores in another way: drop one of the two"
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
    ratio = options.gradient_compression_ratio
    if ratio is not None and config.fp16:
        raise ConfigurationError(
            f"{PREFIX}gradient-compression-ratio {ratio:g} keeps parts of gradients from step to step, and --fp16 "
            "changes the loss scale between them: use --bf16, or drop it"
        )
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
