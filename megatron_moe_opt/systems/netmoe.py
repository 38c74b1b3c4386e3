"""NetMoE: samples move to the ranks that hold most of their experts, on their way back from the experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.predicting.hops import HopSeconds, hop_passes
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.mpmoe import no_hops
from megatron_moe_opt.planning.predicting.partitioned_rows import hop_partitions
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction, Refusal
from megatron_moe_opt.schedules.groups import EP
from megatron_moe_opt.schedules.monta import CHUNK_COUNTS, even_chunks
from megatron_moe_opt.schedules.mpmoe import HOPS, JOINT, ROWS, SHARED_ROWS
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.systems.megatron_config import given_flag, quantization, recomputed_modules, repeats_moe_layers
from megatron_moe_opt.systems.monta import (
    DEFAULT_CHUNKS,
    MontaOptions,
    check_cuts,
    numbered_pipeline,
    parse_pipeline,
    pipelines,
    pipelining,
)
from megatron_moe_opt.systems.mpmoe import check_levels
from megatron_moe_opt.systems.system import FLAG, PREFIX, Grammar, RunTraits, System
from megatron_moe_opt.topology.domains import stationary

NAME = "netmoe"


def _build(groups: Any, options: Any, config: Any) -> Any:
    import torch

    from megatron_moe_opt.dispatchers.netmoe import NetmoeDispatcher
    from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens
    from megatron_moe_opt.runtime.hops.token_hops import TokenHops
    from megatron_moe_opt.topology.domain_groups import domain_groups, levels_of

    wire = options.wire.of_rows(config.params_dtype is torch.bfloat16)
    apart = holds_replicated_tokens(config)
    dispatcher = NetmoeDispatcher(groups, pipelining(config, groups, options), wire, apart)
    if options.way == HOPS:
        hops_in = domain_groups(groups.ep, stationary(levels_of(groups.ep, options.network_levels)), dispatcher)
        dispatcher.hops = TokenHops(hops_in, groups, config.num_moe_experts, config.moe_router_topk, wire)
    return dispatcher


def _attach(layer: Any, options: Any) -> None:
    from megatron_moe_opt.integration.layer.linked_blocks import check_seams

    check_seams()


def _check(config: Any, options: Any, arguments: Any) -> None:
    """Refuses what cannot move with samples, or would not be what it is without moves."""
    ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if _has_no_groups(ranks, tp * cp):
        of_sample = f"--tensor-model-parallel-size {tp}" + (f" x --context-parallel-size {cp}" if cp > 1 else "")
        raise ConfigurationError(
            f"{FLAG} netmoe moves samples between the groups that hold one each and share experts, but "
            f"--expert-model-parallel-size x --expert-tensor-parallel-size = {ranks} is no multiple, from 2 on, of "
            f"{of_sample}: choose one, or use monta"
        )
    _check_way(config, options)
    recompute, balancing = recomputed_modules(config), config.moe_router_load_balancing_type
    balancing = balancing if isinstance(balancing, (list, tuple)) else (balancing,)
    for wrong, flags in (
        (config.hidden_dropout > 0, f"--hidden-dropout {config.hidden_dropout}"),
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (getattr(config, "fused_residual_rmsnorm", False), "--fused-residual-rmsnorm"),
        (
            repeats_moe_layers(config) and quantization(config) is not None,
            f"--recompute-granularity {config.recompute_granularity} with {quantization(config)}",
        ),
        ("layernorm" in recompute, "--recompute-modules layernorm"),
        (config.fine_grained_activation_offloading, "--fine-grained-activation-offloading"),
        (config.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor"),
        (config.moe_shared_expert_overlap, "--moe-shared-expert-overlap"),
        (config.moe_latent_size, "--moe-latent-size"),
        (config.mrope_section is not None, "--mrope-section"),
        (getattr(config, "mlp_chunks_for_training", 1) > 1, "--mlp-chunks-for-training"),
        *((one in balancing, f"--moe-router-load-balancing-type {one}") for one in ("sinkhorn", "quantile_balancing")),
        ((getattr(config, "dsa_indexer_topk_freq", 1) or 1) > 1, "--dsa-indexer-topk-freq"),
        *(
            (given_flag(arguments, flag), flag)
            for flag in (
                "--reset-attention-mask",
                "--export-kd-teacher-load",
                "--perform-rl-step",
                "--flextron",
                *_SAVES,
            )  # fmt: skip
        ),
    ):
        if wrong:
            why = _WHY.get(flags.partition(" ")[0], "which moves samples between ranks")
            raise ConfigurationError(f"{flags} does not work with {FLAG} netmoe, {why}: change it, or use monta")


def _has_no_groups(ranks: int, of_sample: int) -> bool:
    """Whether `ranks` that share experts are not several groups of ranks that hold one sample each."""
    return ranks == of_sample or ranks % of_sample > 0


_SAVES = ("--moe-routing-trace-path", "--save-activations-interval", "--save-dgrads-interval")
"""The flags that have Megatron-LM save what layers do with samples, those of other ranks among them."""
_WHY = {
    "--hidden-dropout": "whose sums come back with the residual in them, which must not be dropped",
    "--moe-expert-capacity-factor": "under which other samples share a rank, so that other tokens would be dropped",
    "--recompute-modules": "which takes a layer's norm on the ranks of the experts",
    "--export-kd-teacher-load": "whose layers have other ranks' samples than the teacher's",
    "--flextron": "whose norms are those of the rank that has a sample next, with its choice of widths",
    **dict.fromkeys(_SAVES, "whose ranks would save what other ranks' samples are"),
}
"""The reasons, by flag, where it is not plain that what it names would have to move with samples."""


def _check_way(config: Any, options: Any) -> None:
    """Refuses what tokens that hop do not go with, and levels where none does."""
    if options.way == AUTO:
        raise ConfigurationError(
            f"{PREFIX}way {AUTO} has nothing to choose by under {FLAG} netmoe: give {PREFIX}way {ROWS} or {HOPS}"
        )
    if options.way in (JOINT, SHARED_ROWS):
        raise ConfigurationError(
            f"{PREFIX}way {options.way} is for partitions, and samples of {FLAG} netmoe go over expert-TP by itself: "
            f"give {PREFIX}way {ROWS} or {HOPS}"
        )
    check_levels(options)
    if options.way != HOPS:
        check_cuts(options)
        return
    flag = f"{PREFIX}way {HOPS}"
    if config.expert_model_parallel_size == 1:
        raise ConfigurationError(
            f"--expert-model-parallel-size 1 has all experts on every rank, and {flag} is about the links to others: "
            f"use expert parallelism above 1, or (from megatron-core 0.19 on) give {PREFIX}way {ROWS}"
        )
    if config.moe_router_padding_for_quantization:
        raise ConfigurationError(
            f"--moe-router-padding-for-quantization gives tokens more experts than top-k, and {flag} sends a token's "
            f"{config.moe_router_topk}: drop it, or give {PREFIX}way {ROWS}"
        )
    if options.monta_level is not None or options.profile is not None:
        other = "monta-level" if options.monta_level is not None else "profile"
        raise ConfigurationError(
            f"{PREFIX}{other} is about the lanes of rows, and {flag} has lanes of its own: drop it, and give "
            f"{PREFIX}chunks"
        )


def _candidates(layer: LayerOnCluster, options: MontaOptions) -> Iterator[Prediction | Refusal]:
    """Predicts the dispatcher's exchanges, their all-to-alls less what placing samples keeps inside nodes."""
    one, saving = layer.workload, layer.workload.placement_saving
    ranks, of_sample = one.ep * one.etp, one.sample_ranks
    if _has_no_groups(ranks, of_sample):
        yield Refusal(
            NAME,
            f"samples move between the groups of TP x CP = {of_sample} ranks that hold one each and share experts, and "
            f"EP x expert-TP = {ranks} is no multiple of that, from 2 on",
        )
        return
    if one.capacity_factor is not None:
        yield Refusal(NAME, f"it does not train with a capacity, {_WHY['--moe-expert-capacity-factor']}")
        return
    if saving is None:
        depends = "what it saves depends on which samples use which experts"
        yield Refusal(
            NAME, f"{depends}: moe-opt trace replay says how much, and moe-opt plan takes that by --placement-saving"
        )
        return

    def placed(op: Op) -> Op:
        crosses = op.kind is Kind.ALL_TO_ALL and layer.links.sent(op)[0] > 0
        return replace(op, size=round(op.size * (1 - saving))) if crosses else op

    def moved(variant: str, at_home: list[Schedule], **how: Any) -> Prediction:
        """Returns the prediction of schedules that are smaller between nodes than these, of samples at home."""
        schedules = [replace(schedule, ops=tuple(map(placed, schedule.ops))) for schedule in at_home]
        ops = (*alone, *(op for schedule in at_home for op in schedule.ops))
        _, inside = layer.links.sent_by_all(ops)
        found = layer.prediction(variant, schedules, alone, **how)
        held, activations = HeldMore(of_pass=normalised), found.activation_bytes + normalised
        return replace(found, intra_bytes=inside, activation_bytes=activations, held_more=held)

    alone = _residuals(layer)
    # What norms at the experts take, which they keep besides what the experts do.
    normalised = 0 if _moves_apart(one) else one.rows * one.etp * one.row_bytes
    out, back, *backward = layer.passes
    lanes = out.exchanged - backward[0].exchanged
    back = replace(back, exchanged=back.exchanged + lanes)  # behind each row, which token of its sample it is
    for level, count in pipelines(options, layer.passes):
        at_home = [
            exchanged.schedule(level, even_chunks(exchanged.exchanged, one.etp, count), one.ep, one.etp)
            for exchanged in (out, back, *backward)
        ]
        yield moved(f"{NAME}:{setting}" if (setting := _setting(level, count)) else NAME, at_home, parts=count)
    refusal = no_hops(layer)
    if one.ep == 1:
        refusal = "all experts are on every rank: no token hops"
    if refusal is not None:
        yield Refusal(f"{NAME}:{HOPS}", refusal)
        return
    hop_seconds = HopSeconds(layer, layer.costs)

    def costs(op: Op) -> float:
        return layer.costs(op) if op.group == EP else hop_seconds(op)

    for count in CHUNK_COUNTS:
        parts = hop_partitions(one, layer.skew, layer.computed, [1] * count)
        at_home = list(chain.from_iterable(hop_passes(one, parts, notes=True, keys_bytes=one.lane_bytes)))
        own = parts[0].own * count
        yield moved(f"{NAME}:{_hops(count)}", at_home, costs=costs, parts=count, local_rows=own)


