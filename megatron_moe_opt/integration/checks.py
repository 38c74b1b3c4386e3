"""What our dispatchers cannot run under, refused when the configuration is built."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.layer_passes import repeats_numbers
from megatron_moe_opt.integration.layer.ordered_experts import check_expert_order
from megatron_moe_opt.integration.layer.overlapped_batches import overlaps_batches
from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens, keeps_from_splitting_rows
from megatron_moe_opt.integration.sharded_weights import shards_weights
from megatron_moe_opt.integration.training_arguments import training_arguments
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.row_format import SAME, Wire, WireFormat
from megatron_moe_opt.systems import SYSTEMS, dispatcher_names, moves_samples, system_of
from megatron_moe_opt.systems.expert_migration import NAME as EXPERT_MIGRATION
from megatron_moe_opt.systems.megatron_config import FAKE_GROUP, given_flag, quantization
from megatron_moe_opt.systems.system import CHOOSES, FLAG, PREFIX, READS, System, flag_of, shown
from megatron_moe_opt.topology.layouts import mixes_expert_gradients
from megatron_moe_opt.versions import megatron_is_before

GRAPHED = ("attn", "mlp", "mamba", "moe_router")
"""The values of --cuda-graph-scope that may be captured: they end before a dispatcher begins, or have none.
(None has run on a GPU.)
"""
_NOT_GRAPHED = {
    "moe": "moe captures messages, which {name} sends on streams of its own",
    "moe_preprocess": "moe_preprocess captures the packing of rows, whose result {name} keeps outside of the graph",
}
_SAVED_BY_EXPERTS = ("--save-tokens-per-expert-interval", "--save-activations-interval", "--save-dgrads-interval")
"""The flags that have Megatron-LM save what hooks of experts' linears see."""
BRIDGES_RESTART = "inprocess_restart.enabled"
"""Megatron-Bridge's name of what Megatron-LM calls --inprocess-restart."""
_ANEW = (
    "begins a run anew in processes that {name} ends when a rank has failed: drop it, and have torchrun start them "
    "again (--max-restarts)"
)
_OF_RUNS = {
    "--moe-enable-deepep": "has rows sent by DeepEP, which flex does and {name} does not: drop it (auto "
    "tries flex where DeepEP is installed)",
    FAKE_GROUP: "has no other ranks, from which {name} takes numbers of rows: drop it, or use alltoall",
    "--inprocess-restart": _ANEW,
    BRIDGES_RESTART: _ANEW,
}
_NEVER_UNREAD = ("compression_ratio", "gradient_compression_ratio", "plan", "expert_order", "wire")


def check_name(name: str, stock: Iterable[str], ours: Iterable[str]) -> None:
    """Refuses a dispatcher that neither Megatron nor we have, and names those that are worth a choice."""
    if name not in {*stock, *ours}:
        known = ", ".join([*stock, *(one for one in ours if one == AUTO or system_of(one).candidates is not None)])
        raise ConfigurationError(f"{FLAG} {name} is not a dispatcher: choose one of {known}")


def check_flags(name: str, flags: Collection[str]) -> None:
    """Refuses, under dispatchers of ours, those flags of a command line that ask for another dispatcher, or for
    processes that these cannot run in.
    """
    if name not in dispatcher_names():
        return
    for flag, why in _OF_RUNS.items():
        if flag in flags:
            raise ConfigurationError(f"{flag} {why.format(name=f'{FLAG} {name}')}")


def check_arguments(arguments: Any, options: Options, refuses_unread: bool) -> None:
    """Refuses what Megatron-LM's own checks of its arguments would end with a traceback, and options of ours for a
    model without experts, which nothing would read.

    Args:
        arguments: as Megatron-LM has parsed them.
    """
    check_division(arguments.num_experts, arguments.expert_model_parallel_size)
    if given := [flag for flag in _OF_RUNS if given_flag(arguments, flag) is not None]:
        check_flags(arguments.moe_token_dispatcher_type, given)
    if arguments.num_experts is None and refuses_unread:
        for one in fields(Options):
            if (value := getattr(options, one.name)) != one.default:
                raise ConfigurationError(
                    f"{flag_of(Options, one.name)} {shown(value)} is for MoE layers, and a model without --num-experts "
                    "has none: drop it, or give --num-experts"
                )


