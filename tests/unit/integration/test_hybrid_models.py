"""Hybrid models, whose MoE layers a pattern says: which these are, who speaks of them, and which plans they take.

Their layers need Transformer Engine, so that none is built here.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration import announce
from megatron_moe_opt.integration.auto.given_plan import read_plan
from megatron_moe_opt.integration.layer.configured_workload import layer_workload, moe_layers
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.plan_file import Plan
from tests.unit.config_cases import config, refusal

pytestmark = pytest.mark.usefixtures("registered")

PATTERN = "M-M*|MEME/ME/ME"
"""Two pipeline stages, of which the second has the MoE layers 6 and 8, and two depths of multi-token prediction."""


@pytest.fixture
def given(monkeypatch):
    """Has Megatron-LM's arguments say a pattern; None: another training loop."""

    def given(pattern: str | None, flag: str = "hybrid_layer_pattern") -> None:
        arguments = None if pattern is None else SimpleNamespace(**{flag: pattern})
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))

    return given


def hybrid(name: str = "monta", **overrides: Any) -> Any:
    return config(name, num_layers=8, is_hybrid_model=True, **overrides)


def test_the_pattern_says_which_layers_have_experts(given):
    given(PATTERN)
    assert moe_layers(hybrid()) == [6, 8]
    given("*E" * 4, "hybrid_override_pattern")  # before 0.17, where the configuration need not say that it is hybrid
    assert moe_layers(hybrid()) == moe_layers(config(num_layers=8)) == [2, 4, 6, 8]
    given(None)
    assert moe_layers(hybrid()) is None and moe_layers(config(num_layers=8)) == [*range(1, 9)]


@pytest.mark.parametrize(("pattern", "part"), [(PATTERN, 1.0), ("MEMEMEME", 0.5), (None, 0.25)])
def test_experts_that_stay_are_a_part_of_the_layers_that_have_some(given, pattern, part):
    given(pattern)
    groups = SimpleNamespace(ep_size=1, etp_size=1)
    made = hybrid(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    assert layer_workload(made, groups, resident=1).resident_part == part


@pytest.mark.parametrize(
    ("pattern", "number", "speaks"), [(PATTERN, 6, True), (PATTERN, 8, False), (None, 6, True), (None, 8, True)]
)
def test_the_stage_of_the_first_moe_layer_speaks_or_each_where_that_is_not_known(
    given, monkeypatch, capsys, pattern, number, speaks
):
    monkeypatch.setattr(announce, "is_first_rank", lambda: False)
    monkeypatch.setattr(announce, "_is_first_of_stage", lambda: True)
    given(pattern)
    layer = torch.nn.Identity()
    layer.layer_number, layer.config = number, hybrid()
    dispatcher = SimpleNamespace(groups=SimpleNamespace(ep_size=2, etp_size=1), describe=lambda: "it")
    announce.announce(layer, "monta", dispatcher, Options())
    layer(torch.zeros(1))
    said = f"moe-opt: MoE layer {number}: dispatcher monta (it; EP 2, expert-TP 1); chosen by"
    assert capsys.readouterr().out.startswith(said) == speaks


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        (PATTERN, {1: "monta:O1", 2: "monta:O1"}),  # as moe-opt plan numbers the layers of a model with two
        (PATTERN, {6: "monta:O1", 8: "mpmoe:2"}),
        (None, {1: "monta:O1", 2: "mpmoe:2"}),  # held against the layers when they run
    ],
)
def test_a_plan_of_as_many_layers_is_taken(given, tmp_path, pattern, layers):
    given(pattern)
    file = tmp_path / "plan.json"
    Plan(layers, (), "a cluster", ep=1, etp=1, experts=4).save(file)
    assert read_plan(file, hybrid()).layers == layers


@pytest.mark.parametrize("layers", [dict.fromkeys(range(1, 9), "monta:O1"), {1: "monta:O1", 2: "mpmoe:2"}])
def test_a_plan_of_other_layers_is_refused(given, tmp_path, layers):
    given(PATTERN)
    file = tmp_path / "plan.json"
    Plan(layers, (), "a cluster", ep=1, etp=1, experts=4).save(file)
    with pytest.raises(ConfigurationError, match="and this one's are 6, 8: make a plan"):
        read_plan(file, hybrid())


@pytest.mark.parametrize("name", ["monta", "alltoall"])
def test_telemetry_needs_layers_of_numbers_of_their_own(name):
    """Layers of multi-token prediction begin at 1 again there."""
    hybrid(name, mtp_num_layers=2)
    megatron_moe_opt.register(Options(telemetry=True))
    try:
        config(name, mtp_num_layers=2), hybrid(name)
        refusal("--mtp-num-layers 2 (what follows / in", name=name, is_hybrid_model=True, mtp_num_layers=2)
    finally:
        megatron_moe_opt.register()
