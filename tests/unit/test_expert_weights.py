"""Parameters of experts that travel are those that a layer was built with."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
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