def check_is_called(layer_class: type, name: str) -> None:
    """Refuses a class of MoE layer that is not run by calling it, which is where a dispatcher of ours begins."""
    if hasattr(layer_class, "forward_with_separate_inputs"):  # Megatron-Bridge's of Gemma 4
        raise ConfigurationError(
            f"{FLAG} {name} begins where a MoE layer is called, and a {layer_class.__name__} is run by "
            "forward_with_separate_inputs: use alltoall"
        )


def check_division(experts: int | None, ep: int) -> None:
    """Refuses experts that cannot be shared out, before Megatron's own checks do it with a traceback."""
    if experts and experts % ep:
        raise ConfigurationError(
            f"--expert-model-parallel-size {ep} does not divide --num-experts {experts}: choose a divisor of {experts}"
        )


def is_upcycled(config: Any) -> bool:
    """Whether a configuration is of the dense model that Megatron builds first to make its mixture from."""
    return config.num_moe_experts is None and getattr(training_arguments(), "moe_use_upcycling", False)


def check_never_unread(name: str, options: Options) -> None:
    """Refuses compression, formats of the wire, a plan and an order of experts under a dispatcher without them."""
    _check_fields(name, options, _NEVER_UNREAD)


def check_options_are_read(name: str, options: Options) -> None:
    """Refuses options that the dispatcher `name`, ours or stock, does not read: they would change nothing."""
    _check_fields(name, options, [one.name for one in fields(Options)])
    system = system_of(name)
    if options.profile is None or system is None:
        return
    way_out = system.unread_profile(options)
    if way_out is not None:
        raise ConfigurationError(
            f"{PREFIX}profile {options.profile} has nothing to choose for {FLAG} {name}: drop it, or {way_out}"
        )


def readers(field: str) -> tuple[str, ...]:
    """Returns the dispatchers that read an option, by the name of its field; empty: all, stock's too."""
    systems = [system.name for system in SYSTEMS if system.reads_option(field)]
    by_auto = Options.__dataclass_fields__[field].metadata["auto"] == READS
    return (*systems, AUTO) if by_auto else tuple(systems)


def _check_fields(name: str, options: Options, names: Iterable[str]) -> None:
    without = Options()
    for field in names:
        value, of = getattr(options, field), readers(field)
        if of and name not in of and value != getattr(without, field):
            raise ConfigurationError(
                f"{flag_of(Options, field)} {shown(value)} is for {FLAG} {', '.join(of)}, not {name}: drop one of the "
                "two"
            )


def check_config(config: Any, name: str, options: Options, is_of_run: bool = True, is_of_model: bool = True) -> None:
    """Refuses a TransformerConfig that the dispatcher `name` with these options cannot run under.

    Args:
        config: a TransformerConfig after its own __post_init__.
        is_of_run: it is of the model that Megatron-LM's arguments speak of, not of layers that are built beside it.
        is_of_model: gradients are summed over ranks, as a model's are; not those of a layer by itself.

    Raises:
        ConfigurationError: names the flag, its value and the way out.
    """
    if config.num_moe_experts is None:
        raise ConfigurationError(f"{FLAG} {name} needs a mixture of experts: set --num-experts")
    if options.expert_order is not None:
        check_expert_order(config, options.expert_order)
    system, arguments = system_of(name), training_arguments() if is_of_run else None
    if name == AUTO:
        _check_auto(config, options, arguments)
    if system is not None:
        _check_system(system, config, options, arguments)
    check_never_unread(name, options)
    if config.moe_latent_size and holds_replicated_tokens(config):
        raise ConfigurationError(
            f"--moe-latent-size {config.moe_latent_size} has projections on all TP ranks, whose gradients nobody "
            f"completes under {FLAG} {name} without --sequence-parallel: add that"
        )
    _check_capacity(config)
    if is_of_model:
        _check_gradient_groups(config, name)
    _check_cuda_graphs(config, name)
    if getattr(arguments, "optimizer_cuda_graph", False):  # from megatron-core 0.19 on
        _check_optimizer_graph(name, options)
    if overlaps_batches(config):
        _check_overlap(config, name, system)
    if getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False):
        raise ConfigurationError(
            "--overlap-dispatch-backward-with-experts-wgrad schedules the stages of stock dispatchers itself and does "
            f"not work with {FLAG} {name}: drop it or use alltoall"
        )
    if options.telemetry:
        check_telemetry(config)
    if config.batch_invariant_mode and not megatron_is_before(0, 20):  # before, MoE layers know nothing of it
        raise ConfigurationError(
            f"--batch-invariant-mode adds up a token's experts in the order of inference, and {FLAG} {name} in one of "
            "its own: drop it, or use alltoall"
        )
    if config.transformer_impl == "inference_optimized":
        raise ConfigurationError(
            f"--transformer-impl inference_optimized brings its own dispatchers and does not work with {FLAG} {name}: "
            "use alltoall for inference"
        )


