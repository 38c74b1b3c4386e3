"""MPMoE: rows go through their experts in partitions, as one pipeline, whose partitions may share memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, BYTES, one_of
from megatron_moe_opt.option_values import PARTITIONS as SEVERAL_PARTITIONS
from megatron_moe_opt.planning.costs.domain_curves import has_curves
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.mpmoe import PartitionedLayer, no_hops, no_joint, no_sharing
from megatron_moe_opt.planning.predicting.prediction import Prediction, Refusal
from megatron_moe_opt.schedules.memory_reuse import NONE, STRATEGIES, Restore
from megatron_moe_opt.schedules.mpmoe import HOPS, JOINT, PARTITIONS, ROWS, SHARED_ROWS
from megatron_moe_opt.systems.expert_migration import (
    EXPERT_MIGRATION,
    check_padding,
    check_travelling,
    domain_kind,
    domain_word,
    domains_of,
    why_experts_fixed,
)
from megatron_moe_opt.systems.megatron_config import given_flag, quantization, recomputed_modules, repeats_moe_layers
from megatron_moe_opt.systems.system import (
    CHOOSES,
    FLAG,
    PREFIX,
    READS,
    Grammar,
    RunTraits,
    SharedOptions,
    System,
    chosen_by_profile,
    option,
    shown,
)
from megatron_moe_opt.topology.domains import ExpertDomains, realisable

NAME = "mpmoe"
DEFAULT_PARTITIONS = 4
CHUNKS_OF_A_PARTITION = (1, 2, 4)
"""The numbers of chunks to choose from, in which a partition goes over two links."""
_OF_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""The modules that run in an expert call, of those that --offload-modules takes."""


@dataclass(frozen=True)
class MpmoeOptions(SharedOptions):
    """Into how many partitions rows are cut, and how partitions share memory."""

    partitions: int | tuple[int, ...] | str | None = option(
        "partitions",
        SEVERAL_PARTITIONS,
        "parts of the rows that mpmoe runs through the experts as a pipeline; several to choose from; or auto: any of "
        f"{PARTITIONS[0]} to {PARTITIONS[-1]} (default: {DEFAULT_PARTITIONS})",
        auto=CHOOSES,
    )
    memory_reuse: str | None = option(
        "memory-reuse",
        one_of(*STRATEGIES, AUTO),
        "whether mpmoe's partitions share buffers, and how backward gets back what they overwrite: the inputs of the "
        "experts, and what these save (the middle). S1: both from the host; S2: inputs sent again, the middle from the "
        "host; S3: inputs from the host, the middle computed again; S4: inputs sent and the middle computed again "
        f"(default: {NONE})",
        auto=CHOOSES,
    )
    way: str | None = option(
        "way",
        one_of(ROWS, HOPS, JOINT, SHARED_ROWS, AUTO),
        "how mpmoe's partitions, or netmoe's samples, go to their experts: rows, one for each expert of a token; "
        f"hops, a token once over every link, over the network levels of {PREFIX}levels; or, of mpmoe, joint: a row to "
        "all shards of its expert in one all-to-all over EP and expert-TP; or shared-rows: rows of tokens that all TP "
        f"ranks hold, shared out behind the router as in Parm's S2 (default: {ROWS})",
        auto=CHOOSES,
    )
    domain_sizes: ClassVar[tuple[int, ...] | str | None] = AUTO
    """Domain sizes of expert-migration's options, where they are given with these; these alone
    leave them to be chosen.
    """
    activation_budget: int | None = option(
        "activation-budget",
        BYTES,
        "the most that activations of a layer may take (MPMoE, eq. 2), such as 512MiB, where mpmoe or auto chooses",
        auto=READS,
    )

    @property
    def tunes_partitions(self) -> bool:
        """Whether `mpmoe` chooses any of its partitions, their chunks, its memory reuse and its way."""
        several = (self.partition_counts, self.partition_chunks)
        return any(len(counts) > 1 for counts in several) or AUTO in (self.memory_reuse, self.way)

    @property
    def partition_counts(self) -> tuple[int, ...]:
        """Returns the partition counts to choose from; one where the user chose."""
        if self.partitions == AUTO:
            return PARTITIONS
        if isinstance(self.partitions, tuple):
            return self.partitions
        return (self.partitions or DEFAULT_PARTITIONS,)

    @property
    def partition_chunks(self) -> tuple[int, ...]:
        """Returns the numbers of chunks of a partition to choose from; one where the user chose."""
        chunks = getattr(self, "chunks", AUTO)  # an option of monta's, and left open where it is not with these
        return CHUNKS_OF_A_PARTITION if chunks == AUTO else (chunks or 1,)

    @property
    def memory_strategies(self) -> tuple[str, ...]:
        """Returns the strategies of memory reuse to choose from; one where the user chose."""
        return tuple(STRATEGIES) if self.memory_reuse == AUTO else (self.memory_reuse or NONE,)

    @property
    def ways(self) -> tuple[str, ...]:
        """Returns the ways of partitions to choose from; one where the user chose."""
        return (ROWS, HOPS, JOINT, SHARED_ROWS) if self.way == AUTO else (self.way or ROWS,)

    def check(self) -> None:
        """Refuses, with ConfigurationError, several numbers of partitions, or auto, without a profile."""
        if isinstance(self.partitions, tuple) and len(self.partitions) > 1:
            self.needs_profile("partitions")
        self.auto_needs_profile("partitions", "memory_reuse", "way")


