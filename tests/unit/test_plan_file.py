"""plan.json: comes back as it was written; anything else is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.prediction import Prediction

CANDIDATES = (
    Prediction("mpmoe:2", 1e-3, 5e-4, 1e6, 2e6, 4096, {"pipeline with experts": 1e-3}),
    Prediction("alltoall", 2e-3, 1e-3, 1e6, 2e6, 4096),
)
PLAN = Plan({4: "mpmoe:2", 5: "monta:O2x4"}, CANDIDATES, "a cluster", ep=8, etp=1, experts=64)


def test_comes_back(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with_settings = replace(PLAN, gpu_settings={"NCCL_ALGO": "Ring"})
    with_settings.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == with_settings


def test_uniform_names_every_layer():
    plan = Plan.uniform([2, 3], "mpmoe:2", CANDIDATES, "a cluster", ep=8, etp=1, experts=64)
    assert plan.layers == {2: "mpmoe:2", 3: "mpmoe:2"}
    assert plan.variant_of(3, "plan.json") == "mpmoe:2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "a shopping list"}, "not a file of moe-opt plan"),
        ({"version": 99}, "version 99 cannot be read"),
        ({"layers": {}}, "a plan needs at least one"),
        ({"layers": {"first": "mpmoe:2"}}, 'layers.first: "first" is not the number of a layer'),
        ({"layers": {"1": 7}}, "layers.1: 7 is not a string"),
        ({"ep": 0}, "ep: 0 is not an integer of at least 1"),
        ({"candidates": [{"variant": "mpmoe:2"}]}, "seconds is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    PLAN.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text()) | change
    (tmp_path / "plan.json").write_text(json.dumps(content, indent=2))
    with pytest.raises(ConfigurationError) as refused:
        Plan.load(tmp_path / "plan.json")
    assert message in str(refused.value) and str(tmp_path / "plan.json") in str(refused.value)


def test_a_layer_or_sizes_that_were_not_planned_are_refused():
    with pytest.raises(ConfigurationError, match="has no MoE layer 7 .it has 4 to 5."):
        PLAN.variant_of(7, "plan.json")
    PLAN.check("plan.json", ep=8, etp=1, experts=64)
    for changed, flag in (
        ({"ep": 4}, "--expert-model-parallel-size 4"),
        ({"etp": 2}, "--expert-tensor-parallel-size 2"),
        ({"experts": 8}, "--num-experts 8"),
    ):
        with pytest.raises(ConfigurationError, match=f"{flag} is not what --moe-opt-plan"):
            PLAN.check("plan.json", **{"ep": 8, "etp": 1, "experts": 64} | changed)