def _check_gradient_groups(config: Any, name: str) -> None:
    """Refuses experts of whose gradients Megatron adds up those of different ones."""
    tp, etp = config.tensor_model_parallel_size, config.expert_tensor_parallel_size
    if mixes_expert_gradients(tp, config.expert_model_parallel_size, etp) and megatron_is_before(0, 19):
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {etp} beside --tensor-model-parallel-size {tp} at --expert-model-parallel-"
            "size 1 makes Megatron before 0.19 sum experts' gradients over ranks that do not hold the same experts, "
            f"under {FLAG} {name} and stock's dispatchers alike: set both sizes alike, use expert parallelism above 1, "
            "or megatron-core 0.19"
        )


def _check_capacity(config: Any) -> None:
    """Refuses padding to more rows than there are tokens, with which Megatron's layers end in their first pass."""
    factor, topk, experts = config.moe_expert_capacity_factor, config.moe_router_topk, config.num_moe_experts
    if config.moe_pad_expert_input_to_capacity and factor * topk > experts:
        raise ConfigurationError(
            f"--moe-expert-capacity-factor {factor:g} gives each of {experts} experts more rows than there are tokens "
            f"at --moe-router-topk {topk}, and --moe-pad-expert-input-to-capacity cannot pad to that: set it to at "
            f"most {experts / topk:g}, or drop the padding"
        )


def _check_overlap(config: Any, name: str, system: System | None) -> None:
    """Lets Megatron call the stages of a layer for two micro-batches in turn where only its dispatcher is ours."""
    if system is not None and not system.overlaps_batches:
        raise ConfigurationError(
            f"--overlap-moe-expert-parallel-comm runs one micro-batch's experts beside another's dispatch, and {FLAG} "
            f"{name} has a pipeline of its own through them: drop one of the two, or use monta"
        )
    if holds_replicated_tokens(config):
        raise ConfigurationError(
            f"--overlap-moe-expert-parallel-comm calls the stages of a MoE layer by themselves, around which {FLAG} "
            f"{name} splits the tokens that all TP ranks hold: add --sequence-parallel, or drop it"
        )
    if name == AUTO and config.cuda_graph_impl != "none" and "moe_router" in _graphed(config):
        raise ConfigurationError(
            "--overlap-moe-expert-parallel-comm beside a CUDA graph of moe_router runs no router when a step begins, "
            f"by which {FLAG} {AUTO} times it: leave moe_router out of the graphs, or use monta"
        )


def _check_optimizer_graph(name: str, options: Options) -> None:
    """Refuses steps of the optimizer that nobody is told of under dispatchers that count them."""
    sizes = options.domain_sizes if isinstance(options.domain_sizes, tuple) else ()
    if name == AUTO:
        why = "which changes dispatchers between steps"
    elif max(sizes, default=1) > 1 or (name == EXPERT_MIGRATION and options.chooses_domains):
        why = "whose experts travel once a step"
    else:
        return
    raise ConfigurationError(
        f"--optimizer-cuda-graph replays steps of the optimizer without a word to {FLAG} {name}, {why}: drop it"
    )


