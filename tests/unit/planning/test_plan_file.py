"""plan.json: comes back as it was written; anything else is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.plan_file import Plan, facts_of_plan
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction

CANDIDATES = (
    Prediction("mpmoe:2", 1e-3, 5e-4, 1e6, 2e6, 4096, {"pipeline with experts": 1e-3}),
    Prediction("alltoall", 2e-3, 1e-3, 1e6, 2e6, 4096),
)
RUN = {
    "hidden": 32, "ffn": 64, "topk": 2, "dtype": "bf16", "ranks": 8, "tokens": 4096, "version": "0.1.0",
    "overlaps": False,
}  # fmt: skip
PLAN = Plan({4: "mpmoe:2", 5: "monta:O2x4"}, CANDIDATES, "a cluster", ep=8, etp=1, experts=64)


def test_comes_back(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with_settings = replace(PLAN, gpu_settings={"NCCL_ALGO": "Ring"}, made_for=facts_of_plan(**RUN))
    with_settings.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == with_settings


def test_what_is_of_others_experts_comes_back_and_older_plans_do_not_say(tmp_path):
    of_others = replace(CANDIDATES[1], held_more=HeldMore(of_pass=5, at_work=6, of_others=7))
    replace(PLAN, candidates=(of_others,)).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").candidates[0].held_more == HeldMore(of_others=7)
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["candidates"][0]["of_others"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json").candidates[0].held_more == HeldMore()


def test_it_says_what_a_layer_runs():
    assert PLAN.variant_of(5, "plan.json") == "monta:O2x4"


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


ASKED = {"ep": 8, "etp": 1, "experts": 64, "layers": [4, 5]}


def test_a_layer_or_sizes_that_were_not_planned_are_refused():
    with pytest.raises(ConfigurationError, match="has no MoE layer 7 .it has 4 to 5."):
        PLAN.variant_of(7, "plan.json")
    made = replace(PLAN, made_for=facts_of_plan(**RUN))
    assert made.check("plan.json", **ASKED, made_for=facts_of_plan(**RUN)) is None
    for changed, flag in (
        ({"ep": 4}, "--expert-model-parallel-size 4"),
        ({"etp": 2}, "--expert-tensor-parallel-size 2"),
        ({"experts": 8}, "--num-experts 8"),
        ({"hidden": 64}, "--hidden-size 64"),
        ({"ffn": 128}, "--moe-ffn-hidden-size 128"),
        ({"topk": 4}, "--moe-router-topk 4"),
    ):
        asked = {name: changed.get(name, value) for name, value in ASKED.items()}
        run = {name: changed.get(name, value) for name, value in RUN.items()}
        with pytest.raises(ConfigurationError, match=f"{flag} is not what --moe-opt-plan plan.json was made for"):
            made.check("plan.json", **asked, made_for=facts_of_plan(**run))


@pytest.mark.parametrize(("layers", "said"), [([4, 5, 6, 7], "4 to 7"), ([1, 2], "1, 2"), ([4], "4")])
def test_a_plan_of_other_layers_is_refused(layers, said):
    with pytest.raises(ConfigurationError, match=f"whose MoE layers are 4, 5, and this one's are {said}: make"):
        PLAN.check("plan.json", **ASKED | {"layers": layers}, made_for=facts_of_plan(**RUN))


def test_what_predictions_may_not_hold_for_is_said():
    run = RUN | {"dtype": "fp32", "ranks": 16, "tokens": 2048, "version": "0.2.0", "overlaps": True}
    made = replace(PLAN, made_for=facts_of_plan(**RUN))
    assert made.check("plan.json", **ASKED, made_for=facts_of_plan(**run)) == (
        "type of the rows fp32 (there bf16), ranks 16 (there 8), tokens of a rank 2048 (there 4096), megatron-moe-opt "
        "0.2.0 (there 0.1.0), --overlap-moe-expert-parallel-comm given (there not given)"
    )
    unknown = facts_of_plan(**RUN | {"tokens": None})
    assert made.check("plan.json", **ASKED, made_for=unknown) is None
    assert replace(PLAN, made_for=unknown).check("plan.json", **ASKED, made_for=facts_of_plan(**RUN)) is None
    assert PLAN.check("plan.json", **ASKED, made_for=facts_of_plan(**run)) is None  # nothing is known of it
