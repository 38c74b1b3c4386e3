"""Latency, throughput and MFU of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.step_costs import StepCosts
from megatron_moe_opt.planning.training.throughput import GpuSpeed, flops_per_token, throughput
from megatron_moe_opt.topology.layouts import Layout

MIXTRAL = ModelShape(32, 4096, 32, 32000, 8, 2, 14336, kv_heads=8)
A800 = GpuSpeed(312e12, 0.5)


def test_flops_per_token():
    # 6 times 12.75 billion elements, and 32 layers of 4096 causal tokens of 4096 query elements.
    assert MIXTRAL.active_matrices == 32 * (4096 * 10240 + 8 * 4096 + 2 * 3 * 4096 * 14336) + 4096 * 32000
    assert flops_per_token(MIXTRAL, 4096) == 6 * MIXTRAL.active_matrices + 6 * 32 * 4096 * 4096


def test_without_exchange_mfu_is_the_efficiency():
    found = throughput(MIXTRAL, Layout(16, tp=8, ep=2), A800, 1, 8192, 4, exchange_seconds=0.0)
    assert found.mfu == pytest.approx(0.5, rel=1e-12)
    assert found.step_seconds == pytest.approx(4 * 8192 * flops_per_token(MIXTRAL, 8192) / 8 / 156e12)
    assert found.tokens_per_second == pytest.approx(156e12 / flops_per_token(MIXTRAL, 8192))


def test_exchange_adds_to_every_layer_and_micro_batch():
    def step(seconds):
        return throughput(MIXTRAL, Layout(16, tp=8, ep=2), A800, 1, 8192, 4, seconds)

    fast, slow = step(0.0), step(1e-3)
    assert slow.step_seconds - fast.step_seconds == pytest.approx(4 * 32 * 1e-3)
    assert slow.mfu / fast.mfu == pytest.approx(fast.step_seconds / slow.step_seconds)
    assert slow.tokens_per_second / fast.tokens_per_second == pytest.approx(fast.step_seconds / slow.step_seconds)


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_experts_that_run_in_the_exchange_are_counted_once(dense_layers):
    model, parallel = replace(MIXTRAL, dense_layers=dense_layers, dense_ffn=4096), Layout(32, tp=8, pp=2, cp=2, ep=2)
    experts = 3 * 2 * 8192 * (3 * 4096 * 2 * 14336) / (8 * 2) / 156e12  # forward and backward of a GPU's part
    apart, within = (
        throughput(model, parallel, A800, 1, 8192, 4, seconds, with_experts=with_experts)
        for seconds, with_experts in ((1e-3, False), (1e-3 + experts, True))
    )
    numbers = [(one.step_seconds, one.mfu, one.tokens_per_second) for one in (within, apart)]
    assert numbers[0] == pytest.approx(numbers[1])


def test_a_pipeline_has_a_bubble():
    def step(micro_batches):
        return throughput(MIXTRAL, Layout(32, tp=8, pp=4), A800, 1, 8192, micro_batches, 1e-3)

    assert step(1).step_seconds * 19 == pytest.approx(step(16).step_seconds * 4)
    assert step(1).mfu == pytest.approx(step(16).mfu / 16 * 19 / 4)


def test_layers_add_up_to_the_step_but_for_the_logits():
    found = throughput(MIXTRAL, Layout(16, tp=8, ep=2), A800, 1, 8192, 1, 1e-3)
    layer = 6 * 8192 * (MIXTRAL.layer_matrices() + 8192 * MIXTRAL.query_size) / 8 / 156e12 + 1e-3
    logits = 6 * 8192 * 4096 * 32000 / 8 / 156e12
    assert 32 * layer + logits == pytest.approx(found.step_seconds, rel=1e-12)


def test_what_is_recomputed_comes_again():
    """In full: a third of what layers compute, half of what they communicate, no logits, nothing between stages."""
    model, parallel = replace(MIXTRAL, layers=2), Layout(16, tp=8, ep=2)
    besides = StepCosts(block=1.0, between_stages=10.0)

    def step(recompute):
        return throughput(model, parallel, A800, 1, 8192, 1, 1e-3, False, besides, recompute, 4e-4).step_seconds

    attention = 6 * 8192 * 8192 * MIXTRAL.query_size / 8 / 156e12
    layer = 6 * 8192 * MIXTRAL.layer_matrices() / 8 / 156e12 + attention
    assert step("full") - step("none") == pytest.approx(2 * (layer / 3 + 4e-4 + 0.5))
    assert step("selective") - step("none") == pytest.approx(2 * attention / 3)


@pytest.mark.parametrize("device", [GpuSpeed(0, 0.5), GpuSpeed(1e12, 0), GpuSpeed(1e12, 1.5)])
def test_refuses_devices_that_are_none(device):
    with pytest.raises(ValueError, match="is not a device"):
        throughput(MIXTRAL, Layout(8), device, 1, 128, 1, 0.0)
