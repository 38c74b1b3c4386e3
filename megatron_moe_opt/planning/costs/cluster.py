"""`cluster.json`: what `moe-opt profile` measured of a cluster, as a file that is checked when it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.planning.costs.bus_bandwidth import bus_of
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs, Slowdown
from megatron_moe_opt.planning.costs.differences import differences
from megatron_moe_opt.planning.json_places import JsonPlace
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.topology.layouts import Layout

FORMAT = "megatron-moe-opt cluster"
VERSION = 1

MEGATRON_FLAGS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--tensor-model-parallel-size")
OUR_FLAGS = ("--ep", "--expert-tp", "--tp")

OLDER = (
    "measured by an older version, whose experts are of calls that follow each other, and not as a layer calls them: "
    "partitions look cheaper than they are; measure again"
)
"""The warning of a file with a field that says what experts take longer in a layer, which their curve now has."""
_OF_OLDER = ("partition_overhead", "expert_overhead")

Points = tuple[tuple[int, float], ...]
"""The points of a curve: (bytes or rows, seconds), by ascending size."""
Facts = Mapping[str, str | int]
"""What a file was measured or made for, with or by, by name."""

RANKS, ROW, EXPERT, TYPE = "ranks", "hidden size of a row", "hidden size of an expert", "type of the rows"
VERSIONS = ("megatron-moe-opt", "megatron-core", "torch")
"""The software whose versions measured times hold for."""
STOCK, OURS = "stock", "ours"
"""The names of those whose permutation and sorting `Cluster.local_work` is: Megatron, or this package."""


@dataclass(frozen=True)
class World:
    """Where the ranks were, and the sizes of their groups."""

    nodes: tuple[int, ...]
    """The node of each rank, [world size]."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1

    @property
    def layout(self) -> Layout:
        """Returns the layout: which rank is in which group."""
        return Layout(len(self.nodes), self.tp, self.cp, self.ep, self.expert_tp)


@dataclass(frozen=True)
class ExpertGemm:
    """Time of one expert, over rows: two matrix products and the activation between them."""

    hidden: int
    ffn_hidden: int
    """Middle size of this rank's shard: the expert's divided by expert-TP."""
    dtype: str
    points: Points
    """The points of the forward pass, (rows, seconds)."""
    training: Points | None = None
    """The points of forward and backward pass together, (rows, seconds); None: not measured."""

    def flops(self, rows: int) -> int:
        """Returns the operations of a forward pass: two products of 2 * rows * hidden * ffn_hidden each. A
        backward pass has twice as many.
        """
        return 4 * rows * self.hidden * self.ffn_hidden


