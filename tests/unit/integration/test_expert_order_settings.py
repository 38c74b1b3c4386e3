"""What a Megatron-LM command line must say about checkpoints where experts are in another order."""

from __future__ import annotations

import json
import sys
import types

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.ordered_experts import check_expert_order
from megatron_moe_opt.options import split_options

CONFIG = {"num_moe_experts": 4, "expert_model_parallel_size": 2, "moe_grouped_gemm": False, "mtp_num_layers": None}
CONFIG |= {"fp8": None, "fp4": None, "quant_recipe": None, "use_cpu_initialization": False}
ARGUMENTS = {"save": "checkpoints", "ckpt_format": "torch_dist", "non_persistent_ckpt_type": None}
ARGUMENTS |= {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a configuration and command line that are good but for the changes."""
    path = tmp_path / "order.json"
    order = {"format": "moe-opt expert order", "version": 1, "num_experts": 4, "nodes": 1, "ranks": 2}
    path.write_text(json.dumps(order | {"layers": {"1": [[0, 3], [2, 1]]}}))

    def check(config=None, **arguments):
        module = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(**ARGUMENTS | arguments))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
        check_expert_order(types.SimpleNamespace(**CONFIG | (config or {})), path)

    return check


def test_good_settings_pass(check):
    check()
    check(save=None, ckpt_format="torch")
    check(use_distributed_optimizer=False, dist_ckpt_optim_fully_reshardable=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ckpt_format": "torch"}, "can be saved by --ckpt-format torch_dist only"),
        ({"non_persistent_ckpt_type": "local"}, "without --non-persistent-ckpt-type local"),
        ({"dist_ckpt_optim_fully_reshardable": False}, "add --dist-ckpt-optim-fully-reshardable"),
        (
            {
                "dist_ckpt_optim_fully_reshardable": False,
                "use_distributed_optimizer": False,
                "use_layer_wise_distributed_optimizer": True,  # Muon's
            },
            "add --dist-ckpt-optim-fully-reshardable",
        ),
        ({"save": None, "save_wgrads_interval": 100}, "by which --save-wgrads-interval names what it keeps"),
        ({"save_activations_interval": 100}, "by which --save-activations-interval names what it keeps"),
        ({"moe_routing_trace_path": "folder"}, "by which --moe-routing-trace-path names what it keeps"),
        ({"config": {"mtp_num_layers": 1}}, "does not work with --mtp-num-layers"),
        ({"config": {"fp8": "hybrid"}}, "does not work with --fp8-format"),
        (
            {"config": {"quant_recipe": object()}},
            "not work with --te-precision-config-file or --kitchen-config-file",
        ),
        ({"config": {"use_cpu_initialization": True}}, "does not work with --use-cpu-initialization"),
    ],
)
def test_others_are_refused(check, changes, problem):
    with pytest.raises(ConfigurationError, match=rf"--moe-opt-expert-order .*order.json .*{problem}") as refused:
        check(**changes)
    assert "\n" not in str(refused.value)


def test_the_option_is_ours(tmp_path):
    options, rest = split_options(["--moe-opt-expert-order", str(tmp_path / "order.json"), "--lr", "1"])
    assert options.expert_order == tmp_path / "order.json" and rest == ["--lr", "1"]
