"""What the package does where a script uses Megatron-Bridge, with modules in its place that have its functions."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration import bridge, registry
from megatron_moe_opt.integration.layer import ordered_experts
from tests.unit.config_cases import config

pytestmark = pytest.mark.usefixtures("registered")

# As in megatron-bridge 0.4.2 to 0.6.2, whose own checks these are.
SOURCES = {
    "comm_overlap": """
class CommOverlapConfig:
    overlap = True

    def setup(self, model_config, optimizer_config, ddp_config):
        assert model_config.moe_token_dispatcher_type in ["alltoall", "flex"]
        model_config.overlap_moe_expert_parallel_comm = self.overlap
""",
    "utils/moe_token_drop": """
def apply_moe_token_drop(model_provider, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True):
    assert model_provider.moe_token_dispatcher_type in ("alltoall", "alltoall_seq")
    model_provider.moe_expert_capacity_factor = moe_expert_capacity_factor
    return model_provider
""",
    "utils/train_utils": """
def training_log(loss_dict, total_loss_dict, config, global_state, history_wct, model, *, pg_collection=None):
    return "stock's"
""",
    "config": """
class ConfigContainer:
    def __init__(self, model):
        self.model = model

    def to_yaml(self, yaml_path):
        with open(yaml_path, "w") as file:
            file.write(self.model.moe_token_dispatcher_type)
""",
    "inprocess_restart": """
def maybe_wrap_for_inprocess_restart(train_fn, config, state):
    return train_fn, None
""",
}


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Returns a function that imports a module of `megatron.bridge.training`, which the package waits for."""
    folder = tmp_path / "megatron/bridge/training"
    for name, source in SOURCES.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if type(one).__name__ != "_AroundImport"])
    bridge.plug_into_bridge(registry.reading_as_alltoall)
    yield lambda name: importlib.import_module(f"megatron.bridge.training.{name}")
    for name in [one for one in sys.modules if one.startswith("megatron.bridge")]:
        del sys.modules[name]


def test_checks_of_names_take_ours_for_alltoall(training):
    ours = config("monta")
    training("comm_overlap").CommOverlapConfig().setup(ours, None, None)
    training("utils.moe_token_drop").apply_moe_token_drop(model_provider=ours, moe_expert_capacity_factor=2.0)
    assert (ours.overlap_moe_expert_parallel_comm, ours.moe_expert_capacity_factor) == (True, 2.0)
    assert ours.moe_token_dispatcher_type == "monta"


def test_checkpoints_can_be_loaded_without_the_package(training, tmp_path):
    """They have a file from which the model is made again; the one that a user asks for says what ran."""
    run = training("config").ConfigContainer(config("monta"))
    for name, said in (("run_config.yaml", "alltoall"), ("mine.yaml", "monta")):
        run.to_yaml(tmp_path / name)
        assert (tmp_path / name).read_text() == said
    assert run.model.moe_token_dispatcher_type == "monta"


def test_reports_follow_its_log(training, monkeypatch):
    told = []
    monkeypatch.setattr(bridge, "report", lambda *given: told.append(given))
    log = training("utils.train_utils").training_log
    for step in range(1, 5):
        state = SimpleNamespace(train_state=SimpleNamespace(step=step), tensorboard_logger="writer", wandb_logger=None)
        given = SimpleNamespace(logger=SimpleNamespace(log_interval=2))
        assert log({}, {}, given, state, [], [], pg_collection=None) == "stock's"
    assert told == [(2, "writer", None), (4, "writer", None)]


def test_a_start_anew_in_the_same_processes_is_refused(training):
    wrap = training("inprocess_restart").maybe_wrap_for_inprocess_restart
    for name, enabled in (("monta", False), ("alltoall", True)):
        state = SimpleNamespace(cfg=SimpleNamespace(model=config(name)))
        assert wrap("train", SimpleNamespace(enabled=enabled), state) == ("train", None)
    state = SimpleNamespace(cfg=SimpleNamespace(model=config("monta")))
    with pytest.raises(ConfigurationError, match="inprocess_restart.enabled begins a run anew in processes that"):
        wrap("train", SimpleNamespace(enabled=True), state)


def test_an_order_of_experts_is_refused(training, monkeypatch):
    """It copies weights of Hugging Face's into experts by their places."""
    order = SimpleNamespace(num_experts=4, ranks=2)
    monkeypatch.setattr(ordered_experts, "read_expert_order", lambda path: order)
    of_model = config("monta", num_moe_experts=4, expert_model_parallel_size=2)
    ordered_experts.check_expert_order(of_model, "order.json")
    training("comm_overlap")
    with pytest.raises(ConfigurationError, match="by which Megatron-Bridge copies weights from and to Hugging Face"):
        ordered_experts.check_expert_order(of_model, "order.json")


def test_a_layer_that_is_not_called_is_refused():
    class Gemma4MoELayer:
        def forward_with_separate_inputs(self) -> None: ...

    with pytest.raises(ConfigurationError, match="and a Gemma4MoELayer is run by forward_with_separate_inputs: use"):
        registry.check_is_called(Gemma4MoELayer, "monta")


def test_a_bridge_without_one_of_these_functions_is_left_alone(training, tmp_path):
    for name in SOURCES:
        (tmp_path / f"megatron/bridge/training/{name}.py").write_text("")
    for name in SOURCES:
        training(name.replace("/", "."))
