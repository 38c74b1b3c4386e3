"""What `moe-opt plan` was asked for: a model on a cluster, in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from megatron_moe_opt.cli.plan.named_sizes import Named
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import MOST
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import OUR_FLAGS, Cluster
from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.known_clusters import GIB, KNOWN_CLUSTERS, KnownCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload, resident_part
from megatron_moe_opt.planning.training.arrangements import Arrangement
from megatron_moe_opt.planning.training.known_models import KNOWN_MODELS
from megatron_moe_opt.planning.training.memory import RECOMPUTE
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import OVERLAP, takes
from megatron_moe_opt.planning.training.throughput import GpuSpeed
from megatron_moe_opt.row_format import ELEMENT_BYTES, LANE_BYTES
from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.topology.domains import levels_if_even, levels_of_layout
from megatron_moe_opt.topology.layouts import Layout, layout_of_options

MODEL_SIZES = {field.name: True if field.type == "bool" else MOST for field in fields(ModelShape)} | {
    "layers": 10_000,  # every divisor of these two is tried by a search
    "experts": 10_000,
}
"""What --model may say besides a name, and the largest of each."""
MAY_BE_NONE = ("shared_ffn", "dense_layers", "dense_ffn")
CLUSTER_NUMBERS = {
    "tflops": 1e9, "efficiency": 1.0, "memory": 1e9, "op_us": 1e9, "inter": 1e9, "intra": 1e9, "copy": 1e9,
}  # fmt: skip
"""What --cluster may say besides a name, and the largest of each: tflops, efficiency and GiB of memory of a GPU, op_us
of every op, and the GB/s (inter, intra, copy) that replace those of a known cluster's links and memory and are reached
at every size.
"""
LEAST = 1e-9
"""The least of these numbers, op_us aside, which may be 0."""
BANDWIDTHS = ("inter", "intra", "copy")
NEEDED = ("layers", "hidden", "ffn", "experts", "topk", "heads", "vocabulary")


@dataclass(frozen=True)
class PlanSettings:
    """The options that `moe-opt plan` was called with."""

    cluster: str
    """The name of a known cluster, or the file of a measured one."""
    cluster_numbers: Mapping[str, float]
    """The values of the options in CLUSTER_NUMBERS that were given."""
    model: Named
    """The model's name, and sizes that are fields of ModelShape."""
    sizes: Mapping[str, int | None]
    """The sizes of the world and of the parallel groups, by flag. None: the size that the cluster's file has, or 1."""
    sequence_parallel: bool
    sequences: tuple[int, ...]
    micro_batch: int
    micro_batches: int
    recompute: str
    """What is recomputed: a value of memory.RECOMPUTE."""
    overlaps: bool
    """Whether micro-batches overlap (--overlap-moe-expert-parallel-comm)."""
    dtype: str
    capacity_factor: float | None
    imbalance: float
    placement_saving: float | None
    activation_budget: int | None

    def __post_init__(self) -> None:
        """Raises ConfigurationError for numbers of a cluster that are none, or a dtype whose speed is not known."""
        for name, value in self.cluster_numbers.items():
            if name != "op_us" and value < LEAST:
                raise ConfigurationError(f"--cluster: {name} {value:g} is too small: give {LEAST:g} or more")
        if self.capacity_factor is not None and self.imbalance != 1:
            raise ConfigurationError(
                f"--imbalance {self.imbalance:g} with --capacity-factor {self.capacity_factor:g}: every expert has its "
                "capacity of rows, and no rank is busier than another: leave one out"
            )
        if self.dtype == "fp32" and self.known is not None and "tflops" not in self.cluster_numbers:
            raise ConfigurationError(
                f"--dtype fp32: the peak of {self.cluster} is known in 16 bits alone: give that of fp32, as in "
                f"--cluster {self.cluster},tflops=60"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of tokens and weights."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def known(self) -> KnownCluster | None:
        """Returns the cluster as it is known; None: a profile was measured on it."""
        return KNOWN_CLUSTERS.get(self.cluster)

    @property
    def memory(self) -> float | None:
        """Returns bytes of memory of a GPU; None: a profile does not hold it, and nobody gave it."""
        if "memory" in self.cluster_numbers:
            return self.cluster_numbers["memory"] * GIB
        return None if self.known is None else self.known.memory

    def arranged(self, one: Arrangement) -> PlanSettings:
        """Returns these settings with the layout and the micro-batches of an arrangement."""
        layout = one.layout
        sizes = {
            "--world": layout.world, "--tp": layout.tp, "--cp": layout.cp, "--pp": layout.pp, "--ep": layout.ep,
            "--expert-tp": layout.expert_tp, "--vpp": layout.vpp,
        }  # fmt: skip
        return replace(
            self, sizes=sizes, micro_batch=one.micro_batch, micro_batches=one.micro_batches, recompute=one.recompute,
            overlaps=one.overlaps,
        )  # fmt: skip

    def needs_world(self) -> int:
        """Returns the GPUs of a known cluster. Raises ConfigurationError where they were not given."""
        world = self.sizes["--world"]
        if world is None:
            raise ConfigurationError(f"--cluster {self.cluster} comes in any size: give its GPUs with --world")
        return world

    def model_shape(self) -> ModelShape:
        """Returns the named model with the sizes that were given in the place of its own.

        Raises:
            ConfigurationError: an unknown name, or sizes that are missing, or 0 of what there must be.
        """
        name, given = self.model.name, self.model.given
        none = [size for size, value in given.items() if not value and size not in MAY_BE_NONE and value is not False]
        if none:
            raise ConfigurationError(f"--model: {none[0]} is 0: give 1 or more")
        if name is not None:
            if name not in KNOWN_MODELS:
                raise ConfigurationError(
                    f"--model {name} is not known: choose one of {', '.join(KNOWN_MODELS)}, or give sizes, as in "
                    "layers=24,hidden=2048"
                )
            return replace(KNOWN_MODELS[name], **given)
        missing = [size for size in NEEDED if size not in given]
        if missing:
            raise ConfigurationError(
                f"--model lacks {', '.join(missing)}: give them, or begin with one of {', '.join(KNOWN_MODELS)}"
            )
        return ModelShape(**given)


@dataclass(frozen=True)
class Site:
    """The cluster that the model trains on, and how it is laid out there."""

    cluster: Cluster
    layout: Layout
    workers: tuple[int, ...]
    """The workers of each network level of the EP groups, the slowest level first."""
    levels_named: bool
    """Whether a run must be told these levels, because they do not follow from which ranks share a node."""
    device: GpuSpeed | None
    """The GPU's speed; None: it is not known, and nothing is said about steps."""
    memory: float | None
    """Bytes of memory of a GPU; None: not known."""


def site_of(settings: PlanSettings, model: ModelShape) -> Site:
    """Returns the cluster, known or measured, with the layout on it.

    Raises:
        ConfigurationError: neither a name nor a file, or sizes that do not fit.
    """
    site = _measured(settings) if settings.known is None else _known(settings, settings.known, model)
    if "op_us" in settings.cluster_numbers:
        site = replace(site, cluster=replace(site.cluster, overhead=settings.cluster_numbers["op_us"] * 1e-6))
    if settings.overlaps:  # Megatron asks for one hardware queue no more
        site = replace(site, cluster=replace(site.cluster, one_queue=False))
    _check(settings, model, site)
    return site


def workload_of(settings: PlanSettings, model: ModelShape, site: Site, sequence: int) -> LayerWorkload:
    """Returns what one MoE layer has to do for one micro-batch."""
    layout = site.layout
    tokens = settings.micro_batch * sequence // layout.cp
    return LayerWorkload(
        tokens=tokens // layout.tp if settings.sequence_parallel else tokens,
        hidden=model.hidden,
        ffn=model.ffn // layout.expert_tp,
        gated=model.gated,
        experts=model.experts,
        topk=model.topk,
        element_bytes=settings.element_bytes,
        lane_bytes=LANE_BYTES,
        ep=layout.ep,
        etp=layout.expert_tp,
        tp=1 if settings.sequence_parallel else layout.tp,
        sample_ranks=layout.tp * layout.cp,
        capacity_factor=settings.capacity_factor,
        imbalance=settings.imbalance if layout.ep > 1 else 1.0,  # with EP 1 each computes its own tokens' rows
        workers=site.workers,
        placement_saving=settings.placement_saving,
        fused=True,
        resident_part=resident_part(model.most_moe_layers(layout), Options().resident_limit),
    )


def _known(settings: PlanSettings, known: KnownCluster, model: ModelShape) -> Site:
    settings.needs_world()
    layout = _layout({flag: size or 1 for flag, size in settings.sizes.items()})
    given = settings.cluster_numbers
    peak = given["tflops"] * 1e12 if "tflops" in given else known.device.peak_flops
    device = GpuSpeed(peak, given.get("efficiency", known.device.efficiency))
    known = _with_bandwidths(replace(known, device=device), settings)
    ffn = max(model.ffn // layout.expert_tp, 1)
    cluster = describe(known, layout, model.hidden, ffn, settings.dtype, replicated=not settings.sequence_parallel)
    workers = levels_of_ep(known, layout)
    named = workers != levels_of_layout(layout, cluster.world.nodes)
    return Site(cluster, layout, workers, named, device, settings.memory)


def _with_bandwidths(known: KnownCluster, settings: PlanSettings) -> KnownCluster:
    """Returns the cluster with links and memory of the given bandwidths, which are reached at every size."""
    given = {name: settings.cluster_numbers[name] * 1e9 for name in BANDWIDTHS if name in settings.cluster_numbers}
    ideal = {"efficiencies": ((1, 1.0),), "first": 0.0, "further": 0.0}  # what shares a link shares it all the same
    if "inter" in given:
        known = replace(known, between=replace(known.between, bandwidth=given["inter"], **ideal))
    if "intra" in given:
        known = replace(known, inside=replace(known.inside, bandwidth=given["intra"], **ideal))
    return replace(known, copy_bandwidth=given.get("copy", known.copy_bandwidth))


def _measured(settings: PlanSettings) -> Site:
    file, given = Path(settings.cluster), settings.cluster_numbers
    if not file.exists():
        raise ConfigurationError(
            f"--cluster {settings.cluster} is neither a file of moe-opt profile nor a known cluster: choose one of "
            f"{', '.join(KNOWN_CLUSTERS)}"
        )
    for name in BANDWIDTHS:
        if name in given:
            raise ConfigurationError(
                f"--cluster {file},{name}={given[name]:g}: {name} has no meaning beside a file, which holds costs: "
                "drop it"
            )
    cluster = Cluster.load(file)
    world = cluster.world
    measured = {
        "--world": len(world.nodes), "--tp": world.tp, "--cp": world.cp, "--ep": world.ep,
        "--expert-tp": world.expert_tp,
    }  # fmt: skip
    layout = _layout({flag: size or measured.get(flag, 1) for flag, size in settings.sizes.items()})
    tp = None if settings.sequence_parallel else layout.tp
    cluster.check_groups(file, OUR_FLAGS, ep=layout.ep, expert_tp=layout.expert_tp, tp=tp)
    workers = levels_if_even(world.layout, world.nodes)
    peak, efficiency = given.get("tflops"), given.get("efficiency")
    if (peak is None) is not (efficiency is None):
        there, missing = ("tflops", "efficiency") if efficiency is None else ("efficiency", "tflops")
        raise ConfigurationError(
            f"--cluster {file},{there}={given[there]:g}: {there} says nothing about a step without {missing}: give "
            "both, or neither"
        )
    device = None if peak is None or efficiency is None else GpuSpeed(peak * 1e12, efficiency)
    if layout.tp != world.tp:  # under sequence parallelism no exchange of a MoE layer is over TP, but a step's are
        without_tp = {key: points for key, points in cluster.curves.items() if key[1] != TP}
        cluster = replace(cluster, curves=without_tp)
    return Site(cluster, layout, workers, False, device, settings.memory)


def _layout(sizes: Mapping[str, int]) -> Layout:
    if sizes.get("--vpp", 1) > 1 and sizes["--pp"] == 1:
        raise ConfigurationError(f"--vpp {sizes['--vpp']} is of a pipeline, and there is none: give --pp 2 or more")
    return layout_of_options(sizes, f"--world {sizes['--world']}")


def _check(settings: PlanSettings, model: ModelShape, site: Site) -> None:
    layout = site.layout
    check_model(model, layout)
    if not takes(layout, settings.micro_batches):
        raise ConfigurationError(
            f"--micro-batches {settings.micro_batches} is no multiple of --pp {layout.pp}, as --vpp {layout.vpp} asks "
            "for: choose one"
        )
    if settings.overlaps:
        _check_overlap(settings, site)
    capacity = settings.capacity_factor
    if capacity is not None and capacity * model.topk > model.experts:
        raise ConfigurationError(
            f"--capacity-factor {capacity:g} x top-k {model.topk} has {model.experts} experts padded to more rows than "
            f"there are tokens: choose at most {model.experts / model.topk:g}"
        )
    for sequence in settings.sequences:
        if not layout.cuts(sequence):
            raise ConfigurationError(
                f"--sequence {sequence}: TP {layout.tp} x CP {layout.cp} does not divide it, or twice CP does not, "
                "where that is above 1: choose a multiple of both"
            )


def check_overlap(recompute: str | None, dtype: str) -> None:
    """Refuses, with ConfigurationError, micro-batches that are to overlap where no layout lets them."""
    if recompute == RECOMPUTE[-1]:
        _refuse_overlap(f"--recompute {recompute}", "give none or selective")
    if dtype == "fp32":
        _refuse_overlap("--dtype fp32", "give bf16")


def _refuse_overlap(where: str, way_out: str) -> NoReturn:
    raise ConfigurationError(f"{OVERLAP} does not run, or does nothing, with {where}: {way_out}, or drop it")


def _check_overlap(settings: PlanSettings, site: Site) -> None:
    """Refuses, with ConfigurationError, micro-batches that are to overlap where they cannot, or are not predicted."""
    check_overlap(settings.recompute, settings.dtype)
    layout = site.layout
    for is_so, where, way_out in (
        (layout.ep == 1, "--ep 1, where tokens stay on their rank", "raise --ep"),
        (layout.pp > 1 and layout.vpp == 1, f"--pp {layout.pp} without virtual stages", "give --vpp 2 or more"),
        (
            layout.tp > 1 and not settings.sequence_parallel,
            f"--tp {layout.tp} --no-sequence-parallel",
            "leave out --no-sequence-parallel",
        ),
        (
            site.device is None,
            f"--cluster {settings.cluster}, whose GPUs compute nobody knows how fast",
            "give it tflops and efficiency",
        ),
    ):
        if is_so:
            _refuse_overlap(where, way_out)


def check_model(model: ModelShape, layout: Layout) -> None:
    """Refuses, with ConfigurationError, sizes of a model that do not divide each other or those of the layout."""
    flags = {"tp": "--tp", "ep": "--ep", "expert_tp": "--expert-tp"}
    for name, size, by, divisor in (
        ("hidden", model.hidden, "heads", 1 if model.head_size else model.heads),
        ("heads", model.heads, "kv_heads", model.kv_heads or model.heads),
        *((name, size, flags[by], divisor) for name, size, by, divisor in model.cut_by(layout)),
    ):
        if size % divisor:
            raise ConfigurationError(f"{by} {divisor} does not divide the model's {name} {size}: choose a divisor")
    if not model.fills(layout.chunks):
        stages = f"--pp {layout.pp}" + (f" --vpp {layout.vpp}" if layout.vpp > 1 else "")
        raise ConfigurationError(
            f"{stages}: the model's layers {model.layers} are too few for so many stages of as many each: choose fewer"
        )
    if model.dense_layers >= model.layers:
        raise ConfigurationError(
            f"--model: dense_layers {model.dense_layers} leaves no MoE layer of layers {model.layers}: choose fewer"
        )
    if model.dense_layers and not model.dense_ffn:
        raise ConfigurationError(
            f"--model: dense_layers {model.dense_layers} have a plain MLP, of no size: give dense_ffn, too"
        )
    if model.topk > model.experts:
        raise ConfigurationError(
            f"--model: topk {model.topk} is more than experts {model.experts}: choose at most that"
        )