def _build(groups: Any, options: MpmoeOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.mpmoe import MpmoeDispatcher
    from megatron_moe_opt.dispatchers.partitioning import partitioning_of
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload
    from megatron_moe_opt.runtime.hops.token_hops import TokenHops
    from megatron_moe_opt.topology.domain_groups import domain_groups, levels_of

    hopping = HOPS in options.ways
    workers = levels_of(groups.ep, options.network_levels) if hopping else ()
    workload = layer_workload(config, groups, workers, wire=options.wire)
    shares_tokens = workload.sharers > 1 and options.ways in ((HOPS,), (SHARED_ROWS,))
    if not shares_tokens:
        workload = replace(workload, routes_all=False)  # they are split before the router, whatever way is chosen
    partitioning = partitioning_of(options, groups, workload)
    dispatcher = MpmoeDispatcher(groups, partitioning, options.wire, shares_tokens, repeats_moe_layers(config))
    if not hopping:
        return dispatcher
    hops_in = domain_groups(groups.ep, domains_of(options, workers), dispatcher)
    dispatcher.hops = TokenHops(hops_in, groups, config.num_moe_experts, config.moe_router_topk, options.wire)
    return dispatcher


def _attach(layer: Any, options: MpmoeOptions) -> None:
    from megatron_moe_opt.integration.layer.mpmoe_layer import pipeline_experts

    pipeline_experts(layer, options)


def _check(config: Any, options: MpmoeOptions, arguments: Any) -> None:
    """Refuses what does not fit experts that run partition by partition, and what they save."""
    if config.moe_router_padding_for_quantization:
        raise ConfigurationError(
            f"--moe-router-padding-for-quantization pads an expert's rows before {FLAG} mpmoe cuts them: drop it, and "
            "the experts pad each partition themselves"
        )
    if "moe_act" in recomputed_modules(config):
        raise ConfigurationError(
            "--recompute-modules moe_act is recomputed by backward passes of the whole graph only, and under "
            f"{FLAG} {NAME} the experts' passes run one by one: drop it, or give {PREFIX}memory-reuse S3 in its place"
        )
    if getattr(config, "moe_paged_stash", False):  # from megatron-core 0.19 on
        raise ConfigurationError(
            f"--moe-paged-stash counts the calls of experts in a step, of which {FLAG} {NAME} makes one for each "
            "partition: drop it, or use monta"
        )
    if options.way == JOINT and (config.expert_tensor_parallel_size or 1) == 1:
        raise ConfigurationError(
            f"{PREFIX}way {JOINT} sends rows to all shards of an expert at once, and with "
            f"--expert-tensor-parallel-size 1 experts are whole: give {PREFIX}way {ROWS}, whose all-to-all is the same"
        )
    if options.way == SHARED_ROWS:
        _check_shared(config)
    if options.partition_counts != (1,) and _rounds_each(config, arguments):
        raise ConfigurationError(ROUNDS_EACH)
    check_levels(options)
    _check_chunks(options)
    _check_domains(config, options)
    if HOPS in options.ways:
        check_padding(config, f"{PREFIX}way {HOPS}")
    if options.activation_budget is not None and not options.tunes_partitions:
        raise ConfigurationError(
            f"{PREFIX}activation-budget {options.activation_budget} has nothing to choose: add {PREFIX}partitions auto "
            f"or {PREFIX}memory-reuse auto, or drop it"
        )
    reuse, offloads = options.memory_reuse or NONE, getattr(config, "fine_grained_activation_offloading", False)
    if reuse == NONE:
        offloaded = _OF_EXPERTS.intersection(config.offload_modules or ()) if offloads else ()
        if offloaded and options.partition_counts != (1,):
            raise ConfigurationError(
                f"--offload-modules {' '.join(sorted(offloaded))} brings back what experts saved in their last call "
                f"first, and {FLAG} {NAME} calls them once a partition: drop these modules, or replace the offloading "
                f"by {PREFIX}memory-reuse S1"
            )
        return
    flag = f"{PREFIX}memory-reuse {reuse}"
    if (recipe := quantization(config)) is not None:
        raise ConfigurationError(f"{flag} does not know what experts in {recipe} save: use {PREFIX}memory-reuse {NONE}")
    flag_of_products = given_flag(config, "--use-transformer-engine-op-fuser", "--moe-use-grouped-tensor")
    if _offloads_middle(options) and flag_of_products is not None:
        raise ConfigurationError(
            f"{flag} may offload what an expert's first matrix product makes, which {flag_of_products} fuses with what "
            f"follows, or pads: give {PREFIX}memory-reuse S3 or S4, or drop the latter"
        )
    if offloads:
        raise ConfigurationError(
            f"--fine-grained-activation-offloading offloads what {flag} restores in another way: drop one of the two"
        )


def _check_shared(config: Any) -> None:
    """Refuses rows to be shared out where ranks have tokens of their own, or would route together what each routes."""
    from megatron_moe_opt.integration.layer.replicated_tokens import holds_replicated_tokens, routes_together

    flag, way_out = f"{PREFIX}way {SHARED_ROWS}", f"give {PREFIX}way {ROWS}"
    if not holds_replicated_tokens(config):
        raise ConfigurationError(
            f"{flag} shares out the rows of tokens that all ranks of a TP group hold, and with --sequence-parallel or "
            f"--tensor-model-parallel-size 1 ranks have tokens of their own: {way_out}"
        )
    if routes_together(config):
        raise ConfigurationError(
            f"{flag} has a router see all tokens of a TP group, and --moe-expert-capacity-factor or "
            "--moe-router-load-balancing-type sinkhorn drops or balances by those that it sees, which trains another "
            f"function than with each rank's part of them: {way_out}"
        )


ROUNDS_EACH = (
    "--use-transformer-engine-op-fuser adds each partition's gradients to main_grad, where they are narrower than "
    "float32 and would be rounded each time: drop --grad-reduce-in-bf16, add --accumulate-allreduce-grads-in-fp32, or "
    f"give {PREFIX}partitions 1"
)
"""The sentence that refuses operations which were made to add to narrow gradients."""


def _rounds_each(config: Any, arguments: Any) -> bool:
    """Whether operations that were made to add to narrow gradients would do so for each partition."""
    adds = getattr(config, "use_transformer_engine_op_fuser", False) and config.gradient_accumulation_fusion
    narrow = config.params_dtype.itemsize < 4 and not getattr(arguments, "accumulate_allreduce_grads_in_fp32", True)
    return bool(adds and narrow)


def check_levels(options: Any) -> None:
    """Refuses, with ConfigurationError, network levels over which no token hops."""
    if options.network_levels is not None and HOPS not in options.ways:
        raise ConfigurationError(
            f"{PREFIX}levels {shown(options.network_levels)} says over which links tokens hop, and rows do not: give "
            f"{PREFIX}way {HOPS}, or drop it"
        )


def _check_chunks(options: Any) -> None:
    """Refuses chunks of partitions that do not go by rows, or whose rows lie where another chunk's were."""
    flag = f"{PREFIX}chunks {options.chunks}"
    if options.partition_chunks == (1,):
        return
    if ROWS not in options.ways or (options.ways != (ROWS,) and options.chunks != AUTO):
        raise ConfigurationError(
            f"{flag} cuts rows that go over EP and then over expert-TP, and with {PREFIX}way {options.way} others may: "
            f"give {PREFIX}way {ROWS}, or drop it"
        )
    reuse = options.memory_strategies
    if NONE not in reuse or (reuse != (NONE,) and options.chunks != AUTO):
        raise ConfigurationError(
            f"{flag} has chunks of a partition on their way at once, and with {PREFIX}memory-reuse "
            f"{options.memory_reuse} they would wait for each other's buffers: drop one of the two"
        )


def _offloads_middle(options: Any) -> bool:
    """Whether what an expert's first matrix product makes may be offloaded, and what follows be computed again."""
    return any(STRATEGIES[one].middle is Restore.OFFLOAD for one in options.memory_strategies)


def _check_domains(config: Any, options: Any) -> None:
    """Refuses experts that travel where tokens do not hop, and with what does not go with them."""
    if options.domain_sizes is None:
        for name in sorted(EXPERT_MIGRATION.own_options - {"network_levels"}):
            if options.is_given(name):
                raise ConfigurationError(
                    f"{options.as_given(name)} is about experts that travel, and under {FLAG} {NAME} none does: give "
                    f"{PREFIX}way {HOPS} and {PREFIX}domain-sizes above 1, or drop it"
                )
        return
    flag = f"{PREFIX}domain-sizes {shown(options.domain_sizes)}"
    if options.domain_sizes == AUTO:
        raise ConfigurationError(f"{flag} is not for {FLAG} {NAME} to choose: name the sizes, or use {FLAG} {AUTO}")
    if options.ways != (HOPS,):
        raise ConfigurationError(
            f"{flag} has experts travel between ranks to which tokens then do not hop, and rows do not hop at all: "
            f"give {PREFIX}way {HOPS}, or drop it"
        )
    options.check_travel()
    if max(options.domain_sizes) == 1:
        return
    if (config.expert_tensor_parallel_size or 1) > 1:
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {config.expert_tensor_parallel_size} cuts experts, which do not travel in "
            f"parts: set it to 1, or drop {flag}"
        )
    check_travelling(config, options, shown(options.domain_sizes))


