"""`moe-opt timeline` on 4 ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.domain_curves import KINDS, profile_name, realisable_groups
from megatron_moe_opt.planning.predicting import expert_migration
from megatron_moe_opt.planning.predicting.layer_passes import PASSES
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.hops import HopBytes, HopStages, outline
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.topology.domains import ExpertDomains
from tests.ranks.commands import CURVES, group_of_the_pool
from tests.ranks.devices import rank_device


def _run(variant, rank=None, slow_rank=None, files=(), **options):
    """The command on this pool's ranks. `options` are LayerSettings', and `files`."""
    from megatron_moe_opt.cli.report import step_timelines as layer_timeline

    sizes = {"tokens": 48, "hidden": 32, "ffn_hidden": 2, "experts": 8, "topk": 2, "tp": 2, "ep": 2, "expert_tp": 2}
    fixed = {"dtype": "fp32", "routing": "uniform", "capacity_factor": None, "pad_to_capacity": False, "seed": 1}
    counts = {"warmup": 1, "steps": 3, "dispatch_only": True}
    settings = LayerSettings(dispatchers=(variant,), **{**sizes, **fixed, **counts, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_timeline, "megatron_process_group", group_of_the_pool)
        if dist.get_rank() == slow_rank:
            _slow_down(patch)
        return layer_timeline.layer_timeline(settings, rank, files)


def _slow_down(patch):
    """Makes what this rank records take a thousand seconds more."""
    from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest

    observed_step = LayerUnderTest.observed_step

    def slow(layer):
        timelines, stages = observed_step(layer)
        return [
            replace(timeline, spans=tuple(replace(span, end=span.end + 1000) for span in timeline.spans))
            for timeline in timelines
        ], stages

    patch.setattr(LayerUnderTest, "observed_step", slow)


@pytest.mark.parametrize(("variant", "lanes"), [("monta:O1x1", 2), ("monta:O2x3", 2), ("monta:O3x2", 3)])
def test_files_and_timelines(ranks, tmp_path, variant, lanes):
    profile, trace, png = tmp_path / "cluster.json", tmp_path / "step.json", tmp_path / "step.png"
    Cluster(World((0, 0, 1, 1), 2, 1, 2, 2), CURVES, {(Lane.INTER, Lane.INTRA): 0.5}).save(profile)
    answers = ranks.run(_run, variant=variant, profile=profile, files=(trace, png))
    assert all(answer == answers[0] for answer in answers)
    step = answers[0]
    cluster = Cluster.load(profile)
    assert list(step.measured) == list(step.predicted) == list(PASSES)
    for name, measured in step.measured.items():
        predicted = step.predicted[name]
        assert predicted == simulate(measured.schedule, cluster.costs, cluster.slowdown)
        assert predicted.seconds > 0 and len(measured.schedule.lanes) == lanes
        assert ("dispatch" in measured.schedule.name) == (name in ("forward dispatch", "backward of combine"))
        for lane in measured.schedule.lanes:
            spans = measured.lane(lane)
            assert all(0 <= span.start <= span.end for span in spans)
            assert all(one.end <= other.start for one, other in zip(spans, spans[1:], strict=False))
    # A row of dispatch is 32 floats and 16 bytes for its probability; its gradient comes back alike.
    sent = [sum(op.size for op in timeline.schedule.ops if op.kind is Kind.ALL_TO_ALL)
            for timeline in step.measured.values()]  # fmt: skip
    assert sent == [96 * 144, 96 * 128, 96 * 128, 96 * 144]

    events = json.loads(trace.read_text())["traceEvents"]
    names = [[event["name"] for event in events if event["ph"] == "X" and event["pid"] == pid] for pid in (1, 2)]
    assert (
        names[0]
        == names[1]
        == [*PASSES] + [str(op) for timeline in step.measured.values() for op in timeline.schedule.ops]
    )
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert titles == [f"{kind}: {variant}, rank {step.rank}" for kind in ("predicted", "measured")]
    measured = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert max(event["ts"] + event["dur"] for event in measured) == pytest.approx(
        1e6 * sum(timeline.seconds for timeline in step.measured.values())
    )
    assert png.read_bytes().startswith(b"\x89PNG")


def test_mpmoe_s_pipeline(ranks, tmp_path):
    """Experts, host transfers and what is restored in backward are predicted as they ran."""
    profile, trace = tmp_path / "cluster.json", tmp_path / "step.json"
    host = {(Kind.OFFLOAD, None): CURVES[Kind.COPY, None], (Kind.PREFETCH, None): CURVES[Kind.COPY, None]}
    gemm = ExpertGemm(32, 8, "fp32", ((1, 1e-3), (100, 1e-1)), ((1, 3e-3), (100, 3e-1)))
    cluster = Cluster(World((0, 0, 1, 1), 2, 1, 2, 2), CURVES | host, {(Lane.INTER, Lane.D2H): 0.5}, expert_gemm=gemm)
    cluster.save(profile)
    options = {"dispatch_only": False, "ffn_hidden": 16, "profile": profile, "files": [trace]}
    steps = ranks.run(_run, variant="mpmoe:2:S2", **options)
    assert all(step == steps[0] for step in steps)
    step = steps[0]
    assert list(step.measured) == list(step.predicted) == ["forward", "backward"]
    for name, measured in step.measured.items():
        assert step.predicted[name].schedule == measured.schedule
    # Rows of 32 floats take an expert 1 ms each; a backward pass takes twice as long as a forward pass.
    multiply = {Kind.COMPUTE, Kind.GRADIENT}
    spans = {name: [span for span in step.predicted[name].spans if span.op.kind in multiply]
             for name in step.predicted}  # fmt: skip
    for name, milliseconds in ("forward", 1), ("backward", 2):
        rows = sum(span.op.size for span in spans[name]) / 128
        assert sum(span.end - span.start for span in spans[name]) == pytest.approx(milliseconds * 1e-3 * rows)
    kinds = {op.kind for timeline in step.measured.values() for op in timeline.schedule.ops}
    assert {Kind.GRADIENT, Kind.OFFLOAD, Kind.PREFETCH, Kind.ACTIVATE} <= kinds
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


def test_experts_that_travel_beside_a_pipeline_are_left_out(ranks, tmp_path):
    """The pipeline's own passes are shown."""
    profile, levels = tmp_path / "cluster.json", (4,)
    groups = realisable_groups(levels)
    roles = [(kind, profile_name(kind, levels, *one)) for kind in KINDS for one in groups]
    hops = dict.fromkeys(roles, ((1000, 1e-3),))
    copies = {(Kind.COPY, None): CURVES[Kind.COPY, None]}
    gemm = ExpertGemm(32, 16, "fp32", ((1, 1e-3), (100, 1e-1)), ((1, 3e-3), (100, 3e-1)))
    Cluster(World((0, 0, 0, 0), 1, 1, 4, 1), hops | copies, expert_gemm=gemm).save(profile)
    options = {"dispatch_only": False, "ffn_hidden": 16, "profile": profile, "tp": 1, "ep": 4, "expert_tp": 1}
    step = ranks.run(_run, variant="mpmoe:2:hops:2", **options)[0]
    assert list(step.measured) == list(step.predicted) == ["forward", "backward"]
    assert Lane.EXPERTS not in {lane for one in step.measured.values() for lane in one.schedule.lanes}
    # Rows of 32 floats take an expert 1 ms each, whosever it is.
    experts = [span for span in step.predicted["forward"].spans if span.op.kind is Kind.COMPUTE]
    rows = sum(span.op.size for span in experts) / 128
    assert rows and sum(span.end - span.start for span in experts) == pytest.approx(1e-3 * rows)


