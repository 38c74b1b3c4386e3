"""A variant has one predicted time, whoever asks: plan, drawings, choosers, benchmarks, `auto` and the report."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_moe_opt.planning.choosing.choice import choose, with_rows
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.systems import SYSTEMS, system_of
from megatron_moe_opt.systems.expert_migration import NAME as MIGRATION
from megatron_moe_opt.systems.expert_migration import fastest_domains
from megatron_moe_opt.systems.monta import MONTA
from megatron_moe_opt.systems.mpmoe import MPMOE
from megatron_moe_opt.systems.parm import PARM
from megatron_moe_opt.variants import split_variant
from tests.unit.test_planner import LAYER, cluster, migrating

LAYOUTS = {
    "EP 2, expert-TP 4": (LAYER, cluster()),
    "tokens that 4 TP ranks share": (dataclasses.replace(LAYER, tp=4), cluster()),
    "lanes that disturb each other, and partitions with a price": (
        LAYER,
        cluster(partition_overhead=0.1),
    ),
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
        assert choice.seconds == planned[f"{MIGRATION}:{'x'.join(map(str, choice.domains.sizes))}"].seconds


def test_a_choice_for_rows_is_that_for_the_tokens_that_make_them():
    for system in (MONTA, MPMOE):
        asked = [(system, system.open_options)]
        assert choose(asked, with_rows(LAYER, 2048), cluster()) == choose(asked, LAYER, cluster())


def test_every_system_that_is_planned_says_what_it_leaves_open():
    for system in SYSTEMS:
        if system.candidates is not None:
            names = {one.variant for one in system.candidates(LayerOnCluster(LAYER, cluster()), system.open_options)}
            assert names and all(name.startswith(system.name) for name in names)