@dataclass(frozen=True)
class Cluster:
    """What ops cost on a cluster, measured on the slowest rank, each op alone in its lane but for `slowdown`."""

    world: World
    curves: Mapping[tuple[Kind, str | None], Points]
    """The curves by kind and role of the group (None: no collective); bytes count as Op.size does."""
    slowdown: Slowdown = field(default_factory=dict)
    """The rate, in (0, 1], of an op in a lane while others are busy, all of them, by (lane, beside, ...)."""
    overhead: float = 0.0
    """Seconds that an op of a pipeline takes besides: handing over between lanes, waiting for ranks that come later."""
    saa: Points | None = None
    """The curve of Parm's combine_and_gather, all phases together, without its reorder. Bytes are those
    of the rows that come back to this rank for itself, times expert-TP: what a fused all-to-all of them
    carries. None: not measured.
    """
    expert_gemm: ExpertGemm | None = None
    compute_sharing: float = 1.0
    """How much faster a rank computes while the others of its node do not: 1 where each has its own device."""
    local_work: Mapping[str, Points] = field(default_factory=dict)
    """What a layer does with its rows besides exchanging and computing them, forward and backward: by STOCK or OURS,
    seconds over bytes of the rows that a rank exchanges in one pass of combine. Empty: not measured."""
    gpu_settings: Facts | None = None
    """The settings of the ranks' environment, see gpu_settings.py; None where there was no GPU, or it is not known."""
    one_queue: bool = False
    """Whether all streams of a GPU share one hardware queue and `slowdown` does not know it: what was measured with one
    does."""
    measured_for: Facts = field(default_factory=dict)
    """What the training run was like that measured it for itself, as far as times depend on that. Empty: no run did."""
    host: Facts = field(default_factory=dict)
    software: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """What is to be doubted of the measurements, a sentence each: curves of one point, and noisy ones."""

    @classmethod
    def load(cls, file: str | Path) -> Cluster:
        """Reads a profile that `save` wrote.

        Raises:
            ConfigurationError: the file, the line, the value there and what is wrong with it.
        """
        root = JsonPlace.root(Path(file))
        root.check_format(FORMAT, VERSION, "moe-opt profile", "measure the cluster")
        # Of older files, and not read: stock_curves, from when stock's all-to-all was Gloo's own on the host.
        top = root.fields(
            "format", "version", "host", "software", "world", "curves", "slowdown", "overhead", "expert_gemm",
            optional=[*_OF_OLDER, "saa", "compute_sharing", "local_work", "stock_curves", "gpu_settings",
                      "measured_for", "warnings"],
        )  # fmt: skip
        warnings = [one.word() for one in top["warnings"].given(JsonPlace.items, ())]
        if any(top[name].value is not None for name in _OF_OLDER):
            warnings.append(OLDER)
        return cls(
            world=_world(top["world"]),
            curves=_curves(top["curves"]),
            slowdown=_slowdown(top["slowdown"]),
            overhead=top["overhead"].not_negative(),
            saa=top["saa"].given(_points),
            expert_gemm=top["expert_gemm"].given(_expert_gemm),
            compute_sharing=top["compute_sharing"].given(JsonPlace.positive, 1.0),
            local_work=top["local_work"].given(_local_work, {}),
            gpu_settings=top["gpu_settings"].given(facts),
            measured_for=top["measured_for"].given(facts, {}),
            host=facts(top["host"]),
            software=facts(top["software"]),
            warnings=tuple(warnings),
        )

    def save(self, file: str | Path) -> None:
        """Writes the file in one piece: readers see the old content or the new one. Raises ConfigurationError."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "gpu_settings": None if self.gpu_settings is None else dict(self.gpu_settings),
            "measured_for": dict(self.measured_for),
            "host": dict(self.host),
            "software": dict(self.software),
            "warnings": list(self.warnings),
            "world": asdict(self.world),
            "curves": self._as_list(self.curves),
            "slowdown": [
                {"lane": lane.value, "beside": [other.value for other in beside], "rate": rate}
                for (lane, *beside), rate in self.slowdown.items()
            ],
            "overhead": self.overhead,
            "saa": self.saa,
            "expert_gemm": asdict(self.expert_gemm) if self.expert_gemm else None,
            "compute_sharing": self.compute_sharing,
            "local_work": dict(self.local_work),
        }
        write_text_whole(file, _one_line_a_point(json.dumps(content, indent=2)) + "\n")

    def _as_list(self, curves: Mapping[tuple[Kind, str | None], Points]) -> list[dict[str, object]]:
        """Returns the entries that `_curves` reads, each with the best bus bandwidth and the link's peak in bytes a
        second for whoever looks at the file.
        """
        entries: list[dict[str, object]] = []
        for (kind, group), points in curves.items():
            entries.append({"kind": kind.value, "group": group, "points": points})
            bus = bus_of(self, kind, group)
            if bus is not None:
                best = max(bus.bandwidth(*point) for point in points)
                entries[-1]["bus"] = {"ranks": bus.ranks, "link": bus.link, "best": best, "link_peak": bus.peak}
        return entries

    def measured_with(self) -> Facts:
        """Returns what the times hold for, as far as it is known: the ranks, the rows, the experts and the versions."""
        known: dict[str, str | int] = {RANKS: len(self.world.nodes)}
        if self.expert_gemm is not None:
            gemm = self.expert_gemm
            of_expert = gemm.ffn_hidden * self.world.expert_tp
            known |= {ROW: gemm.hidden, EXPERT: of_expert, TYPE: gemm.dtype}
        return known | {name: version for name, version in self.software.items() if name in VERSIONS}

    def made_otherwise(self, here: Facts) -> str | None:
        """Returns in words what of `here` it was measured with otherwise, as far as it says; None: nothing."""
        there = {name: fact for name, fact in self.measured_with().items() if name in here}
        return differences({name: here[name] for name in there}, there)

    @cached_property
    def costs(self) -> Costs:
        """Returns what ops cost, for the simulator and the choice of level and chunks."""
        return Costs({key: CostCurve(points) for key, points in self.curves.items()}, self.overhead)

    def simulate(self, schedule: Schedule, cost: Callable[[Op], float]) -> Timeline:
        """Returns when ops run on this cluster, each of which takes `cost` seconds alone."""
        return simulate(schedule, cost, self.slowdown, self.one_queue)

    def check_expert(self) -> None:
        """Raises ConfigurationError where no expert was measured."""
        if self.expert_gemm is None:
            raise ConfigurationError("the profile has no expert: measure this cluster again with moe-opt profile")

    def check_groups(
        self, file: str | Path, flags: tuple[str, str, str], *, ep: int, expert_tp: int, tp: int | None = None
    ) -> None:
        """Refuses a run whose groups are not of the sizes that were measured.

        Args:
            file: where the profile is from.
            flags: what the run calls the sizes of EP, expert-TP and TP: MEGATRON_FLAGS or OUR_FLAGS.
            tp: None where nothing that is wanted of the profile runs in TP groups.

        Raises:
            ConfigurationError: the flag, its value and the measured one.
        """
        sizes = [(self.world.ep, ep), (self.world.expert_tp, expert_tp), (self.world.tp, tp)]
        for flag, (measured, asked) in zip(flags, sizes, strict=True):
            if asked not in (measured, None):
                raise ConfigurationError(
                    f"{flag} {asked} is not what {file} was measured with ({measured}): measure this layout with "
                    f"moe-opt profile {f'--tp {tp} ' if tp is not None else ''}--ep {ep} --expert-tp {expert_tp}"
                )


def _world(place: JsonPlace) -> World:
    fields = place.fields("nodes", "tp", "cp", "ep", "expert_tp")
    nodes = tuple(node.count() for node in fields["nodes"].items())
    sizes = {name: fields[name].count(least=1) for name in ("tp", "cp", "ep", "expert_tp")}
    for one, other in (("tp", "cp"), ("ep", "expert_tp")):
        if not nodes or len(nodes) % (sizes[one] * sizes[other]):
            place.refuse(f"{one} {sizes[one]} x {other} {sizes[other]} does not divide the {len(nodes)} ranks in nodes")
    return World(nodes, **sizes)


def _curves(place: JsonPlace) -> dict[tuple[Kind, str | None], Points]:
    curves: dict[tuple[Kind, str | None], Points] = {}
    for entry in place.items():
        fields = entry.fields("kind", "group", "points", optional=["bus"])
        kind = Kind(fields["kind"].word(*(kind.value for kind in Kind)))
        group = fields["group"].given(JsonPlace.word)
        if (kind in COLLECTIVES) != (group is not None):
            fields["group"].refuse(f"{kind.value} {'needs a group' if group is None else 'has no group'}")
        if (kind, group) in curves:
            entry.refuse(f"a second curve for {kind.value} in group {group}")
        curves[kind, group] = _points(fields["points"])
    return curves


def _points(place: JsonPlace) -> Points:
    points: list[tuple[int, float]] = []
    for entry in place.items():
        size, seconds = entry.items(length=2)
        points.append((size.count(least=1), seconds.positive()))
        if len(points) > 1 and points[-1][0] <= points[-2][0]:
            size.refuse(f"{points[-1][0]} does not come after {points[-2][0]}: sizes must ascend")
    if not points:
        place.refuse("no points: a curve needs at least one")
    return tuple(points)


def _slowdown(place: JsonPlace) -> dict[tuple[Lane, ...], float]:
    slowdown: dict[tuple[Lane, ...], float] = {}
    known: set[tuple[Lane, frozenset[Lane]]] = set()
    lanes = [lane.value for lane in Lane]
    for entry in place.items():
        fields = entry.fields("lane", "beside", "rate")
        lane = Lane(fields["lane"].word(*lanes))
        listed = fields["beside"]
        # One lane was written as a word before several could be listed.
        others = [listed] if isinstance(listed.value, str) else listed.items()
        beside = [Lane(other.word(*lanes)) for other in others]
        if not beside or len({lane, *beside}) <= len(beside) or (lane, frozenset(beside)) in known:
            names = ", ".join(other.value for other in beside)
            entry.refuse(f"lane {lane.value} beside {names or 'none'} is not a new set of different lanes")
        known.add((lane, frozenset(beside)))
        slowdown[(lane, *beside)] = fields["rate"].positive(most=1)
    return slowdown


def _expert_gemm(place: JsonPlace) -> ExpertGemm:
    fields = place.fields("hidden", "ffn_hidden", "dtype", "points", optional=["training"])
    return ExpertGemm(
        fields["hidden"].count(least=1),
        fields["ffn_hidden"].count(least=1),
        fields["dtype"].word(),
        _points(fields["points"]),
        fields["training"].given(_points),
    )


def _local_work(place: JsonPlace) -> dict[str, Points]:
    return {whose: _points(points) for whose, points in place.fields(optional=[STOCK, OURS]).items() if points.value}


def facts(place: JsonPlace) -> dict[str, str | int]:
    """Reads an object of names and what they are."""
    return {name: fact.count() if isinstance(fact.value, int) else fact.word() for name, fact in place.object().items()}


def _one_line_a_point(text: str) -> str:
    """Returns a JSON text with each list of numbers on one line."""
    return re.sub(r"\[\n([^\[\]{}\"]*)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
