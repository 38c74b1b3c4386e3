"""A variant has one predicted time, to the last digit: in the planner, op by op, in a plan's file, in the report of a
benchmark and under `auto`.
"""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_moe_opt
from megatron_moe_opt.cli.layer.predicted import predict_layer
from megatron_moe_opt.cli.layer.settings import LayerSettings
from megatron_moe_opt.cli.routing.balance import RoutingBalance
from megatron_moe_opt.integration.auto.auto_layer import Seen, current_controller
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import OURS, Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.schedules.schedule import Lane
from tests.unit.test_planner import LAYER, NODES, cluster, migrating

ROWS = 1000.0
EVENLY = {"imbalance": 1.0, "rank_rows": (ROWS,) * 8}
DISTURBED = cluster(local_work={OURS: ((1, 0.01),)}, slowdown={(Lane.INTER, Lane.COMPUTE): 0.7})
CASES = {
    "expert-TP inside nodes": (LAYER, DISTURBED, {"alltoall", "monta", "parm", "mpmoe"}),
    "tokens that a TP group shares": (dataclasses.replace(LAYER, tp=4), DISTURBED, {"monta", "parm", "mpmoe"}),
    "EP alone": (*migrating(64), {"alltoall", "monta", "mpmoe", "expert-migration"}),
}


@pytest.fixture(params=CASES)
def case(request) -> tuple[LayerWorkload, Cluster, dict[str, float]]:
    layer, measured, families = CASES[request.param]
    layer = dataclasses.replace(layer, **EVENLY)
    found, _ = candidates(layer, measured)
    assert {one.family for one in found} == families
    for one in found:
        assert one.seconds == sum(timeline.seconds for timeline in one.timelines)
    return layer, measured, {one.variant: one.seconds for one in found}


def test_a_plan_has_them_as_they_were_predicted(case, tmp_path):
    layer, measured, seconds = case
    found, _ = candidates(layer, measured)
    Plan.uniform([1], ALLTOALL, found, "here", ep=layer.ep, etp=layer.etp, experts=8).save(tmp_path / "plan.json")
    assert {one.variant: one.seconds for one in Plan.load(tmp_path / "plan.json").candidates} == seconds


def test_the_report_of_a_benchmark_has_them(case):
    layer, measured, seconds = case
    settings = LayerSettings(
        tuple(seconds), layer.tokens, layer.hidden, layer.ffn * layer.etp, layer.experts, layer.topk,
        tp=4 if layer.etp > 1 else 1, ep=layer.ep, expert_tp=layer.etp, replicated=layer.tp > 1,
    )  # fmt: skip
    predicted = predict_layer(settings, layer.ep, RoutingBalance((), (int(ROWS),) * 8), NODES, measured)
    assert {name: predicted.seconds[name] for name in seconds} == seconds


def test_auto_goes_by_them(case, tmp_path):
    """Of layers that are alike, however many passes they had."""
    layer, measured, seconds = case
    measured.save(tmp_path / "cluster.json")
    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register(Options(profile=tmp_path / "cluster.json"))
    try:
        TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=4, num_moe_experts=8, moe_router_topk=2,
            tensor_model_parallel_size=4 if layer.etp > 1 else 1, sequence_parallel=layer.etp > 1 and layer.tp == 1,
            expert_model_parallel_size=layer.ep, expert_tensor_parallel_size=layer.etp, add_bias_linear=False,
            hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
            moe_token_dispatcher_type="auto",
        )  # fmt: skip
        seen = [[Seen(dataclasses.replace(layer, imbalance=1.0, rank_rows=()), ROWS, passes=3)]] * 8
        predicted, refused, planned = current_controller()._make_plan(seen)
    finally:
        megatron_moe_opt.register()
    tried = {one.variant: one.seconds for one in predicted}
    assert tried == {name: seconds[name] for name in tried} and planned in tried
    assert tried.keys() | {one.variant for one in refused} >= seconds.keys()
    assert len(tried) > len(seconds) / 2
