"""Configurations with a dispatcher of ours, and what they are refused."""

from __future__ import annotations

import re

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_moe_opt.errors import ConfigurationError

MOVES = {"expert_model_parallel_size": 2, "hidden_dropout": 0.0}
"""Settings under which samples may move."""


def config(name: str = "monta", config_class: type = TransformerConfig, **overrides):
    settings = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": name,
    }
    return config_class(**settings | overrides)


def refusal(match: str, **overrides):
    with pytest.raises(ConfigurationError, match=re.escape(match)) as caught:
        config(**overrides)
    assert "\n" not in str(caught.value)
