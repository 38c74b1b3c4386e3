"""All curves of `cluster.json`, measured on the running ranks in the time that is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from megatron_moe_opt.gpu_settings import gpu_settings
from megatron_moe_opt.integration.measuring import loads
from megatron_moe_opt.integration.measuring.domain_moves import domain_groups_of, domain_moves, num_domain_groups
from megatron_moe_opt.integration.measuring.layer_settings import torch_dtype
from megatron_moe_opt.integration.measuring.loads import Rows
from megatron_moe_opt.integration.measuring.local import compute_sharing, local_work, rank_experts
from megatron_moe_opt.integration.measuring.megatron_moves import (
    expert_groups,
    groups_of_one_rank,
    megatron_groups,
    moves_of_groups,
)
from megatron_moe_opt.integration.measuring.meter import LEAST_OPS, Busy, Load, Meter
from megatron_moe_opt.integration.measuring.provenance import machine
from megatron_moe_opt.integration.measuring.undisturbed import undisturbed
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, Points, World
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs, Slowdown
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules import monta
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import CODEC, Kind, Lane
from megatron_moe_opt.topology.nodes import discover_nodes
from megatron_moe_opt.topology.process_groups import COMMUNICATOR_BYTES
from megatron_moe_opt.versions import software

KIB, MIB = 2**10, 2**20
SIZES = (16 * KIB, *(64 * KIB * 2**power for power in range(11)))  # up to 64 MiB
LOCAL_SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
GEMM_ROWS = tuple(16 * 4**power for power in range(7))  # of each expert, up to 65536
# Curves end with an op that takes longer: from there on, time grows with the bytes. Those of experts' groups, on which
# choices rest most, are measured further.
LONGEST_SECONDS, LONGEST_SECONDS_OF_EXPERTS = 0.3, 1.0
EXPERT_GROUPS = (EP, EXPERT_TP, JOINT_GROUP)
SLOWDOWN_SHARES = 3
"""How many shares of the time the measurement of lanes side by side gets."""
SHARES_OF_EXPERTS = 2
"""How many shares each pass of experts gets: choices rest on it, and its ops are of several experts."""
PART_OF_ROOM = 1 / 8
"""The part of the memory that is free on a GPU which one op may take: lanes side by side have one each."""
NOISE = 0.25
"""How far a point that was measured again may lie above what is kept of it, in parts, before its curve is doubted."""
_SIDES = 2  # of a move: what is sent, and what is received
_BUFFERS = 4  # of the codec: what is encoded, what it is told from, their sum, and what is decoded
# Lanes are run side by side with ops of about this time, or of the nearest that was measured; shorter ones where all of
# them would take longer than there is.
BESIDE_SECONDS = 0.03
# What is moved to learn the overhead: so many chunks, of so many bytes a rank.
OVERHEAD_CHUNKS, OVERHEAD_CHUNK = 16, 32 * KIB


@dataclass(frozen=True)
class Sizes:
    """What is measured besides the groups: rows and experts as the layers have them."""

    hidden: int
    """Elements of a row: the hidden size."""
    ffn_hidden: int
    """Middle size of a whole expert, before expert-TP cuts it."""
    dtype: str
    """Type of the rows: fp32 or bf16."""
    workers: tuple[int, ...]
    """The workers of each network level of the expert-parallel groups, whose groups of expert domains are measured."""
    local_experts: float = math.inf
    """Experts of a rank: so many are computed in one call, or as many as there is time and memory for."""
    codec: bool = False
    """Whether to measure how experts that travel are encoded and decoded, and their gradients."""
    fused: Mapping[str, bool] = field(default_factory=dict)
    """The fields of Megatron's configuration by which rows are permuted and experts computed, as the job has them;
    none: as `under_test.fused` tells.
    """


Progress = Callable[[int, int, str], None]
"""A function that is told how many parts are done, of how many, and what is measured next."""


def measure(sizes: Sizes, seconds: float, device: torch.device, progress: Progress) -> Cluster:
    """Returns the measured cluster; the same answer on every rank.

    A collective call over the world, in the groups that Megatron has made. What trains in this process meanwhile does
    not notice: see undisturbed.py.

    Args:
        seconds: to measure for. Every curve has a point at least, however long that takes.
    """
    meter = Meter(device)
    nodes, groups = discover_nodes(), megatron_groups()
    rows = Rows(sizes.hidden, torch_dtype(sizes.dtype), device)
    world = World(
        nodes.node_of,
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    ffn_hidden = sizes.ffn_hidden // world.expert_tp
    with (
        undisturbed(),
        domain_groups_of(parallel_state.get_expert_model_parallel_group(), sizes.workers) as domains,
        groups_of_one_rank() as alone,
    ):
        room = room_beside(device, num_domain_groups(sizes.workers))
        experts_travel = world.expert_tp == 1 < world.ep  # those that are cut do not
        moves = domain_moves(rows, domains, sizes.workers, experts_travel) + moves_of_groups(rows, groups, nodes)
        groups |= domains
        # EP's exchange last, also where it is measured as that of a domain: it gets the time that others have left.
        moves.sort(key=lambda load: load.kind is Kind.ALL_TO_ALL and groups[load.group].size() == world.ep)
        codec = [loads.codec(rows, kind) for kind in Kind if kind in CODEC and sizes.codec and experts_travel]
        measured = _Measured(meter, seconds, moves, groups, len(codec), room)
        parts = [*(str(load) for load in (*moves, *codec)), *_LAST_PARTS]
        next_part = iter(range(len(parts)))

        def begin() -> None:
            number = next(next_part)
            progress(number, len(parts), parts[number])

        for load in moves:
            begin()
            measured.add(load)
        of_codec = {}
        for load in codec:
            begin()
            of_codec[load.kind, load.group] = measured.curve(load, _fitting(LOCAL_SIZES, _BUFFERS, room), str(load))
        begin()
        of_experts = math.inf if room is None else room * PART_OF_ROOM
        experts = rank_experts(rows, ffn_hidden, sizes.local_experts, of_experts, alone, sizes.fused)
        # Of a row of each expert in and out, what is between, and their gradients.
        of_row = experts.number * 4 * (sizes.hidden + ffn_hidden) * rows.dtype.itemsize
        gemm_rows = _fitting(GEMM_ROWS, of_row, room)
        passes = {"experts": False, "experts, forward and backward": True}
        gemm, training = (
            measured.curve(experts.load(rows, both), gemm_rows, name, SHARES_OF_EXPERTS)
            for name, both in passes.items()
        )
        begin()
        saa = measured.saa(rows)
        begin()
        slowdown = measured.slowdown(experts.load(rows), gemm)
        overhead = measured.overhead(rows, slowdown)
        begin()
        local = local_work(rows, meter, LOCAL_SIZES, LONGEST_SECONDS, alone, measured.share(), sizes.fused)
        of_each = _near(gemm, BESIDE_SECONDS)[0]
        sharing = compute_sharing(rows, meter, experts, of_each, nodes, measured.share())
        return Cluster(
            world=world,
            curves=measured.curves | of_codec,
            slowdown=slowdown,
            overhead=overhead,
            saa=saa,
            expert_gemm=ExpertGemm(sizes.hidden, ffn_hidden, sizes.dtype, *map(experts.of_one, (gemm, training))),
            compute_sharing=sharing,
            local_work=local,
            gpu_settings=gpu_settings() if device.type == "cuda" else None,
            host=machine(device),
            software=software(),
            warnings=tuple(measured.warnings),
        )


_LAST_PARTS = {
    "experts": 2 * SHARES_OF_EXPERTS,
    "all_to_all beside all_gather": 1,
    "lanes side by side": SLOWDOWN_SHARES + 1,  # and the overhead
    "rows on the rank": 2,  # and computing alone
}
"""What is measured behind the moves and the codec, and how many shares of the time it gets."""


def room_beside(device: torch.device, communicators: int) -> int | None:
    """Returns the bytes that the GPU of every rank has free beside so many new communicators; below 0: these do not
    fit. None without GPUs. A collective call over the world.
    """
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    least = torch.tensor(free - communicators * COMMUNICATOR_BYTES, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item())  # host synchronisation: measuring alone


def _fitting(sizes: Sequence[int], each: int, room: int | None) -> Sequence[int]:
    """Returns the sizes, of so many bytes each, that take at most PART_OF_ROOM of the free memory; the first always."""
    return sizes if room is None else (sizes[0], *(size for size in sizes[1:] if size * each <= room * PART_OF_ROOM))


class _Measured:
    """The curves so far. Each gets an equal share of the time that is left."""

    def __init__(
        self,
        meter: Meter,
        seconds: float,
        moves: Sequence[Load],
        groups: Mapping[str, ProcessGroup],
        others: int,
        room: int | None,
    ) -> None:
        """
        Args:
            others: curves that are measured besides those of the moves and _LAST_PARTS.
            room: bytes that are free on every rank; None: enough.
        """
        self.curves: dict[tuple[Kind, str | None], Points] = {}
        self.warnings: list[str] = []
        self._meter, self._seconds, self._moves, self._groups = meter, seconds, moves, groups
        self._ranks = {role: tuple(dist.get_process_group_ranks(group)) for role, group in groups.items()}
        self._sizes = _fitting(SIZES, _SIDES, room)
        self._shares_left = len({self._key(load) for load in moves}) + others + sum(_LAST_PARTS.values())
        self._known: dict[Hashable, Points] = {}

    def add(self, load: Load) -> None:
        """Measures the curve of a move, unless that of a like one is known; of whole messages it has fewer sizes."""
        key = self._key(load)
        if key not in self._known:
            of_experts = [self._ranks[role] for role in EXPERT_GROUPS if role in self._ranks]
            further = self._ranks.get(load.group) in of_experts
            longest = LONGEST_SECONDS_OF_EXPERTS if further else LONGEST_SECONDS
            sizes = self._sizes[::3] if load.is_whole else self._sizes
            self._known[key] = self._doubted(str(load), self._meter.curve(load, sizes, self.share(), longest))
        self.curves[load.kind, load.group] = self._known[key]

    def curve(self, load: Load, sizes: Sequence[int], name: str, shares: int = 1) -> Points:
        return self._doubted(name, self._meter.curve(load, sizes, self.share(shares), LONGEST_SECONDS))

    def saa(self, rows: Rows) -> Points | None:
        """Returns the curve of Parm's combine_and_gather as a whole; None where it has no all-to-all or nothing to
        gather.
        """
        share, groups = self.share(), self._groups
        if not {JOINT_GROUP, TP} <= groups.keys():
            return None
        of_experts = expert_groups(groups)
        pipeline = loads.combine_and_gather(rows, of_experts, groups[TP], overlap=True)
        points = self._meter.pipeline_curve(pipeline, self._sizes, share, LONGEST_SECONDS_OF_EXPERTS)
        return self._doubted("SAA", points)

    def share(self, shares: int = 1) -> float:
        """Returns the seconds that what is measured next may take of the time that is left."""
        share = (self._seconds - self._meter.elapsed()) / self._shares_left * shares
        self._shares_left -= shares
        return share

    def slowdown(self, experts: Load, gemm: Points) -> dict[tuple[Lane, ...], float]:
        """Returns the rate of each lane while each other one is busy: with the experts' ops, or others in lanes that
        have none; and of the lanes of a pipeline with memory reuse beside its other two. When the time is up, with the
        fewest ops.

        Args:
            experts: what keeps the compute lane busy, and the time that it takes over its size.
        """
        by_preference = sorted(self._moves, key=lambda load: load.group in EXPERT_GROUPS)
        loads_of = {load.lane: (load, self.curves[load.kind, load.group]) for load in by_preference}
        loads_of[Lane.COMPUTE] = experts, gemm
        besides_of = {
            lane: [beside for beside in _besides(lane) if loads_of.keys() >= {lane, *beside}] for lane in loads_of
        }
        share = self.share(SLOWDOWN_SHARES)
        end = self._meter.elapsed() + share
        longest = share / (LEAST_OPS * sum(1 + len(besides) for besides in besides_of.values()))
        busy = {lane: _busy(*load, min(BESIDE_SECONDS, longest)) for lane, load in loads_of.items()}
        rates: dict[tuple[Lane, ...], float] = {}
        for lane, besides in besides_of.items():
            if besides:
                neighbours = [[busy[other] for other in beside] for beside in besides]
                hurried = self._meter.elapsed() > end
                measured = self._meter.rates_beside(busy[lane], *neighbours, hurried=hurried)
                rates |= {(lane, *beside): rate for beside, rate in zip(besides, measured, strict=True)}
        return rates

    def overhead(self, rows: Rows, slowdown: Slowdown) -> float:
        """Returns the seconds that every op must take besides its curve, so that the same rows take as much longer in
        small chunks than in one as they do when a layer moves them.
        """
        groups, share = self._groups, self.share()
        if EP not in groups:
            return 0.0  # nothing to pipeline
        of_experts = expert_groups(groups)
        counts = (1, OVERHEAD_CHUNKS)
        moves = [loads.there_and_back(rows, of_experts, OVERHEAD_CHUNKS * OVERHEAD_CHUNK, count) for count in counts]
        in_one, in_chunks = self._meter.calls(moves, share)
        curves = {key: CostCurve(points) for key, points in self.curves.items()}
        sizes = of_experts.ep_size, of_experts.etp_size

        def seconds(count: int, costs: Costs) -> float:
            chunks = even_chunks(OVERHEAD_CHUNKS * OVERHEAD_CHUNK, of_experts.etp_size, count)
            ways = (monta.outline(direction, "O3", count, *sizes) for direction in ("dispatch", "combine"))
            return sum(simulate(way.sized(chunks), costs, slowdown).seconds for way in ways)

        def longer(overhead: float) -> float:
            in_one, in_chunks = (seconds(count, Costs(curves, overhead)) for count in counts)
            return in_chunks - in_one

        least, most = 0.0, in_chunks
        for _ in range(30):  # halving: the difference rises with the overhead
            middle = (least + most) / 2
            least, most = (middle, most) if longer(middle) < in_chunks - in_one else (least, middle)
        return least

    def _doubted(self, name: str, points: Points) -> Points:
        """Returns the curve that was measured last, with a warning where it should not be trusted."""
        longer = "measure longer (--seconds of moe-opt profile, --moe-opt-profile-seconds of auto)"
        if len(points) == 1:
            self.warnings.append(f"{name}: one point alone, {points[0][0]}, from which all sizes follow: {longer}")
        elif self._meter.ended_flat:
            self.warnings.append(
                f"{name}: {points[-1][0]}, from which larger sizes follow, took no longer than smaller ones: {longer}"
            )
        elif self._meter.noise > NOISE:
            self.warnings.append(
                f"{name}: noisy, a point lay {self._meter.noise:.0%} above the curve that is kept: measure again on "
                "idle machines"
            )
        return points

    def _key(self, load: Load) -> Hashable:
        """Returns a key that is the same for two roles whose groups have the same ranks: these are measured once."""
        return load.kind, load.is_whole, self._ranks.get(load.group, load.group)


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


def _busy(load: Load, points: Points, near: float) -> Busy:
    """Returns what keeps a lane busy: ops of the time nearest to so many seconds."""
    size, seconds = _near(points, near)
    return Busy(load, load.sized(size), seconds)
