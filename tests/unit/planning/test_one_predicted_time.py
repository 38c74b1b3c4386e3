"""A variant has one predicted time, to the last digit: in the planner, op by op, in a plan's file, in the report of a
benchmark, for the choosers and under `auto`.
"""

from __future__ import annotations

import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_moe_opt
from megatron_moe_opt.cli.bench.balance import RoutingBalance
from megatron_moe_opt.cli.bench.predicted import predict_layer
from megatron_moe_opt.integration.auto.auto_layer import current_controller
from megatron_moe_opt.integration.auto.first_step import FirstStep, Seen
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.choice import choose, with_rows
from megatron_moe_opt.planning.costs.cluster import OURS, Cluster
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.schedules.schedule import Lane
from megatron_moe_opt.systems import SYSTEMS, system_of
from megatron_moe_opt.systems.expert_migration import NAME as MIGRATION
from megatron_moe_opt.systems.expert_migration import fastest_domains, setting_of
from megatron_moe_opt.systems.monta import MONTA
from megatron_moe_opt.systems.mpmoe import MPMOE
from megatron_moe_opt.systems.parm import PARM
from megatron_moe_opt.variants import split_variant
from tests.unit.planning.test_planner import LAYER, NODES, cluster, migrating

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
    Plan({1: ALLTOALL}, found, "here", layer.ep, layer.etp, experts=8).save(tmp_path / "plan.json")
    assert {one.variant: one.seconds for one in Plan.load(tmp_path / "plan.json").candidates} == seconds


def test_the_report_of_a_benchmark_has_them(case):
    layer, measured, seconds = case
    settings = LayerSettings(
        tuple(seconds), layer.tokens, layer.hidden, layer.ffn * layer.etp, layer.experts, layer.topk,
        tp=4 if layer.etp > 1 else 1, ep=layer.ep, expert_tp=layer.etp, replicated=layer.tp > 1,
    )  # fmt: skip
    predicted = predict_layer(settings, RoutingBalance((), (int(ROWS),) * 8), NODES, measured)
    assert {name: predicted.seconds[name] for name in seconds} == seconds


def test_auto_goes_by_them(case, tmp_path):
    """It does for layers that are alike, however many passes they had."""
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
        seen = (Seen(dataclasses.replace(layer, imbalance=1.0, rank_rows=()), ROWS, passes=3),)
        (alike,) = current_controller()._make_plan(FirstStep((seen,) * 8))
    finally:
        megatron_moe_opt.register()
    tried = {one.variant: one.seconds for one in alike.predicted}
    assert tried == {name: seconds[name] for name in tried} and alike.planned in tried
    assert tried.keys() | {one.variant for one in alike.refused} >= seconds.keys()
    assert len(tried) > len(seconds) / 2


LAYOUTS = {
    "EP 2, expert-TP 4": (LAYER, cluster()),
    "tokens that 4 TP ranks share": (dataclasses.replace(LAYER, tp=4), cluster()),
    "EP 8 over two levels": migrating(64),
    "placed samples": (dataclasses.replace(LAYER, placement_saving=0.4), cluster()),
    "a capacity": (dataclasses.replace(LAYER, capacity_factor=1.25), cluster()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_variant_has_one_predicted_time(layout):
    layer, measured = LAYOUTS[layout]
    planned = {one.variant: one for one in candidates(layer, measured)[0]}
    assert len(planned) > 5
    for variant, one in planned.items():
        assert sum(one.terms.values()) == pytest.approx(one.seconds, rel=1e-12)
        assert sum(timeline.seconds for timeline in one.timelines) == pytest.approx(one.seconds, rel=1e-9)  # drawn
        if variant == ALLTOALL:
            continue
        system, (_, options) = system_of(variant), split_variant(variant, None)
        alone = {each.variant: each for each in system.candidates(LayerOnCluster(layer, measured), options)}
        assert alone[variant] == one  # of a layer whose options name it: to the last digit
    for system in (MONTA, PARM, MPMOE):
        own = [one for one in planned.values() if one.family == system.name]
        if own:
            choice = choose([(system, system.open_options)], layer, measured)
            assert {one.variant: one.seconds for one in choice.among} == {one.variant: one.seconds for one in own}
    if any(one.family == MIGRATION for one in planned.values()):
        choice = fastest_domains(layer, measured)
        assert choice.seconds == planned[f"{MIGRATION}:{setting_of(choice.domains.sizes, choice.chunks)}"].seconds


def test_a_choice_for_rows_is_that_for_the_tokens_that_make_them():
    for system in (MONTA, MPMOE):
        asked = [(system, system.open_options)]
        assert choose(asked, with_rows(LAYER, 2048), cluster()) == choose(asked, LAYER, cluster())


def test_every_system_that_is_planned_says_what_it_leaves_open():
    for system in SYSTEMS:
        if system.candidates is not None:
            names = {one.variant for one in system.candidates(LayerOnCluster(LAYER, cluster()), system.open_options)}
            assert names and all(name.startswith(system.name) for name in names)
