"""What `tools.bench.choice --auto` measures beside what auto has tried."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_moe_opt.integration.auto import auto_layer
from megatron_moe_opt.integration.measuring import under_test as moe_layer
from megatron_moe_opt.planning.predicting.prediction import Prediction
from tools.bench.judged_systems import AutoChooser


def test_auto_is_held_against_the_best_of_every_system_but_none_that_is_hopeless(monkeypatch):
    predicted = {"mpmoe:2": 1.0, "mpmoe:3": 1.1, "mpmoe:4": 1.2, "monta:O1": 1.5, "alltoall": 2.0, "parm:S1": 3.1}
    found = tuple(Prediction(name, seconds, 0, 0, 0, 0) for name, seconds in predicted.items())
    trials = SimpleNamespace(times={"mpmoe:4": [0.9], "alltoall": [2.0]})
    controller = SimpleNamespace(turns=SimpleNamespace(alike=SimpleNamespace(predicted=found), trials=trials))
    monkeypatch.setattr(moe_layer, "layer_under_test", lambda *_: None)
    monkeypatch.setattr(auto_layer, "current_controller", lambda: controller)
    measured = AutoChooser().measured(None, None)
    assert measured == ("mpmoe:4", "alltoall", "mpmoe:2", "mpmoe:3", "monta:O1")
