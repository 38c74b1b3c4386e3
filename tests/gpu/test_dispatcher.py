"""One MoE layer on one GPU: `monta` and `mpmoe` against stock `alltoall`, within the numerics contract.

Not bit for bit as on CPU: on CUDA, stock's unpermute adds with atomics, in an order of its own.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_moe_opt.options import Options
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES

DROP = {"moe_expert_capacity_factor": 0.7}
PAD = DROP | {"moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 32}


def check(device, settings, dtype, dispatcher, options=None, tokens=128, steps=1):
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel():
        stock_config = moe_config(bf16=dtype == torch.bfloat16, **settings)
        configs = [stock_config, dataclasses.replace(stock_config, moe_token_dispatcher_type=dispatcher)]
        megatron_moe_opt.register(options)
        layers = [build_layer(config).to(device=device, dtype=dtype) for config in configs]
        megatron_moe_opt.register()
        layers[1].load_state_dict(layers[0].state_dict())
        inputs = torch.randn(tokens, 3, stock_config.hidden_size, device=device, dtype=dtype)
        grad = torch.randn_like(inputs)
        results = []
        for layer in layers:
            layer.set_layer_number(1)
            for _ in range(steps):
                layer.zero_grad()
                hidden = inputs.clone().requires_grad_()
                output, _ = layer(hidden)
                output.backward(grad)
            weights = {f"grad {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}
            results.append({"output": output.detach(), "input grad": hidden.grad} | weights)
    stock, ours = results
    assert set(stock) == set(ours) and any("router" in name for name in stock)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for name, expected in stock.items():
        error = (ours[name].float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
        assert error <= bound, f"{name}: {error.item():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"moe_router_topk": 5}, DROP, PAD, SHARED], ids=str)
def test_monta_equals_stock(one_rank, settings, dtype):
    check(one_rank, settings, dtype, "monta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_mpmoe_equals_stock(one_rank, partitions, strategy, dtype):
    """Several steps of many rows: what does not wait for another stream finds memory that is used again."""
    options = Options(partitions=partitions, memory_reuse=strategy)
    check(one_rank, {}, dtype, "mpmoe", options, tokens=8192, steps=5)
