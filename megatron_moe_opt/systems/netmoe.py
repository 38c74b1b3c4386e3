"""NetMoE: samples move to the ranks that hold most of their experts, on their way back from the experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Op
from megatron_moe_opt.systems.monta import MONTA, MontaOptions, parse_pipeline, pipelines, pipelining
from megatron_moe_opt.systems.system import FLAG, Grammar, Run, System, recomputed_modules

NAME = "netmoe"


def _build(groups: Any, options: MontaOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher

    return NetmoeDispatcher(groups, pipelining(config, groups, options))


def _attach(layer: Any, options: Any) -> None:
    from megatron_moe_opt.integration.layer.netmoe_layer import check_seams

    check_seams(layer, options)


def _check(config: Any, options: Any, arguments: Any) -> None:
    """Refuses what cannot move with samples, or would not be what it is without moves."""
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
    recompute = recomputed_modules(config)
    for wrong, flags in (
        (config.context_parallel_size > 1, f"--context-parallel-size {config.context_parallel_size}"),
        (
            config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
            "--tensor-model-parallel-size without --sequence-parallel",
        ),
        (config.hidden_dropout > 0, f"--hidden-dropout {config.hidden_dropout}"),
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (getattr(config, "fused_residual_rmsnorm", False), "--fused-residual-rmsnorm"),
        (
            (config.recompute_granularity == "full" or "moe" in recompute) and bool(config.fp8 or config.fp4),
            f"--recompute-granularity {config.recompute_granularity} with --fp{8 if config.fp8 else 4}-format",
        ),
        ("layernorm" in recompute, "--recompute-modules layernorm"),
        (config.fine_grained_activation_offloading, "--fine-grained-activation-offloading"),
        (config.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor"),
        (config.moe_shared_expert_overlap, "--moe-shared-expert-overlap"),
        (config.moe_latent_size, "--moe-latent-size"),
        (config.mrope_section is not None, "--mrope-section"),
        (getattr(config, "mlp_chunks_for_training", 1) > 1, "--mlp-chunks-for-training"),
        (config.moe_router_load_balancing_type == "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
        (getattr(arguments, "reset_attention_mask", False), "--reset-attention-mask"),
    ):
        if wrong:
            raise ConfigurationError(
                f"{flags} does not work with {FLAG} netmoe, which moves samples between ranks: change it, or use monta"
            )


def _candidates(layer: LayerOnCluster, options: MontaOptions) -> Iterator[Prediction | Refusal]:
    """The exchanges that the dispatcher runs, their all-to-alls less what placing samples keeps inside nodes."""
    one, saving = layer.workload, layer.workload.placement_saving
    if saving is None:
        yield Refusal(NAME, "what it saves depends on which samples use which experts: give a routing trace")
        return
    if one.tp > 1:
        yield Refusal(NAME, "samples do not move where all TP ranks hold the same tokens")
        return

    def placed(op: Op) -> Op:
        crosses = op.kind is Kind.ALL_TO_ALL and layer.links.sent(op)[0] > 0
        return replace(op, size=round(op.size * (1 - saving))) if crosses else op

    out, back, *backward = layer.passes
    back = replace(back, exchanged=out.exchanged)  # behind each row, which token of its sample it is
    for level, count in pipelines(options):
        at_home = [
            exchanged.schedule(level, even_chunks(exchanged.exchanged, one.etp, count), one.ep, one.etp)
            for exchanged in (out, back, *backward)
        ]
        schedules = [replace(schedule, ops=tuple(map(placed, schedule.ops))) for schedule in at_home]
        inside = sum(layer.links.sent(op)[1] for schedule in at_home for op in schedule.ops if op.kind in COLLECTIVES)
        variant = NETMOE.variant(MontaOptions(monta_level=level, chunks=count))
        yield replace(layer.prediction(variant, schedules, parts=count), intra_bytes=inside)


def _write(options: MontaOptions, levels: int) -> str:
    """Nothing at O1."""
    pipeline = MONTA.grammar.write(options, levels)
    return "" if pipeline == "O1" else pipeline


def _stays(options: Any, run: Run) -> str:
    return f"moves samples between layers, which layers cannot change to: choose {FLAG} {NAME}"


NETMOE = System(
    name=NAME,
    options=MontaOptions,
    reads=("profile",),
    build=_build,
    grammar=Grammar(parse_pipeline, _write),
    attach=_attach,
    check=_check,
    candidates=_candidates,
    stays=_stays,
    moves_samples=True,
)