def test_the_rank_that_took_longest_or_the_one_asked_for(ranks, tmp_path):
    """There is no prediction without a profile."""
    trace = tmp_path / "step.json"
    slow = ranks.run(_run, variant="monta:O3x2", slow_rank=2, files=[trace])
    assert {step.rank for step in slow} == {2}
    assert all(timeline.seconds > 1000 for step in slow for timeline in step.measured.values())
    assert slow[0].predicted is None
    pids = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert pids == {1}
    asked = ranks.run(_run, variant="monta:O3x2", slow_rank=2, rank=1, files=[trace])
    assert {step.rank for step in asked} == {1}
    assert all(timeline.seconds < 1000 for step in asked for timeline in step.measured.values())


def _travelling(sizes, **compression):
    """A recorded step of a layer whose experts travel, and whether they hide behind anything here."""
    from megatron_moe_opt.cli.bench.recorded_step import record_step
    from megatron_moe_opt.options import Options
    from tests.multirank.test_expert_migration import slow_gathers
    from tests.ranks.layers import layer_with
    from tests.ranks.megatron import parallel

    settings = LayerSettings(
        dispatchers=(), tokens=48, hidden=32, ffn_hidden=16, experts=8, topk=2, tp=1, ep=4, expert_tp=1, dtype="fp32",
        routing="uniform", capacity_factor=None, pad_to_capacity=False, steps=1, warmup=0, seed=1,
    )  # fmt: skip
    options = Options(domain_sizes=sizes, network_levels=(2, 2), **compression)
    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        slow_gathers(patch)  # 20 or 40 ms a level
        layer = layer_with(settings, "expert-migration", options)
        layer.observed_step()  # in which compressed experts are whole: nobody has any of them yet
        return record_step(layer, 3, rank_device())


