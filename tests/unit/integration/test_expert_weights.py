"""Parameters of experts that travel are those that a layer was built with."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.expert_migration_layer import _finish_parameter_sync, _is_synchronized_late
from megatron_moe_opt.runtime.travelling_experts.expert_weights import ExpertWeights


@pytest.mark.parametrize("change", ["adds", "renames"])
def test_adapters_of_a_layer_that_was_built_are_refused(change):
    experts = torch.nn.Sequential(torch.nn.Linear(4, 2))
    weights = ExpertWeights(experts, lambda name: 0)
    assert weights.current().numel() == weights.numel
    if change == "adds":
        experts.append(torch.nn.Linear(2, 4))
    else:
        experts[0] = torch.nn.Sequential(experts[0])
    name = "1.bias" if change == "adds" else "0.0.bias"
    with pytest.raises(ConfigurationError, match=f"--moe-opt-domain-sizes: .* and {name} was added or renamed"):
        weights.current()


def test_experts_that_share_a_parameter_are_refused():
    shared = torch.nn.PReLU()
    experts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 2), shared) for _ in range(2))
    with pytest.raises(ConfigurationError, match="several experts of a rank share the parameter 1.1.weight"):
        ExpertWeights(experts, lambda name: int(name[0]))
    assert ExpertWeights(experts[:1], lambda name: 0).numel


def test_of_hooks_on_experts_only_those_of_megatrons_ddp_are_called_to_wait_for_weights():
    """Others read the inputs of a pass, and there is none."""
    experts, waited = torch.nn.Sequential(torch.nn.Linear(4, 2)), []
    group = SimpleNamespace(finish_param_sync=lambda **_: waited.append(group))
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    vars(ddp).update(
        use_forward_hook=True,
        param_to_bucket_group=dict.fromkeys(experts.parameters(), group),
        ddp_config=SimpleNamespace(align_param_gather=False),
        overlap_param_gather_with_optimizer_step=False,
    )
    experts[0].register_forward_pre_hook(lambda _, inputs: inputs[0] * 2)
    experts[0].register_forward_pre_hook(functools.partial(lambda _, __, inputs: inputs[0] * 2, None))
    experts.register_forward_pre_hook(lambda _, inputs, named: (inputs, named | {}), with_kwargs=True)
    _finish_parameter_sync(experts)
    assert not _is_synchronized_late(experts)
    experts[0].register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(ddp))
    _finish_parameter_sync(experts)
    assert _is_synchronized_late(experts) and waited == [group] * 2  # a weight and a bias
