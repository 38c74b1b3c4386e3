"""MoE layers on the ranks of the pool."""

from __future__ import annotations

import torch

import megatron_moe_opt
from megatron_moe_opt.integration.layer.moe_layer import build_layer
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.integration.measuring.under_test import LayerUnderTest, layer_config
from megatron_moe_opt.options import Options


def layer_with(settings: LayerSettings, dispatcher: str, ep: int, options: Options) -> LayerUnderTest:
    """The benchmark's layer with options that no variant's name says, routed by its own router; inside `parallel`."""
    megatron_moe_opt.register(options)
    layer = build_layer(layer_config(settings, dispatcher, ep))
    megatron_moe_opt.register()
    tokens, output_grad = (torch.randn(settings.tokens, 1, settings.hidden) for _ in range(2))
    return LayerUnderTest(layer, tokens.requires_grad_(), output_grad)
