"""`moe-opt bench -o` and its page on 4 ranks, ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from megatron_moe_opt.cli.bench.measured_layer import conditions, times_table, traffic_table
from megatron_moe_opt.cli.bench.saved_report import read_report
from megatron_moe_opt.cli.report.page import render_page
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.commands import CURVES, group_of_the_pool
from tests.unit.report_cases import Page


def _run(settings, json_file):
    """The command on this pool's ranks."""
    from megatron_moe_opt.cli.bench import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "megatron_process_group", group_of_the_pool)
        patch.setattr("megatron_moe_opt.cli.bench.links.PROBE_MAX_BYTES", 2**16)  # rates are not looked at here
        patch.setitem(os.environ, "GROUP_RANK", str(dist.get_rank() // 2))
        return run.bench_layer(settings, json_file)


def test_the_page_of_a_run(ranks, tmp_path):
    profile, json_file = tmp_path / "cluster.json", tmp_path / "layer.json"
    curves = CURVES | {(Kind.ALL_TO_ALL, JOINT_GROUP): CURVES[Kind.ALL_TO_ALL, "ep"]}
    gemm = ExpertGemm(32, 32, "fp32", ((16, 1e-4), (64, 3e-4)))
    Cluster(World((0, 0, 1, 1), tp=2, ep=2, expert_tp=2), curves, expert_gemm=gemm).save(profile)
    settings = LayerSettings(
        dispatchers=("monta:O3x2", "mpmoe:2", "deepspeed"),
        tokens=24,
        hidden=32,
        ffn_hidden=64,
        experts=4,
        topk=2,
        tp=2,
        ep=2,
        expert_tp=2,
        dtype="fp32",
        routing="zipf",
        capacity_factor=None,
        pad_to_capacity=False,
        steps=2,
        warmup=1,
        seed=1,
        profile=profile,
    )
    report, *others = ranks.run(_run, settings=settings, json_file=json_file)

    # What is not of one rank is the same on all: the page could be any rank's.
    for other in others:
        assert (other.balance, other.predicted, other.recorded) == (report.balance, report.predicted, report.recorded)
    assert sum(report.balance.of_expert) == 4 * 24 * 2
    shards = report.balance.of_rank
    assert shards[0] == shards[1] == sum(report.balance.of_expert[:2]) and shards[2] == shards[3]
    assert list(report.predicted.seconds) == ["alltoall", "monta:O3x2", "mpmoe:2"]
    assert list(report.predicted.missing) == ["deepspeed"]
    schedules = {name: len(step.timelines) for name, step in report.recorded.items()}
    assert (schedules["alltoall"], schedules["monta:O3x2"], schedules["mpmoe:2"]) == (0, 4, 2)
    monta = report.recorded["monta:O3x2"].timelines
    assert all(len(timeline.schedule.lanes) == 3 and timeline.seconds > 0 for timeline in monta)

    read = read_report(json_file)
    assert (read.settings, read.results, read.recorded) == (report.settings, report.results, report.recorded)
    page = Page(render_page(read))
    for table in (times_table(report), traffic_table(report)):
        for row in table.rows:
            assert any(page.cells[place : place + len(row)] == list(row) for place in range(len(page.cells))), row
    assert set(conditions(report)) <= set(page.texts)
    # The whole layer of every dispatcher: the stages hold all that its schedules do.
    for step in report.recorded.values():
        assert [one.direction for one in step.stages] == ["forward", "backward"]
        assert step.seconds > sum(one.seconds for one in step.schedules)
        assert all(one.begin <= one.exchange_begin <= one.exchange_end <= one.end for one in step.stages)
    ops = sum(len(step.whole(name).spans) for name, step in report.recorded.items())
    assert sum(" of chunk " in text and " ms" in text for text in page.texts) == ops > 0
    assert (read.predicted, read.balance) == (report.predicted, report.balance)
