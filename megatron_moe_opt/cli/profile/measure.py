"""`moe-opt profile`: all curves of `cluster.json`, measured on the running ranks in the time that is given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch.distributed import ProcessGroup

from megatron_moe_opt.cli.console import progress_console, report_console, say_written
from megatron_moe_opt.cli.option_types import torch_dtype
from megatron_moe_opt.cli.profile import loads
from megatron_moe_opt.cli.profile.curves_table import curves_table
from megatron_moe_opt.cli.profile.domain_moves import domain_groups_of, domain_moves
from megatron_moe_opt.cli.profile.loads import Rows
from megatron_moe_opt.cli.profile.local import compute_sharing, local_work, one_expert
from megatron_moe_opt.cli.profile.meter import Busy, Load, Meter
from megatron_moe_opt.cli.profile.partitions import partition_overhead
from megatron_moe_opt.cli.ranks import (
    begin,
    machine,
    megatron_process_group,
    parallel_layer,
    software,
    temporary_groups,
)  # fmt: skip
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_file
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, Points, World
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.costs.gpu_settings import gpu_settings
from megatron_moe_opt.planning.predicting.simulator import Slowdown, simulate
from megatron_moe_opt.planning.predicting.skew import EVERY_RANK, ONE_RANK
from megatron_moe_opt.schedules import monta
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.parm import JOINT, TP
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.topology.domains import find_levels
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.layouts import Groups, Layout, layout_of_options
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes

KIB, MIB = 2**10, 2**20
SIZES = (16 * KIB, *(64 * KIB * 2**power for power in range(11)))  # up to 64 MiB
LOCAL_SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
GEMM_ROWS = tuple(16 * 2**power for power in range(13))  # up to 65536
# Curves end with an op that takes longer: from there on, time grows with the bytes. Those of experts' groups, on which
# choices rest most, are measured further.
LONGEST_SECONDS, LONGEST_SECONDS_OF_EXPERTS = 0.3, 1.0
EXPERT_GROUPS = ("ep", "expert-tp", JOINT)
STOCK_SHARES = 2
"""Of the time, for a curve of stock's."""
# Lanes are run side by side with ops of about this time, or of the nearest that was measured.
BESIDE_SECONDS = 0.03
# What is moved to learn the overhead: so many chunks, of so many bytes a rank.
OVERHEAD_CHUNKS, OVERHEAD_CHUNK = 16, 32 * KIB