def test_experts_travel_beside_the_schedules(ranks):
    steps = ranks.run(_travelling, sizes=(2, 1))
    assert all(step == steps[0] for step in steps)
    hops, travels = ["hop out, level 1", "hop back, level 1"] * 2, ["experts gathered", "gradients returned"]
    names = [one.schedule.name for one in steps[0].timelines]
    assert names == [*hops, *(f"expert-migration, {name}" for name in travels)]
    out, back, gradients_out, gradients_back, gathered, returned = steps[0].timelines
    assert gathered.seconds > 0.02
    # Expert computation waits for the gather; gradients return beside the last hop of their pass.
    assert gathered.began + gathered.seconds < back.began
    assert gradients_out.began + gradients_out.seconds < min(returned.began, gradients_back.began)
    # Two experts of 2 x 32 x 16 numbers each, of two ranks.
    assert [op.size for one in (gathered, returned) for op in one.schedule.ops if op.group] == [2 * 2 * 4096] * 2
    joined = steps[0].joined("step")
    assert joined.schedule.lanes == (Lane.INTRA, Lane.COMPUTE, Lane.EXPERTS)
    assert len(joined.parts) == 4 and joined.seconds > sum(one.seconds for one in steps[0].schedules)
    (first, *_) = joined.lane(Lane.EXPERTS)
    began = gathered.began - min(out.began, gathered.began)
    assert first.start == pytest.approx(began + gathered.spans[0].start)


@pytest.mark.parametrize("ratio", [None, 4.0], ids=["whole", "compressed"])
def test_the_ops_that_ran_are_those_that_are_simulated(ranks, ratio):
    """The same schedules: equal, but for bytes that depend on the routing, or on what a codec leaves room for."""
    played = []

    def play(schedule, cost):
        played.append(schedule)
        return simulate(schedule, cost)

    coded = dict.fromkeys((Kind.ALL_GATHER, Kind.REDUCE_SCATTER), ratio) if ratio else {}
    layer = expert_migration.MigrationLayer.alone(48, 32, 2, 2, 8192, 8192, coded=coded)
    way = HopStages(2, (1,))
    ways = [tuple(outline(word, way).sized([HopBytes({1: 8})]) for word in ("hop out", "hop back"))] * 2
    passes = expert_migration.timelines(
        layer, ExpertDomains((2, 2), (2, 1)), ways, (1.0, 1.0), lambda op: 1.0, play
    )  # each hop is played before what travels beside it
    kinds = [[span.op.kind for span in one.spans if span.op.kind in KINDS] for one in passes]
    assert kinds == [[Kind.ALL_GATHER, *[Kind.ALL_TO_ALL] * 2], [*[Kind.ALL_TO_ALL] * 2, Kind.REDUCE_SCATTER]]
    compression = {"compression_ratio": ratio, "gradient_compression_ratio": ratio} if ratio else {}

    def comparable(schedule):
        is_known = ratio is None and Lane.EXPERTS in schedule.lanes
        return schedule if is_known else replace(schedule, ops=tuple(replace(op, size=0) for op in schedule.ops))

    for step in ranks.run(_travelling, sizes=(2, 1), **compression):
        ran = [comparable(timeline.schedule) for timeline in step.timelines]
        out, back, back_out, back_back, gathered, *decoded, returned = ran
        assert len(decoded) == (ratio is not None)
        assert list(map(comparable, played)) == [out, back, gathered, *decoded, back_out, back_back, returned]


def test_where_no_token_hops_only_experts_travel(ranks):
    (step, *_) = ranks.run(_travelling, sizes=(2, 2))
    assert {op.kind for one in step.schedules for op in one.schedule.ops} == {Kind.PERMUTE}
    *_, gathered, returned = step.timelines
    assert (len(gathered.spans), len(returned.spans)) == (2, 4)
    assert step.joined("step").schedule.lanes == (Lane.COMPUTE, Lane.EXPERTS)
    gathered = gathered.spans
    assert all(span.end - span.start > 0.02 for span in gathered) and gathered[0].end <= gathered[1].start