def _graph_field(config: Any) -> str:
    return "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"  # before 0.19


def _graphed(config: Any) -> list[str]:
    """Returns the names of the modules that CUDA graphs are made of; none: all."""
    return [getattr(scope, "name", str(scope)) for scope in getattr(config, _graph_field(config), ())]


def _check_cuda_graphs(config: Any, name: str) -> None:
    """Lets graphs of attention, dense MLPs and the router through, and says of others why not."""
    if config.cuda_graph_impl == "none":
        return
    flag, scopes = "--" + _graph_field(config).replace("_", "-"), _graphed(config)
    captured = [scope for scope in scopes if scope not in GRAPHED]
    of_scopes = f" {flag} {' '.join(scopes)}" if scopes else ""
    apart = f"choose from {flag} {' '.join(GRAPHED)}"
    if moves_samples(name):
        why, apart = f"{name} moves whole sequences to other ranks than those of the graph", "use alltoall"
    elif config.cuda_graph_impl != "transformer_engine":
        why = "it captures the steps of a MoE layer with its dispatcher's"
        apart = f"use transformer_engine with {flag} {' '.join(GRAPHED)}"
    elif not scopes:
        why = f"the whole layer is captured, with messages, which {name} sends on streams of its own"
    elif captured:
        why = _NOT_GRAPHED.get(captured[0], f"{captured[0]} captures the dispatcher").format(name=name)
    elif "moe_router" in scopes and holds_replicated_tokens(config):
        why, apart = f"{name} splits tokens that all TP ranks hold around the router", "add --sequence-parallel"
    else:
        return
    raise ConfigurationError(
        f"--cuda-graph-impl {config.cuda_graph_impl}{of_scopes} does not work with {FLAG} {name}: {why}; {apart}, or "
        "leave CUDA graphs off"
    )


def check_telemetry(config: Any) -> None:
    """Refuses a TransformerConfig whose MoE layers do not run stage by stage, or have no numbers of their own, under
    whatever dispatcher.

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
    if repeats_numbers(config):
        raise ConfigurationError(
            f"--mtp-num-layers {config.mtp_num_layers} (what follows / in --hybrid-layer-pattern) gives several MoE "
            f"layers of a hybrid model the same number, by which {PREFIX}telemetry reports them: drop one of the two"
        )


def _check_system(system: System, config: Any, options: Options, arguments: Any) -> None:
    sharded = shards_weights(config, arguments)
    if (system.calls_experts or system.moves_samples) and sharded is not None:
        what = "experts" if system.calls_experts else "norms"
        raise ConfigurationError(
            f"{sharded} takes weights out of their modules between uses, and {FLAG} {system.name} calls {what} in its "
            "own order: drop it, or use monta"
        )
    if system.calls_experts and (getattr(config, "expert_gtp_weight_remat_size", 1) or 1) > 1:  # from 0.18 or 0.19 on
        raise ConfigurationError(
            "--expert-tensor-parallel-num-weight-shards cuts experts' weights, whose gradients are summed once a pass, "
            f"and {FLAG} {system.name} calls experts in its own order: drop it, or use monta"
        )
    if system.calls_experts and given_flag(arguments, "--flextron"):  # from megatron-core 0.18 on
        raise ConfigurationError(
            "--flextron multiplies experts' rows by what a router of its own has chosen, whose gradients do not pass "
            f"through the experts' passes that {FLAG} {system.name} runs by themselves: drop it, or use monta"
        )
    if system.calls_experts and (flag := given_flag(arguments, *_SAVED_BY_EXPERTS)) is not None:
        raise ConfigurationError(
            f"{flag} saves what experts' last call in a step has, and {FLAG} {system.name} calls experts in its own "
            "order: drop it, or use monta"
        )
    if (ratio := options.gradient_compression_ratio) is not None and given_flag(arguments, "--perform-rl-step"):
        raise ConfigurationError(
            f"{PREFIX}gradient-compression-ratio {ratio:g} keeps parts of gradients from step to step, and "
            "--perform-rl-step loads other weights between them, with which these are lost: drop one of the two"
        )
    system.check(config, options, arguments)
    if options.wire != SAME:
        _check_wire(config, options.wire)
    schedule = system.copies_flag(options)
    if schedule is not None and (reason := keeps_from_splitting_rows(config)) is not None:
        raise ConfigurationError(
            f"{reason}, which {schedule} cannot bring together: drop it, use {FLAG} parm with {PREFIX}parm-schedule "
            "S1, or add --sequence-parallel"
        )


def _check_wire(config: Any, wire: Wire) -> None:
    """Refuses formats of rows on the wire that save nothing, or are rounded once more by others' scales."""
    flag, formats = f"{PREFIX}wire {wire}", (wire.dispatch, wire.combine)
    if config.fp16 and WireFormat.BF16 in formats:
        raise ConfigurationError(
            f"{flag} sends rows of --fp16 in as many bytes with fewer digits: use --bf16, or give {PREFIX}wire "
            "dispatch=fp8,combine=same"
        )
    if (recipe := quantization(config)) is not None and any(one.block is not None for one in formats):
        raise ConfigurationError(
            f"{flag} rounds what experts in {recipe} round again, by scales of their own: drop one of the two, or give "
            f"{PREFIX}wire bf16"
        )