def _residuals(layer: LayerOnCluster) -> list[Op]:
    """Returns the ops of residuals of samples that move, forward and backward, where they do so by themselves. How
    many do is not known; all are taken to, which is the most. Where all TP ranks hold all tokens: also what is
    gathered over TP, as at the edge.
    """
    one = layer.workload
    moved = Op(Kind.ALL_TO_ALL, Lane.INTER, size=-(-one.tokens // one.tp) * one.row_bytes, group=EP)
    apart = [moved] * (2 * (_moves_apart(one) and one.ep > 1))
    return [*layer.edge, *layer.edge[:1], *apart]  # the residual's gradient is gathered, too


def _moves_apart(one: LayerWorkload) -> bool:
    """Whether residuals move by themselves: rows are rounded, or all TP ranks hold all tokens."""
    return one.outbound_bytes != one.row_bytes or one.homebound_bytes != one.row_bytes or one.tp > 1


def _parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    parts = re.fullmatch(rf"{HOPS}(?:x([1-9][0-9]*))?", setting)
    if parts is not None:
        return {"way": HOPS, "chunks": int(parts[1] or 1)}
    return parse_pipeline(variant, setting, profile)


def _kind(setting: str) -> str:
    """Returns what travels: a token once over a link, or a row for each of its experts."""
    return HOPS if setting.startswith(HOPS) else ""


def _numbered(setting: str) -> str:
    return f"{HOPS}x1" if setting == HOPS else numbered_pipeline(setting or "O1")


def _write(options: Any, levels: int) -> str:
    """Returns the settings of a variant as its name has them; nothing at O1."""
    if options.way == HOPS:
        return _hops(options.chunks or 1)
    return _setting(options.monta_level or "O1", options.chunks or DEFAULT_CHUNKS)


def _hops(chunks: int) -> str:
    return HOPS if chunks == 1 else f"{HOPS}x{chunks}"


def _setting(level: str, chunks: int) -> str:
    return "" if level == "O1" else f"{level}x{chunks}"


def _why_fixed(options: Any, run: RunTraits) -> str | None:
    if run.samples_may_move:
        return run.no_hops if options.way == HOPS else None
    return f"moves samples, which auto counts without a plan alone: drop {PREFIX}plan, or choose {FLAG} {NAME}"


NETMOE = System(
    name=NAME,
    options=MontaOptions,
    reads=("profile", "expert_order", "way", "network_levels", "wire"),
    build=_build,
    grammar=Grammar(_parse, _write, _kind, _numbered),
    attach=_attach,
    check=_check,
    candidates=_candidates,
    domains=lambda options, workers: stationary(workers) if options.way == HOPS else None,
    why_fixed=_why_fixed,
    moves_samples=True,
)