def _unread_profile(options: MpmoeOptions) -> str | None:
    return None if options.tunes_partitions else f"give {PREFIX}partitions {AUTO}"


def _parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    if setting == AUTO:
        return {"partitions": AUTO, **chosen_by_profile(variant, profile)}
    sizes = r"(?::([1-9][0-9]*(?:x[1-9][0-9]*)*))?"
    way = rf"(?::({JOINT}|{SHARED_ROWS})|:({HOPS}){sizes}|:c([1-9][0-9]*))?"
    parts = re.fullmatch(rf"([1-9][0-9]*)(?::({'|'.join(STRATEGIES)}))?{way}", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a number of partitions, where they share memory how ("
            f"{', '.join(STRATEGIES)}), and chunks of each, {JOINT} where rows go to all shards of an expert at once, "
            f"{SHARED_ROWS} where TP ranks share them out, or {HOPS} where a token crosses links once, with the sizes "
            f"of domains in which experts travel, such as mpmoe:4, mpmoe:4:c2, mpmoe:4:S3, mpmoe:4:{JOINT}, "
            f"mpmoe:4:S3:{HOPS} or mpmoe:4:{HOPS}:2x1; or mpmoe:auto"
        )
    given: dict[str, Any] = {"partitions": int(parts[1]), "memory_reuse": parts[2], "way": parts[3] or parts[4]}
    if parts[5] is not None:
        given["domain_sizes"] = tuple(map(int, parts[5].split("x")))
    return given if parts[6] is None else given | {"chunks": int(parts[6])}


def _write(options: MpmoeOptions, levels: int) -> str:
    sizes = options.domain_sizes if options.way == HOPS else None
    count, strategy, way = options.partitions or DEFAULT_PARTITIONS, options.memory_reuse or NONE, options.way or ROWS
    return _setting(count, strategy, way, sizes, options.partition_chunks[0])


def _setting(count: int, strategy: str, way: str, sizes: tuple[int, ...] | None, chunks: int) -> str:
    words = [str(count), *([strategy] if strategy != NONE else []), *([way] if way != ROWS else [])]
    words += [f"c{chunks}"] if chunks > 1 else []
    return ":".join([*words, *([domain_word(sizes)] if max(sizes or (1,)) > 1 else [])])


def _kind(setting: str) -> str:
    """Returns what travels: a row for each expert of a token (empty), or of those that a TP group shares out
    (SHARED_ROWS), a row for all shards of an expert at once (JOINT), or a token once over a link (HOPS), and the levels
    at which experts travel.
    """
    way = setting.rpartition(":")[2]
    if way in (JOINT, SHARED_ROWS):
        return way
    _, hops, sizes = setting.partition(HOPS)
    return hops + (f":{domain_kind(sizes[1:])}" if sizes else "")


def _numbered(setting: str) -> str:
    return f"{setting}:c1" if setting.isdecimal() else setting  # else a partition goes in one piece


def candidate(layer: LayerOnCluster, count: int, strategy: str) -> Prediction:
    """Returns what the layer takes in so many partitions of rows. Raises ConfigurationError: a curve is missing."""
    return _predicted(layer, PartitionedLayer.of(layer, count, ROWS, strategy))


def _predicted(layer: LayerOnCluster, cut: PartitionedLayer) -> Prediction:
    setting = _setting(len(cut.parts), cut.strategy, cut.way, cut.domains and cut.domains.sizes, cut.stages.chunks)
    return cut.prediction(layer, f"{NAME}:{setting}")


def _candidates(layer: LayerOnCluster, options: MpmoeOptions) -> Iterator[Prediction | Refusal]:
    """Predicts the candidates. A single partition has nothing to share, so all strategies are the same. Experts that
    travel take more memory than partitions save: there the first strategy alone is tried.
    """
    strategies = options.memory_strategies
    for way in options.ways:
        refusal = _CANNOT[way](layer)
        if refusal is not None:
            yield Refusal(f"{NAME}:{way}", refusal)
            continue
        cuts = [
            PartitionedLayer.of(layer, count, way, strategy, domains, chunks)
            for domains in (_domains_to_try(layer, options) if way == HOPS else (None,))
            for strategy in (strategies if domains is None else strategies[:1])
            for chunks in _chunks_to_try(layer, options, way, strategy)
            for count in options.partition_counts
            if count > 1 or strategy == strategies[0]
        ]
        limited = layer.below < math.inf
        tried = [(cut.least_seconds(layer) if limited else 0.0, cut) for cut in cuts]
        for least, cut in sorted(tried, key=itemgetter(0)):  # the fastest first: others need no prediction
            if least < layer.below and layer.has_room(cut.held_more(layer)):
                yield _predicted(layer, cut)


def _domains_to_try(layer: LayerOnCluster, options: MpmoeOptions) -> Sequence[ExpertDomains | None]:
    """Returns the domains that were named; or all, where experts are whole and how they travel was measured."""
    one, sizes = layer.workload, options.domain_sizes
    if sizes != AUTO:
        return [domains_of(options, one.workers) if max(sizes or (1,)) > 1 else None]
    found = [domains for domains in realisable(one.workers) if one.etp == 1 and prod(domains.sizes) > 1]
    return [None, *(domains for domains in found if has_curves(layer.domain_curves, domains))]


def _chunks_to_try(layer: LayerOnCluster, options: MpmoeOptions, way: str, strategy: str) -> Sequence[int]:
    """Returns the chunks of a partition to choose from: several where it goes by rows, over two links, and shares no
    memory.
    """
    one, counts = layer.workload, options.partition_chunks
    gains = way == ROWS and strategy == NONE and one.ep > 1 and one.etp > 1
    return counts if gains or len(counts) == 1 else counts[:1]


_CANNOT: Mapping[str, Callable[[LayerOnCluster], str | None]] = {
    ROWS: lambda _: None,
    HOPS: no_hops,
    JOINT: no_joint,
    SHARED_ROWS: no_sharing,
}


def _why_fixed(options: Any, run: RunTraits) -> str | None:
    if run.called_by is not None:
        return f"experts would be called without {run.called_by}, which is not Megatron's"
    if run.outside is not None:
        return (
            f"a trained tensor of shape {list(run.outside)} takes part in the experts without being a parameter of "
            "their module, and would get no gradient from them"
        )
    no_hops = run.no_hops if HOPS in options.ways else None
    return no_hops or why_experts_fixed(options, run)


MPMOE = System(
    name=NAME,
    options=MpmoeOptions,
    reads=("profile", "chunks", "expert_order", "wire", *sorted(EXPERT_MIGRATION.own_options)),
    unread_profile=_unread_profile,
    build=_build,
    attach=_attach,
    check=_check,
    copies_flag=lambda options: f"{PREFIX}way {SHARED_ROWS}" if options.way == SHARED_ROWS else None,
    grammar=Grammar(_parse, _write, _kind, _numbered),
    candidates=_candidates,
    domains=lambda options, workers: domains_of(options, workers) if HOPS in options.ways else None,
    why_fixed=_why_fixed,
    calls_experts=True,
    is_pipeline_of_experts=True,
)