def _check_auto(config: Any, options: Options, arguments: Any) -> None:
    """Refuses an `auto` with nothing or too much to plan by, and what cannot change between steps."""
    if (frozen := given_flag(arguments, "--freeze-all-layers")) is not None:
        raise ConfigurationError(
            f"{frozen} leaves nothing to train, and {FLAG} {AUTO} chooses by steps that train: name a dispatcher"
        )
    if config.deterministic_mode:
        raise ConfigurationError(
            f"--deterministic-mode has equal runs end alike, and {FLAG} {AUTO} chooses by measured times: name a "
            "dispatcher"
        )
    if options.profile is not None and options.plan is not None:
        raise ConfigurationError(
            f"{FLAG} {AUTO} plans by {PREFIX}profile {options.profile} or runs what {PREFIX}plan {options.plan} says: "
            "drop one of the two"
        )
    if options.plan is not None and options.activation_budget is not None:
        raise ConfigurationError(
            f"{PREFIX}activation-budget {options.activation_budget} bounds what {FLAG} {AUTO} chooses, and "
            f"{PREFIX}plan {options.plan} has been chosen: give --activation-budget to moe-opt plan, and drop it here"
        )
    if options.plan is not None and options.allow_lossy:
        raise ConfigurationError(
            f"{PREFIX}allow-lossy is for an {AUTO} that chooses, and {PREFIX}plan {options.plan} has been chosen "
            f"among what loses nothing: drop it, or give {PREFIX}profile in the plan's place"
        )
    given = next((name for name in ("profile", "plan") if getattr(options, name) is not None), None)
    if given is not None and options.profile_seconds is not None:
        raise ConfigurationError(
            f"{PREFIX}profile-seconds {options.profile_seconds} is for an {AUTO} that measures the cluster itself, and "
            f"{PREFIX}{given} {getattr(options, given)} is given: drop one of the two"
        )
    if options.wire != SAME:
        raise ConfigurationError(
            f"{PREFIX}wire {options.wire} is lossy, which {FLAG} {AUTO} is with {PREFIX}allow-lossy alone: give that "
            "in its place, and it may choose a format, or name a dispatcher"
        )
    for flag, ratio in options.compression.items():
        raise ConfigurationError(
            f"{flag} {ratio:g} is lossy, which {FLAG} {AUTO} never is: drop it, or choose expert-migration"
        )
    for one in fields(options):
        value = getattr(options, one.name)
        if one.metadata["auto"] == CHOOSES and value is not None:
            raise ConfigurationError(
                f"{one.metadata['flag']} {shown(value)} is what {FLAG} {AUTO} chooses: drop it, or name the "
                "dispatcher it is for"
            )
