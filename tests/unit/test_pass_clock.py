"""What a pass's clock counts."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt.runtime.engine.pass_clock import PassClock
from megatron_moe_opt.runtime.observed.layer_pass import HostClock


@pytest.fixture
def host(monkeypatch):
    """A host whose time passes where the tests say."""
    time = [0.0]
    monkeypatch.setattr(HostClock, "now", staticmethod(lambda: time[0]))
    return time


class _Takes(torch.autograd.Function):
    """The identity, which takes so many seconds forward, and twice as many backward."""

    @staticmethod
    def forward(ctx, rows, host, seconds):
        ctx.host, ctx.seconds = host, seconds
        host[0] += seconds
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.host[0] += 2 * ctx.seconds
        return grad, None, None


def _forward(source, host, finished):
    clock = PassClock(source.device, finished)
    first = _Takes.apply(source, host, 1)
    output = _Takes.apply(first, host, 10)
    clock.forward_ends(output, first.grad_fn)
    return output


def test_forward_and_backward_from_end_to_end_and_nothing_between(host):
    source, finished = torch.ones(3, requires_grad=True), []
    before = _Takes.apply(source, host, 100)  # not of the pass, nor is what comes behind it
    output = _Takes.apply(_forward(before, host, finished.append), host, 1000)
    host[0] += 10000
    assert not finished
    output.sum().backward()
    (clock,) = finished
    assert clock.seconds == 33


def test_passes_under_way_at_once_and_one_without_a_backward_pass(host):
    source, ended = torch.ones(3, requires_grad=True), []
    outputs = [
        _forward(source, host, lambda clock, number=number: ended.append((number, clock))) for number in range(3)
    ]
    outputs[2].sum().backward()
    outputs[0].sum().backward()
    assert [number for number, _ in ended] == [2, 0]
    assert all(clock.seconds == 33 for _, clock in ended)