@dataclass(frozen=True)
class ProfileSettings:
    """What `moe-opt profile` was asked for."""

    tp: int
    cp: int
    ep: int | None
    """None: as many ranks as expert_tp leaves."""
    expert_tp: int
    hidden: int
    ffn_hidden: int
    dtype: str
    """Of the rows: fp32 or bf16."""
    seconds: float
    domains: bool = False
    """Whether to measure the groups of expert domains too."""

    def layout(self, world: int) -> Layout:
        """Returns the groups that these sizes make on `world` ranks.

        Raises:
            ConfigurationError: the option, its value and the way out.
        """
        ep = self.ep or max(1, world // self.expert_tp)
        sizes = {"--world": world, "--tp": self.tp, "--cp": self.cp, "--ep": ep, "--expert-tp": self.expert_tp}
        layout = layout_of_options(sizes, f"the {world} ranks of this run")
        if self.ffn_hidden % self.expert_tp:
            raise ConfigurationError(
                f"--expert-tp {self.expert_tp} does not divide --ffn-hidden {self.ffn_hidden}: choose a divisor"
            )
        return layout


def profile_cluster(settings: ProfileSettings, output: Path) -> Cluster:
    """Measures on the current ranks; rank 0 prints the table and writes `output`.

    Raises:
        ConfigurationError: settings that cannot work, before anything runs.
    """
    world = begin()
    check_output_file("--output", output)
    settings.layout(world)
    with megatron_process_group() as device:
        cluster = measure(settings, device)
        if dist.get_rank() == 0:
            cluster.save(output)
            console = report_console(200)
            console.print(curves_table(cluster))
            say_written(output, console)
    return cluster


def measure(settings: ProfileSettings, device: torch.device) -> Cluster:
    """Returns the measured cluster. A collective call over the world; the same answer on every rank."""
    layout = settings.layout(dist.get_world_size())
    nodes = discover_nodes()
    rows = Rows(settings.hidden, torch_dtype(settings.dtype), device)
    ffn_hidden = settings.ffn_hidden // settings.expert_tp
    workers = find_levels([nodes.node_of[rank] for rank in layout.groups("ep")[0]]) if settings.domains else ()
    with (
        groups_of(layout) as groups,
        domain_groups_of(layout, workers, groups.get("ep")) as domains,
        parallel_layer(tp=1, ep=1, expert_tp=1, seed=1),  # for Megatron's layers on a rank by itself
        _progress() as progress,
    ):
        moves = domain_moves(rows, domains, workers) + _moves(rows, groups, nodes)
        groups |= domains
        of_stock = _stock_moves(rows, groups)
        measured = _Measured(Meter(device), settings.seconds, moves, groups, STOCK_SHARES * len(of_stock))
        task = progress.add_task("", total=len(moves) + len(of_stock) + 5)
        for load in moves:
            progress.update(task, description=str(load), advance=1)
            measured.add(load)
        stock_curves = {}
        for load in of_stock:
            progress.update(task, description=f"{load} of stock", advance=1)
            stock_curves[load.kind, load.group] = measured.collective(load, STOCK_SHARES)
        progress.update(task, description="expert", advance=1)
        expert = one_expert(rows, ffn_hidden)
        experts = [loads.expert_gemm(rows, expert, training) for training in (False, True)]
        gemm, training = (measured.curve(expert, GEMM_ROWS) for expert in experts)
        progress.update(task, description="all_to_all beside all_gather", advance=1)
        saa = measured.saa(rows)
        progress.update(task, description="lanes side by side", advance=1)
        slowdown = measured.slowdown(experts[0], gemm)
        overhead = measured.overhead(rows, slowdown)
        progress.update(task, description="rows on the rank", advance=1)
        local = local_work(rows, Meter(device), LOCAL_SIZES, LONGEST_SECONDS)
        sharing = compute_sharing(rows, Meter(device), expert, _near(gemm, BESIDE_SECONDS)[0], nodes)
    cluster = Cluster(
        world=World(nodes.node_of, layout.tp, layout.cp, layout.ep, layout.expert_tp),
        curves=measured.curves,
        slowdown=slowdown,
        overhead=overhead,
        saa=saa,
        expert_gemm=ExpertGemm(settings.hidden, ffn_hidden, settings.dtype, gemm, training),
        compute_sharing=sharing,
        local_work=local,
        stock_curves=stock_curves,
        gpu_settings=gpu_settings() if device.type == "cuda" else None,
        host=machine(device),
        software=software(),
    )
    if layout.ep * layout.expert_tp == 1:
        return cluster  # no partitions
    with parallel_layer(layout.tp, layout.ep, layout.expert_tp, seed=1):
        sizes = settings.hidden, settings.ffn_hidden, settings.dtype
        overhead = partition_overhead(cluster, layout.tp, *sizes, device, measured.seconds_left())
        return replace(cluster, partition_overhead=overhead)


def _progress() -> Progress:
    return Progress(console=progress_console(), transient=True, disable=dist.get_rank() != 0)


class _Measured:
    """The curves so far. Each gets an equal share of the time that is left."""

    def __init__(
        self, meter: Meter, seconds: float, moves: Sequence[Load], groups: Mapping[str, ProcessGroup], others: int
    ) -> None:
        """
        Args:
            others: curves that are measured besides those of the moves, the expert and SAA.
        """
        self.curves: dict[tuple[Kind, str | None], Points] = {}
        self._meter, self._seconds, self._moves, self._groups = meter, seconds, moves, groups
        # Besides the moves: the expert's two passes, SAA, lanes side by side, which take the time of three curves, and
        # partitions.
        self._shares_left = len({self._key(load) for load in moves}) + others + 3 + 3 + 1
        self._known: dict[Hashable, Points] = {}

    def add(self, load: Load) -> None:
        key = self._key(load)
        if key not in self._known:
            self._known[key] = self.collective(load)
        self.curves[load.kind, load.group] = self._known[key]

    def collective(self, load: Load, shares: int = 1) -> Points:
        """The curve of a move; that of whole messages gets further with fewer sizes."""
        of_experts = [self._groups[role] for role in EXPERT_GROUPS if role in self._groups]
        further = load.group in self._groups and self._groups[load.group] in of_experts
        longest = LONGEST_SECONDS_OF_EXPERTS if further else LONGEST_SECONDS
        return self._meter.curve(load, SIZES[::3] if load.is_whole else SIZES, self._share(shares), longest)

    def curve(self, load: Load, sizes: Sequence[int]) -> Points:
        return self._meter.curve(load, sizes, self._share(), LONGEST_SECONDS)

    def saa(self, rows: Rows) -> Points | None:
        """Returns the curve of Parm's combine_and_gather as a whole; None where it has no all-to-all or nothing to
        gather.
        """
        share, groups = self._share(), self._groups
        if not {JOINT, TP} <= groups.keys():
            return None
        of_experts = expert_groups(groups)
        pipeline = loads.combine_and_gather(rows, of_experts, groups[TP], overlap=True)
        return self._meter.pipeline_curve(pipeline, SIZES, share, LONGEST_SECONDS_OF_EXPERTS)

    def seconds_left(self) -> float:
        """Returns the seconds that are left to measure for; below 0 where it has taken longer."""
        return self._seconds - self._meter.elapsed()

    def _share(self, shares: int = 1) -> float:
        """Returns what the next curve may take of the time that is left."""
        share = self.seconds_left() / self._shares_left * shares
        self._shares_left -= shares
        return share

    def slowdown(self, expert: Load, gemm: Points) -> dict[tuple[Lane, ...], float]:
        """The rate of each lane beside each other one: with the experts' ops, or others in lanes that have none; and
        of the lanes of a pipeline with memory reuse beside its other two.

        Args:
            expert: what keeps the compute lane busy, and the time that it takes over its size.
        """
        by_preference = sorted(self._moves, key=lambda load: load.group in EXPERT_GROUPS)
        loads_of = {load.lane: (load, self.curves[load.kind, load.group]) for load in by_preference}
        loads_of[Lane.COMPUTE] = expert, gemm
        busy = {lane: _busy(*load) for lane, load in loads_of.items()}
        rates: dict[tuple[Lane, ...], float] = {}
        for lane in Lane:
            besides = [beside for beside in _besides(lane) if busy.keys() >= {lane, *beside}]
            if besides:
                neighbours = [[busy[other] for other in beside] for beside in besides]
                measured = self._meter.rates_beside(busy[lane], *neighbours)
                rates |= {(lane, *beside): rate for beside, rate in zip(besides, measured, strict=True)}
        return rates

    def overhead(self, rows: Rows, slowdown: Slowdown) -> float:
        """What every op must take besides its curve for the same rows to take as much longer in small chunks than in
        one as they do when a layer moves them.
        """
        groups = self._groups
        if "ep" not in groups:
            return 0.0  # nothing to pipeline
        of_experts = expert_groups(groups)
        counts = (1, OVERHEAD_CHUNKS)
        moves = [loads.there_and_back(rows, of_experts, OVERHEAD_CHUNKS * OVERHEAD_CHUNK, count) for count in counts]
        in_one, in_chunks = self._meter.calls(moves)
        curves = {key: CostCurve(points) for key, points in self.curves.items()}
        sizes = of_experts.ep_size, of_experts.etp_size

        def seconds(count: int, costs: Costs) -> float:
            chunks = even_chunks(OVERHEAD_CHUNKS * OVERHEAD_CHUNK, of_experts.etp_size, count)
            pipelines = [build("O3", chunks, *sizes) for build in (monta.dispatch, monta.combine)]
            return sum(simulate(pipeline, costs, slowdown).seconds for pipeline in pipelines)

        def longer(overhead: float) -> float:
            in_one, in_chunks = (seconds(count, Costs(curves, overhead)) for count in counts)
            return in_chunks - in_one

        least, most = 0.0, in_chunks
        for _ in range(30):  # halving: the difference rises with the overhead
            middle = (least + most) / 2
            least, most = (middle, most) if longer(middle) < in_chunks - in_one else (least, middle)
        return least

    def _key(self, load: Load) -> Hashable:
        """The same for two roles that share a process group: what is measured once."""
        return load.kind, self._groups.get(load.group, load.group)


# The lanes of a pipeline with memory reuse: the paper's alpha(y, all).
_TOGETHER = ((Lane.INTER, Lane.COMPUTE, Lane.D2H), (Lane.INTER, Lane.COMPUTE, Lane.H2D))


def _besides(lane: Lane) -> list[tuple[Lane, ...]]:
    """Returns beside what a lane's rate is measured: each other lane, then those that it works with all at once.

    No pipeline has offloads beside prefetches.
    """
    to_and_from_host = {Lane.D2H, Lane.H2D}
    alone = [(other,) for other in Lane if other is not lane and {lane, other} != to_and_from_host]
    return alone + [tuple(one for one in lanes if one is not lane) for lanes in _TOGETHER if lane in lanes]


def _near(points: Points, seconds: float) -> tuple[int, float]:
    return min(points, key=lambda point: abs(point[1] - seconds))


def _busy(load: Load, points: Points) -> Busy:
    """Returns what keeps a lane busy: ops of the time nearest to BESIDE_SECONDS."""
    size, seconds = _near(points, BESIDE_SECONDS)
    return Busy(load, load.sized(size), seconds)


# What training issues in the groups of a role. EP comes last (but for experts): it gets the time that others have left.
_INTRA: tuple[tuple[str, tuple[Callable[..., Load], ...]], ...] = (
    ("expert-tp", (loads.reduce_scatter, loads.all_gather)),
    ("tp", (loads.reduce_scatter, loads.all_gather)),
)
_INTER: tuple[tuple[str, tuple[Callable[..., Load], ...]], ...] = (
    ("dp", (loads.reduce_scatter, loads.all_gather)),
    ("cp", (loads.reduce_scatter, loads.all_gather)),
    (JOINT, (loads.all_to_all,)),
    ("ep", (loads.all_to_all,)),
)


def _moves(rows: Rows, groups: Mapping[str, ProcessGroup], nodes: NodeMap) -> list[Load]:
    """Returns every move that these groups, nodes and devices have."""
    moves = [loads.copy(rows), *(loads.host_transfer(rows, kind) for kind in (Kind.OFFLOAD, Kind.PREFETCH))]
    for lane, roles, link, rings in (
        (Lane.INTRA, _INTRA, "intra-node", loads.rings_inside(nodes)),
        (Lane.INTER, _INTER, EVERY_RANK, loads.rings_between(nodes)),
    ):
        if rings:
            moves.append(loads.ring(rows, dist.group.WORLD, rings, link, lane))
        if link == EVERY_RANK and len(rings) > 1:
            moves.append(loads.ring(rows, dist.group.WORLD, rings[:1], ONE_RANK, lane))
        for role, collectives in roles:
            if role in groups and groups[role].size() > 1:
                moves += [collective(rows, groups[role], role, lane) for collective in collectives]
    return moves


def _stock_moves(rows: Rows, groups: Mapping[str, ProcessGroup]) -> list[Load]:
    """Returns the moves that are not as fast when stock Megatron calls them."""
    if "ep" not in groups or groups["ep"].size() == 1:
        return []
    return [loads.stock_all_to_all(rows, groups["ep"], "ep", Lane.INTER)]


@contextmanager
def groups_of(layout: Layout) -> Iterator[dict[str, ProcessGroup]]:
    """Yields this rank's process group of each role that has more than one rank; EP's too, where it has a joint one.

    Roles of one lane with equal groups share them. Those of two lanes do not: lanes run side by side, and the ranks
    must agree on the order of a group's collectives.
    """
    made: dict[tuple[Lane, Groups], ProcessGroup] = {}
    groups: dict[str, ProcessGroup] = {}
    for lane, roles in ((Lane.INTRA, _INTRA), (Lane.INTER, _INTER)):
        for role, _ in roles:
            ranks = _ranks(layout, role)
            if len(ranks[0]) > 1 or (role == "ep" and JOINT in groups):
                if (lane, ranks) not in made:
                    made[lane, ranks] = loads.group_of(ranks)
                groups[role] = made[lane, ranks]
    with temporary_groups(made.values()):
        yield groups


def expert_groups(groups: Mapping[str, ProcessGroup]) -> ExpertGroups:
    """Returns those of `groups_of` that a MoE layer communicates over. The joint group is EP's where none was made."""
    return ExpertGroups(groups["ep"], groups.get("expert-tp"), groups.get(JOINT, groups["ep"]))


def _ranks(layout: Layout, role: str) -> Groups:
    """The groups of a role. EP and expert-TP are one where Parm has a choice: expert-TP, or TP to split tokens over."""
    if role != JOINT:
        return layout.groups(role)
    return layout.joint_groups if max(layout.tp, layout.expert_tp) > 1 else ((dist.get_rank(),),)
