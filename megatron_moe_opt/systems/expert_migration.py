"""Expert migration (HybridEP): experts travel inside a domain, tokens between domains, once over every link."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import ALL, AUTO, FROM_0, FROM_0_OR_ALL, LIST, RATIO, one_of, or_auto
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import OURS, Cluster
from megatron_moe_opt.planning.costs.link_bytes import LinkBytes
from megatron_moe_opt.planning.predicting import expert_migration
from megatron_moe_opt.planning.predicting.expert_migration import DomainChoice
from megatron_moe_opt.planning.predicting.hops import HopSeconds, hop_passes
from megatron_moe_opt.planning.predicting.layer_on_cluster import DISPATCH, EXPERTS, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import hop_partitions
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction, Refusal
from megatron_moe_opt.schedules.monta import CHUNK_COUNTS
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.systems.megatron_config import given_flag, quantization
from megatron_moe_opt.systems.system import (
    CHOOSES,
    FLAG,
    PREFIX,
    READS,
    Grammar,
    RunTraits,
    SharedOptions,
    System,
    check_first_pass,
    chosen_by_profile,
    option,
    shown,
)
from megatron_moe_opt.topology.domains import ExpertDomains

NAME = "expert-migration"
RESIDUALS = LAST, SHARED = "last", "shared"


@dataclass(frozen=True)
class MigrationOptions(SharedOptions):
    """Which experts travel, how early, and in which form."""

    network_levels: tuple[int, ...] | None = option(
        "levels",
        LIST,
        "workers of each network level of the expert-parallel group, the slowest level first (default: its nodes and "
        "the ranks of each)",
        auto=READS,
    )
    domain_sizes: tuple[int, ...] | str | None = option(
        "domain-sizes",
        or_auto(LIST),
        "workers of an expert domain at each level of the expert-migration dispatcher, the slowest level first: "
        "experts travel inside a domain, tokens between domains (default: auto with a profile, else 1 at every level: "
        "no expert travels)",
        metavar="S,...|auto",
        auto=CHOOSES,
    )
    prefetch_layers: int = option(
        "prefetch-layers",
        FROM_0,
        "layers whose experts are gathered before their turn (default: %(default)s)",
        1,
        auto=READS,
    )
    resident_layers: int | str | None = option(
        "resident-layers",
        FROM_0_OR_ALL,
        "layers whose gathered experts stay in memory, those used last, or all; other layers' are gathered again in "
        f"each pass, forward and backward, or with {PREFIX}compression-ratio fetched from host memory (default: one "
        f"more than {PREFIX}prefetch-layers)",
        auto=READS,
    )
    compression_ratio: float | None = option(
        "compression-ratio",
        RATIO,
        "bytes of an expert over those of it that travel; lossy (default: experts travel whole)",
    )
    gradient_compression_ratio: float | None = option(
        "gradient-compression-ratio",
        RATIO,
        "bytes of the gradients of experts that travel over those of them that return to the owners, the largest "
        "entries; the rest is added to the next ones; lossy (default: they return whole)",
    )
    residuals: str = option(
        "residuals",
        one_of(*RESIDUALS),
        "what compressed experts are sent as differences from: last, the copies that receivers hold, which begin as "
        "whole experts; or shared, copies that begin as the experts' mean and follow it (default: %(default)s)",
        LAST,
    )
    shared_expert_interval: int = option(
        "shared-expert-interval",
        FROM_0,
        "with shared: times that a layer's experts travel from one renewal of the shared expert to the next; 0: none, "
        "and nothing is held: the largest weights alone, for comparison (default: %(default)s)",
        10,
    )

    @property
    def hop_chunks(self) -> tuple[int, ...] | None:
        """Returns the one number of chunks of tokens that hop; None: it is chosen with the domains."""
        chunks = getattr(self, "chunks", AUTO)  # an option of monta's, and left open where it is not with these
        if isinstance(chunks, int):
            return (chunks,)
        return (1,) if chunks is None and not self.chooses_domains else None

    @property
    def compression(self) -> dict[str, float]:
        """Returns the ratios of `expert-migration` that were given, by their flags: all of them lossy."""
        ratios = {"compression-ratio": self.compression_ratio,
                  "gradient-compression-ratio": self.gradient_compression_ratio}  # fmt: skip
        return {PREFIX + flag: ratio for flag, ratio in ratios.items() if ratio is not None}

    @property
    def chooses_domains(self) -> bool:
        """Whether `expert-migration` chooses its domains from the profile."""
        return self.profile is not None and self.domain_sizes in (None, AUTO)

    @property
    def experts_may_travel(self) -> bool:
        """Whether `expert-migration` may have domains of more than one rank."""
        return self.chooses_domains or max(self.domain_sizes or (1,)) > 1

    @property
    def resident_limit(self) -> int | None:
        """Returns the number of layers whose gathered experts stay in memory; None: all."""
        if self.resident_layers is None:
            return self.prefetch_layers + 1
        return None if self.resident_layers == ALL else self.resident_layers

    def check(self) -> None:
        """Refuses, with ConfigurationError, residents that no layer fits in, and auto without a profile."""
        self.auto_needs_profile("domain_sizes")
        if self.resident_layers not in (None, ALL) and self.resident_layers <= self.prefetch_layers:
            raise ConfigurationError(
                f"{self._residents} has no room for {PREFIX}prefetch-layers {self.prefetch_layers} and the layer that "
                f"runs: give {self.prefetch_layers + 1} or more"
            )

    def check_travel(self) -> None:
        """Refuses, with ConfigurationError, what is about experts that travel where none does, and chunks that are to
        be chosen where domains are not. For a dispatcher that is named: `auto` tries others.
        """
        if self.hop_chunks is None and not self.chooses_domains:
            raise ConfigurationError(
                f"{PREFIX}chunks {AUTO} is chosen with the domains, and {self.as_given('domain_sizes')} names them: "
                f"give a number, or leave {PREFIX}domain-sizes at {AUTO}"
            )
        if self.experts_may_travel:
            self._check_compressed()
            return
        for name in ("prefetch_layers", "residuals", "shared_expert_interval"):
            if self.is_given(name):
                raise ConfigurationError(
                    f"{self.as_given(name)} is about experts that travel, and none does: give {PREFIX}domain-sizes "
                    "above 1, or drop it"
                )
        for flag, ratio in self.compression.items():
            raise ConfigurationError(
                f"{flag} {ratio:g} has nothing to compress where no expert travels: give {PREFIX}domain-sizes above 1"
            )
        if self.resident_layers is not None:
            raise ConfigurationError(
                f"{self._residents} bounds what is held of experts that travel, and none does: give "
                f"{PREFIX}domain-sizes above 1"
            )

    def _check_compressed(self) -> None:
        """Refuses what says how experts are compressed where they are not, or otherwise."""
        if self.is_given("residuals") and self.compression_ratio is None:
            raise ConfigurationError(
                f"{PREFIX}residuals {self.residuals} says how compressed experts travel, and they travel whole: give "
                f"{PREFIX}compression-ratio, or drop it"
            )
        if self.is_given("shared_expert_interval") and self.residuals != SHARED:
            raise ConfigurationError(
                f"{PREFIX}shared-expert-interval {self.shared_expert_interval} is about {PREFIX}residuals {SHARED}: "
                "give that, or drop it"
            )

    @property
    def _residents(self) -> str:
        return f"{PREFIX}resident-layers {self.resident_layers}"


def _build(groups: Any, options: MigrationOptions, config: Any) -> Any:
    from megatron_moe_opt.integration.layer.expert_migration_layer import make_dispatcher

    return make_dispatcher(groups, options, config)


def _attach(layer: Any, options: MigrationOptions) -> None:
    from megatron_moe_opt.integration.layer.expert_migration_layer import migrate_experts

    migrate_experts(layer, options)


def _check(config: Any, options: MigrationOptions, arguments: Any) -> None:
    """Refuses what experts that travel, or tokens that take several hops, do not go with."""
    name = f"{FLAG} {NAME}"
    options.check_travel()
    check_first_pass(arguments, options.profile if options.chooses_domains else None, f"{PREFIX}domain-sizes")
    check_padding(config, name)
    if (config.expert_tensor_parallel_size or 1) > 1 and options.experts_may_travel:
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {config.expert_tensor_parallel_size} cuts experts, which do not travel in "
            f"parts under {name}: set it to 1, or take {PREFIX}domain-sizes 1 at every level"
        )
    if config.moe_router_padding_for_quantization:
        raise ConfigurationError(
            f"--moe-router-padding-for-quantization would have {name} send what nobody routed: drop it, or use monta"
        )
    if options.experts_may_travel:
        check_travelling(config, options, AUTO if options.chooses_domains else shown(options.domain_sizes))


def check_padding(config: Any, name: str) -> None:
    """Refuses padded rows that count, where tokens hop: those of probability 0 do not travel. `name`: of what has them
    hop.
    """
    if config.moe_pad_expert_input_to_capacity and config.moe_apply_probs_on_input and config.add_bias_linear:
        raise ConfigurationError(
            "--moe-pad-expert-input-to-capacity with --moe-apply-probs-on-input has biases of experts count in rows "
            f"that are filled up, which {name} does not send: give --disable-bias-linear, or use monta"
        )


def check_travelling(config: Any, options: MigrationOptions, sizes: str) -> None:
    """Refuses what experts that travel in domains of these sizes do not go with."""
    if (ratio := options.gradient_compression_ratio) is not None:
        kept = f"{PREFIX}gradient-compression-ratio {ratio:g} keeps parts of gradients from step to step, and"
        if config.fp16:
            raise ConfigurationError(f"{kept} --fp16 changes the loss scale between them: use --bf16, or drop it")
        if config.calculate_per_token_loss:
            raise ConfigurationError(
                f"{kept} --calculate-per-token-loss divides each step's by its own number of tokens: drop one of them"
            )
    travels = f"{PREFIX}domain-sizes {sizes} has experts travel, and"
    flag = quantization(config) or given_flag(
        config, "--delay-wgrad-compute", "--use-transformer-engine-op-fuser", "--moe-use-grouped-tensor",
        "--moe-single-grouped-bias",
    )  # fmt: skip
    if flag is not None:
        raise ConfigurationError(
            f"{travels} {flag} keeps state of weights in the module that they leave: drop it, or take domain size 1"
        )
    if getattr(config, "hybrid_context_parallel", False):
        raise ConfigurationError(
            f"{travels} their gradients return when a step's micro-batches are through, of which "
            "--hybrid-context-parallel has another number of passes: drop it, or take domain size 1"
        )
    if getattr(config, "fine_grained_activation_offloading", False) and "expert_fc1" in (config.offload_modules or ()):
        raise ConfigurationError(
            f"{travels} --offload-modules expert_fc1 would copy those of other ranks to the host with the rows: drop "
            "that module, or take domain size 1"
        )


def domains_of(options: Any, workers: tuple[int, ...]) -> ExpertDomains:
    """Returns the domains of the sizes that were named: single ranks, where none were.

    Raises:
        ConfigurationError: the network levels cannot be cut so.
    """
    sizes = options.domain_sizes or (1,) * len(workers)
    if len(sizes) != len(workers) or any(number % size for number, size in zip(workers, sizes, strict=True)):
        raise ConfigurationError(
            f"{PREFIX}domain-sizes {shown(sizes)} does not fit levels of {shown(workers)} workers: give a divisor of "
            f"each level's workers, the slowest level first, or other levels with {PREFIX}levels"
        )
    return ExpertDomains(workers, sizes)


def _unread_profile(options: MigrationOptions) -> str | None:
    return None if options.chooses_domains else f"leave {PREFIX}domain-sizes at {AUTO}"


_SETTING = re.compile(r"([1-9][0-9]*(?:x[1-9][0-9]*)*)(?::c([1-9][0-9]*))?(?::r([1-9][0-9]*(?:\.[0-9]+)?))?")


def _parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    """Reads `expert-migration:SIZExSIZE`, domain sizes, the slowest level first; `:cCHUNKS` of tokens; and `:rRATIO` of
    compressed experts.
    """
    if setting == AUTO:
        return chosen_by_profile(variant, profile)
    found = _SETTING.fullmatch(setting)
    if found is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write the domain size of each level, the slowest first, such as {NAME}:2x1, and "
            f"chunks or a compression ratio, if any, such as {NAME}:1x1:c2 or {NAME}:2x1:r50"
        )
    sizes, chunks, ratio = found.groups()
    return {
        "domain_sizes": tuple(map(int, sizes.split("x"))),
        "chunks": chunks and int(chunks),
        "compression_ratio": ratio and float(ratio),
    }


def _write(options: Any, levels: int) -> str:
    chunks = options.chunks if isinstance(options.chunks, int) else 1
    return setting_of(options.domain_sizes or (1,) * levels, chunks, options.compression_ratio)


def setting_of(sizes: tuple[int, ...], chunks: int, ratio: float | None = None) -> str:
    """Returns domain sizes, chunks and a ratio in one word, as `_parse` reads it."""
    return domain_word(sizes) + f":c{chunks}" * (chunks > 1) + ("" if ratio is None else f":r{ratio:g}")


def without_ratio(variant: str) -> str:
    """Returns a variant without the compression ratio that it names, if it names one."""
    return re.sub(r":r[0-9.]+(?=:|$)", "", variant)


def domain_word(sizes: tuple[int, ...]) -> str:
    """Returns domain sizes in one word, as variants have them."""
    return "x".join(map(str, sizes))


def domain_kind(setting: str) -> str:
    """Returns, of domain sizes in one word, at which levels experts travel; with the ratio, if one is named."""
    sizes, *others = setting.split(":")
    travels = "x".join("1" if size == "1" else "S" for size in sizes.split("x"))
    return ":".join([travels, *(one for one in others if not one.startswith("c"))])


def _numbered(setting: str) -> str:
    sizes, *others = setting.split(":")
    chunks = [] if others and others[0].startswith("c") else ["c1"]
    return ":".join([sizes, *chunks, *others])


def _candidates(layer: LayerOnCluster, options: MigrationOptions) -> Iterator[Prediction | Refusal]:
    """Yields a prediction for every realisable choice of domain sizes, in one chunk of tokens and, while these gain,
    in more.
    """
    one = layer.workload
    if one.etp > 1:
        yield Refusal(NAME, f"expert tensor parallelism {one.etp} cuts experts, which do not travel in parts")
        return
    if not one.workers:
        yield Refusal(NAME, "the network levels of the expert-parallel group are not known")
        return
    for choice, terms, timelines in _domain_choices(layer, options.hop_chunks):
        domains = choice.domains
        ops = (op for timeline in timelines for op in timeline.schedule.ops)
        inter_bytes, intra_bytes = LinkBytes(layer.cluster, domains).sent_by_all(ops)
        yield Prediction(
            f"{NAME}:{setting_of(domains.sizes, choice.chunks)}",
            choice.seconds,
            exposed=sum(timeline.exposed for timeline in timelines),
            inter_bytes=inter_bytes,
            intra_bytes=intra_bytes,
            activation_bytes=layer.activation_bytes + (of_others := layer.held_bytes_of_others(domains)),
            held_more=HeldMore(of_others=of_others),
            parts=choice.chunks,
            terms={term: value for term, value in terms.items() if value},
            timelines=tuple(timelines),
        )


def fastest_domains(workload: LayerWorkload, cluster: Cluster, counts: tuple[int, ...] | None = None) -> DomainChoice:
    """Returns the expert domains with which a layer takes least, by the same predictions as the planner's, in the
    fewest chunks that take as long.

    Args:
        counts: the numbers of chunks to choose from; None: all.

    Raises:
        ConfigurationError: the cluster lacks an expert or a group that some domains need.
    """
    choices = [choice for choice, *_ in _domain_choices(LayerOnCluster(workload, cluster), counts)]
    domains = expert_migration.least(choices).domains
    return fewest_of_equal([(one.seconds, one.chunks, one) for one in choices if one.domains == domains])


def _domain_choices(
    layer: LayerOnCluster, counts: tuple[int, ...] | None
) -> Iterator[tuple[DomainChoice, dict[str, float], list[Timeline]]]:
    """Yields all realisable domains, what a layer takes with them, what that is made of, and what it is the sum of: the
    schedules that run, as they are played. Where no numbers of chunks are given, tokens that hop at several levels are
    cut while that gains.
    """
    one = layer.workload
    curves, migration = layer.domain_curves, one.migration(layer.skew)
    edge = Timeline.in_turn("one after another", ((op, layer.costs(op)) for op in layer.edge))
    local = layer.local_timeline(OURS, migration.tokens)
    for domains in expert_migration.all_domains(migration, one.workers):
        rows, holds = one.rows_of(layer.skew.computed(domains)), prod(domains.sizes)
        exchange = expert_migration.exchange_seconds(migration, domains, curves)
        of_passes = [
            max(seconds - layer.skew.hidden(domains, exchange, seconds), 0.0)
            for seconds in layer.seconds_of_experts(rows, holds)
        ]
        copied = layer.seconds_to_copy(layer.bytes_of_copies(holds))
        copies = Timeline.in_turn("experts copied", [(Op(Kind.COPY, Lane.COMPUTE), copied)])
        experts, before = sum(of_passes), inf
        cost = layer.converting(HopSeconds(layer, layer.costs, domains))
        several = CHUNK_COUNTS if len(domains.hops) > 1 else (1,)
        for chunks in (counts or several) if domains.hops else (1,):
            ways = hop_passes(one, hop_partitions(one, layer.skew, rows, [1] * chunks, domains))
            passes = expert_migration.timelines(migration, domains, ways, of_passes, cost, layer.cluster.simulate)
            terms = {
                DISPATCH: sum(timeline.seconds for timeline in passes) - experts + edge.seconds,
                EXPERTS: experts,
                "rows on the rank": local.seconds,
                "experts copied": copies.seconds,
            }
            timelines = [timeline for timeline in (*passes, edge, local, copies) if timeline.seconds]
            seconds = sum(timeline.seconds for timeline in timelines)
            yield DomainChoice(domains, seconds, chunks), terms, timelines
            if seconds >= before:
                break
            before = seconds


def _why_fixed(options: MigrationOptions, run: RunTraits) -> str | None:
    return run.no_hops or why_experts_fixed(options, run)


def why_experts_fixed(options: MigrationOptions, run: RunTraits) -> str | None:
    """Returns why a layer's experts cannot be called in another order, or travel, from the next step on; None: they
    can.
    """
    if run.experts_draw:
        return "experts draw random numbers (dropout), and get rows in other calls or another order than stock's"
    sizes = options.domain_sizes
    if sizes is not None and any(
        len(sizes) != len(levels) or any(number % size for number, size in zip(levels, sizes, strict=True))
        for levels in run.workers
    ):
        return f"the network levels of this run have other numbers of workers: name them with {PREFIX}levels"
    if not options.experts_may_travel:
        return None
    if run.called_by is not None:
        return f"experts travel, and would be called without {run.called_by}, which is not Megatron's"
    if run.some_frozen:
        return "experts travel, and those of some layer are frozen on some of the ranks that share them, not on others"
    if run.dtypes:
        return f"experts travel, and parameters of {', '.join(run.dtypes)} do not in one message"
    if run.stays_behind is not None:
        return f"experts travel, and {run.stays_behind} does not"
    return None


EXPERT_MIGRATION = System(
    name=NAME,
    options=MigrationOptions,
    reads=("profile", "chunks", "expert_order", "wire"),
    unread_profile=_unread_profile,
    build=_build,
    attach=_attach,
    check=_check,
    grammar=Grammar(_parse, _write, domain_kind, _numbered),
    candidates=_candidates,
    domains=domains_of,
    why_fixed=_why_fixed,
    calls_experts=True,
)
