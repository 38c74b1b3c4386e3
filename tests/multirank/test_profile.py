"""`moe-opt profile` on 4 ranks, ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.planning.costs.bus_bandwidth import EVERY_RANK, ONE_RANK
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.costs.domain_curves import KINDS, profile_name
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import CODEC, Kind, Lane, Op, Schedule
from megatron_moe_opt.systems.parm import PARM
from tests.ranks.devices import rank_device

GATHERS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
RINGS = {(Kind.SEND_RECEIVE, role) for role in ("intra-node", EVERY_RANK, ONE_RANK)}


def _profile(seconds, sizes, **options):
    from megatron_moe_opt.cli.profile.run import ProfileSettings, measured
    from megatron_moe_opt.integration.measuring import loads, measure, meter

    defaults = {"tp": 1, "cp": 1, "ep": None, "expert_tp": 1, "hidden": 64, "ffn_hidden": 32, "dtype": "fp32"}
    settings = ProfileSettings(**defaults | options, seconds=seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(dist.get_rank() // 2))
        patch.setattr(loads, "_COPIED_BYTES", 2**18)
        patch.setattr(meter, "MOST_BESIDE", 4)
        patch.setattr(meter, "LEAST_OPS", 2)
        patch.setattr(meter, "MOST_OPS", 2)
        patch.setattr(meter, "MORE_OF_OUTLIERS", 0)
        patch.setattr(meter, "CALLS", 2)
        patch.setattr(meter, "SECOND_SIZE_SECONDS", 0)
        patch.setattr(meter, "DIP", 1)  # such short measurements are seldom undisturbed: all sizes are kept
        patch.setattr(measure, "SIZES", sizes)
        patch.setattr(measure, "LOCAL_SIZES", sizes)
        patch.setattr(measure, "LONGEST_SECONDS", math.inf)  # else a busy machine measures fewer sizes
        patch.setattr(measure, "LONGEST_SECONDS_OF_EXPERTS", math.inf)
        patch.setattr(measure, "GEMM_ROWS", (16, 32))
        return measured(settings, rank_device())


@pytest.mark.parametrize(
    ("options", "world", "groups"),
    [
        (
            {"tp": 2, "expert_tp": 2},
            World((0, 0, 1, 1), tp=2, cp=1, ep=2, expert_tp=2),
            {(kind, role) for kind in GATHERS for role in ("tp", "expert-tp", "dp")}
            | {(Kind.ALL_TO_ALL, role) for role in ("ep", JOINT_GROUP)}
            | {(Kind.ALL_TO_ALL, profile_name(Kind.ALL_TO_ALL, (2,), 0, 2))},  # experts are cut: none travels
        ),
        (
            {"cp": 2, "dtype": "bf16"},
            World((0, 0, 1, 1), tp=1, cp=2, ep=4, expert_tp=1),
            {(kind, role) for kind in GATHERS for role in ("cp", "dp")}
            | {(Kind.ALL_TO_ALL, "ep")}
            | {(kind, profile_name(kind, (2, 2), level, 2)) for kind in KINDS for level in range(2)}
            | {(kind, None) for kind in CODEC},
        ),
        (
            {"tp": 4, "ep": 1, "expert_tp": 4},
            World((0, 0, 1, 1), tp=4, cp=1, ep=1, expert_tp=4),
            {(kind, role) for kind in GATHERS for role in ("tp", "expert-tp")} | {(Kind.ALL_TO_ALL, JOINT_GROUP)},
        ),
    ],
    ids=["tp = expert-tp", "cp, ep and domains", "no ep"],
)
def test_every_group_gets_its_curves(ranks, tmp_path, options, world, groups):
    sizes = (4096, 16384)
    clusters = ranks.run(_profile, seconds=1000.0, sizes=sizes, **options)
    cluster = clusters[0]
    # All ranks would choose alike: they have the same numbers, the facts of their processes aside.
    assert all(replace(other, host={}) == replace(cluster, host={}) for other in clusters)
    assert cluster.world == world
    assert set(cluster.curves) == groups | RINGS | {(kind, None) for kind in (Kind.COPY, Kind.OFFLOAD, Kind.PREFETCH)}
    for (_, group), points in cluster.curves.items():
        is_whole = group is not None and group.startswith("experts of")
        assert tuple(size for size, _ in points) == (sizes[::3] if is_whole else sizes)
        assert all(seconds > 0 for _, seconds in points)
    host = {Lane.D2H, Lane.H2D}
    lanes = [lane for lane in Lane if lane is not Lane.EXPERTS]  # which is nobody's schedule
    pairs = {(one, other) for one in lanes for other in lanes if one is not other and {one, other} != host}
    reuse = ({Lane.INTER, Lane.COMPUTE, transfer} for transfer in host)
    sets = {(lane, frozenset(together - {lane})) for together in reuse for lane in together}
    assert {(lane, frozenset(beside)) for lane, *beside in cluster.slowdown} == sets | {
        (lane, frozenset({beside})) for lane, beside in pairs
    }
    assert all(0 < rate <= 1 for rate in cluster.slowdown.values())
    assert cluster.overhead >= 0 and cluster.compute_sharing >= 1
    gemm = cluster.expert_gemm
    assert (gemm.hidden, gemm.ffn_hidden) == (64, 32 // world.expert_tp)
    assert [rows for rows, _ in gemm.points] == [rows for rows, _ in gemm.training] == [16, 32]
    if world.tp == world.expert_tp > 1:  # the same ranks: measured once
        assert cluster.curves[Kind.ALL_GATHER, "tp"] == cluster.curves[Kind.ALL_GATHER, "expert-tp"]
    assert (cluster.saa is None) == (world.tp == 1)
    if world.tp > 1:  # then tokens can be replicated, and what S1 and S2 take can be predicted
        assert tuple(size for size, _ in cluster.saa) == sizes
        assert all(seconds > 0 for _, seconds in cluster.saa)
        layer = LayerWorkload(32, 16, 16, False, 4, 2, 4, 16, world.ep, world.expert_tp, world.tp)
        found = PARM.candidates(LayerOnCluster(layer, cluster), PARM.open_options)
        assert [one.variant for one in found] == ["parm:S1", "parm:S2"]
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_sizes_are_rounded_to_rows(ranks):
    """Rows of 256 bytes over 4 ranks: 1024 bytes are the least, 2500 are nearest to 2048.

    The ranks of TP and EP are the same, but not their process groups, which lanes use side by side.
    """
    cluster = ranks.run(_profile, seconds=1000.0, sizes=(100, 1024, 2500), tp=4, ep=4)[0]
    curves = cluster.curves
    assert [size for size, _ in curves[Kind.ALL_TO_ALL, "ep"]] == [1024, 2048]
    assert [size for size, _ in cluster.saa] == [1024, 2048]
    assert curves[Kind.ALL_TO_ALL, JOINT_GROUP] == curves[Kind.ALL_TO_ALL, "ep"]  # whole experts: measured once
    assert [size for size, _ in curves[Kind.COPY, None]] == [256, 1024, 2560]


def test_little_time_means_fewer_sizes(ranks):
    """Every curve has its first point, whatever the time; 4 MiB are not tried."""
    cluster = ranks.run(_profile, seconds=1e-3, sizes=(4096, 2**22))[0]
    assert {tuple(size for size, _ in points) for points in cluster.curves.values()} == {(4096,)}


class _Played:
    """An executor whose ops take known times, and the clock that they move on."""

    def __init__(self, cost, slowdown):
        self.cost, self.slowdown, self.now = cost, slowdown, 0.0

    def run(self, schedule, steps, record):
        timeline = simulate(schedule, self.cost, self.slowdown)
        self.now += timeline.seconds
        return timeline

    def perf_counter(self):
        return self.now


def _made_up():
    """Returns what is measured where an op takes as many milliseconds as it has bytes, and twice that on rank 2."""
    from megatron_moe_opt.integration.measuring import meter

    slow = 2 if dist.get_rank() == 2 else 1
    loads = {
        lane: meter.Load(Kind.COPY, lane, None, lambda size: meter.Sized(size, lambda: None))
        for lane in (Lane.COPY, Lane.INTRA, Lane.INTER)
    }
    played = _Played(
        lambda op: slow * op.size * 1e-3,
        {(Lane.INTRA, Lane.INTER): 0.4, (Lane.INTRA, Lane.INTER, Lane.COPY): 0.2},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "executor", lambda device: played)
        patch.setattr(meter, "time", played)
        measured = meter.Meter(rank_device())
        in_two_lanes = Schedule("two ops", (Op(Kind.COPY, Lane.COPY, size=10), Op(Kind.COPY, Lane.INTRA, size=20)))

        def busy(lane, size):
            return meter.Busy(loads[lane], loads[lane].sized(size), size * 1e-3)

        pipeline = meter.SizedPipeline(30, lambda: (in_two_lanes, [None, None]))
        return (
            measured.pipeline_curve(lambda size: pipeline, (30,), seconds=8.0, longest=90.0),
            measured.curve(loads[Lane.COPY], (10, 20, 40, 9000), seconds=8.0, longest=90.0),
            measured.curve(loads[Lane.COPY], (10, 600, 700), seconds=60.0, longest=1.0),
            measured.rates_beside(busy(Lane.INTER, 10), [busy(Lane.INTRA, 10)]),
            measured.rates_beside(
                busy(Lane.INTRA, 10), [busy(Lane.INTER, 30)], [busy(Lane.INTER, 30), busy(Lane.COPY, 20)]
            ),
            _disturbed_curve(meter, played, loads[Lane.COPY]),
            _bulge(meter, played, loads[Lane.COPY]),
            measured.curve(loads[Lane.COPY], (1, 2, 4), seconds=0.0, longest=90.0),
            _latency(meter, played, loads[Lane.COPY]),
            _knee(meter, played, loads[Lane.COPY]),
            *_disturbed_ends(meter, played, loads[Lane.COPY]),
        )


def _disturbed_ends(meter, played, load):
    """Measures where the largest size is disturbed: only the first time, when no time is left; always; and not
    disturbed, but slow, of a load that training moves as a whole.
    """
    undisturbed = played.cost
    for disturbed, is_whole in ((meter.LEAST_OPS, False), (math.inf, False), (math.inf, True)):
        measurements = count()

        def cost(op, measurements=measurements, disturbed=disturbed):
            return undisturbed(op) * (5 if op.size == 40 and next(measurements) < disturbed else 1)

        played.cost = cost
        measured = meter.Meter(rank_device())
        yield measured.curve(replace(load, is_whole=is_whole), (10, 20, 40), seconds=1.4, longest=90.0)
    played.cost = undisturbed


def _disturbed_curve(meter, played, load):
    """Measures where the first measurement of an op of 40 bytes, and all of 10 bytes, are
    disturbed; and what noise is left.
    """
    undisturbed, measurements = played.cost, count()

    def cost(op):
        slow = op.size == 10 or (op.size == 40 and next(measurements) < meter.LEAST_OPS)
        return undisturbed(op) * (5 if slow else 1)

    played.cost = cost
    measured = meter.Meter(rank_device())
    curve = measured.curve(load, (10, 20, 40), seconds=60.0, longest=90.0)
    played.cost = undisturbed
    return curve, measured.noise


def _latency(meter, played, load):
    """Measures where ops take 50 ms whatever their size, and the very first one 100 s; then in too little time. Returns
    the sizes, and whether it is known that the last one says nothing.
    """
    undisturbed, measurements = played.cost, count()
    played.cost = lambda op: 0.05 + undisturbed(op) * 1e-3 + 100 * (next(measurements) == 0)
    measured, found = meter.Meter(rank_device()), []
    for seconds in (8.0, 0.1):
        curve = measured.curve(load, (1, 2, 4, 8, 16, 32), seconds=seconds, longest=90.0)
        found.append(([size for size, _ in curve], measured.ended_flat))
    played.cost = undisturbed
    return found


def _knee(meter, played, load):
    """Measures where ops take 50 ms up to 8 bytes, and as much longer as they have more from there on."""
    undisturbed = played.cost
    played.cost = lambda op: 0.05 * max(1.0, op.size / 8)
    curve = meter.Meter(rank_device()).curve(load, (1, 2, 4, 8, 16, 32), seconds=60.0, longest=90.0)
    played.cost = undisturbed
    return curve


def _bulge(meter, played, load):
    """Measures where every op takes 40 ms besides, and the first measurement of 20 bytes is
    disturbed: none is slower a byte.
    """
    undisturbed, measurements = played.cost, count()
    disturbed = meter.LEAST_OPS
    played.cost = lambda op: 0.04 + undisturbed(op) + 0.03 * (op.size == 20 and next(measurements) < disturbed)
    curve = meter.Meter(rank_device()).curve(load, (10, 20, 40), seconds=60.0, longest=90.0)
    played.cost = undisturbed
    return curve


def test_measured_times_are_those_of_the_slowest_rank(ranks):
    answers = ranks.run(_made_up)
    assert all(answer == answers[0] for answer in answers)
    pipeline, curve, long_ops, undisturbed, disturbed, (disturbed_curve, noise), bulge, hurried, *others = answers[0]
    latency, knee, late, lasting, whole = others
    # 20 and 40 ms beside each other, and not until the 40 ms of the time before are over
    assert pipeline == ((30, pytest.approx(0.04)),)
    assert [size for size, _ in curve] == [10, 20, 40]  # 9000 would take 18 s an op, more than there is time for
    assert [seconds for _, seconds in curve] == pytest.approx([0.02, 0.04, 0.08])
    assert [size for size, _ in long_ops] == [10, 600]  # an op of 600 takes longer than `longest`: that is enough
    assert undisturbed == pytest.approx([1])
    assert disturbed == pytest.approx([0.4, 0.2])  # beside one lane, and beside two that are busy as long
    # 10, which never takes less, is known to take no longer than 20; 40 is measured again
    assert [seconds for _, seconds in disturbed_curve] == pytest.approx([0.04, 0.04, 0.08])
    assert noise == pytest.approx(1.5)  # 10 took 0.1 s however often it was measured
    assert [size for size, _ in hurried] == [1, 2]  # one point would say nothing of larger sizes, whatever the time
    # What does not depend on the size is not measured at every one, and a first call is not of the time
    assert latency == [([1, 2, 16, 32], False), ([1, 2], True)]
    # Where time does depend on it from somewhere on, this is found: 8 takes no longer than 2, so that 4 is not measured
    assert knee == tuple((size, pytest.approx(0.05 * max(1.0, size / 8))) for size in (1, 2, 8, 16, 32))
    # What takes longer than the line between its neighbours is measured again
    assert [seconds for _, seconds in bulge] == pytest.approx([0.06, 0.08, 0.12])
    # The last size is measured again even when the time is up, and left out if that does not help: larger sizes follow
    # from it. Of a message that moves as a whole it may be true.
    assert [seconds for _, seconds in late] == pytest.approx([0.02, 0.04, 0.08])
    assert [seconds for _, seconds in lasting] == pytest.approx([0.02, 0.04])
    assert [seconds for _, seconds in whole] == pytest.approx([0.02, 0.04, 0.4])


def _saa():
    from megatron_moe_opt.cli.profile.run import ProfileSettings
    from tools.bench import saa

    settings = ProfileSettings(2, 1, 2, 2, 64, 32, "fp32", seconds=0.0)
    return saa.measure(settings, [2**13, 2**20], 2, rank_device())


def test_saa_is_compared_with_its_collectives_one_after_the_other(ranks):
    answers = ranks.run(_saa)
    assert all(answer == answers[0] for answer in answers)
    assert [point.size for point in answers[0]] == [2**13, 2**20]
    for point in answers[0]:
        for seconds in (point.all_to_all, point.all_gather, point.aas, point.saa):
            assert len(seconds) == 2 and all(one > 0 for one in seconds)
        assert all(part <= whole for part, whole in zip(point.all_to_all, point.aas, strict=True))
        assert point.ratios == tuple(aas / saa for aas, saa in zip(point.aas, point.saa, strict=True))


def _experts_computed() -> list[int]:
    """Returns how many experts are computed in one call: of 8 MiB, of 96 MiB with gradients and sums, of 768 MiB, with
    little room, with none; and of a layer that has one.
    """
    from megatron_moe_opt.integration.measuring import local
    from megatron_moe_opt.integration.measuring.loads import Rows

    built: list[int] = []

    def layer_under_test(settings, *_, **__):
        built.append(settings.experts)
        return SimpleNamespace(layer=SimpleNamespace(experts=torch.nn.Identity()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "layer_under_test", layer_under_test)
        for hidden, most, room in (
            (1024, math.inf, math.inf), (16384, math.inf, math.inf), (131072, math.inf, math.inf),
            (16384, math.inf, 2**29), (16384, math.inf, 0), (1024, 1, math.inf),
        ):  # fmt: skip
            rows = Rows(hidden, torch.float32, torch.device("cpu"))
            experts = local.rank_experts(rows, 1024, most, room, None, {})
            assert experts.number == built[-1]
            assert experts.load(rows).is_whole  # many rows may take longer a row than fewer: no disturbance
    return built


def test_so_many_experts_are_computed_in_one_call_as_there_are_and_have_room():
    assert _experts_computed() == [4, 2, 1, 1, 1, 1]
