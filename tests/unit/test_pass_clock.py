"""What a pass's clock counts."""

from __future__ import annotations

import time

import torch

from megatron_moe_opt.runtime.pass_clock import PassClock

PAUSE = 0.02


class _Slow(torch.autograd.Function):
    """The identity, forward and backward after a pause."""

    @staticmethod
    def forward(ctx, rows):
        time.sleep(PAUSE)
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(PAUSE)
        return grad


def _forward(source, finished):
    clock = PassClock(source.device, finished)
    first = _Slow.apply(source)
    output = _Slow.apply(first)
    clock.forward_ends(output, first.grad_fn)
    return output


def test_forward_and_backward_from_end_to_end_and_nothing_between():
    source, finished = torch.ones(3, requires_grad=True), []
    before = _Slow.apply(source)  # not of the pass, nor is what comes behind it
    output = _Slow.apply(_forward(before, finished.append))
    time.sleep(10 * PAUSE)
    assert not finished
    output.sum().backward()
    (clock,) = finished
    assert 4 * PAUSE <= clock.seconds < 10 * PAUSE  # two each way; four more would be 8 pauses and the sleep


def test_passes_under_way_at_once_and_one_without_a_backward_pass():
    source, ended = torch.ones(3, requires_grad=True), []
    outputs = [_forward(source, lambda clock, number=number: ended.append((number, clock))) for number in range(3)]
    outputs[2].sum().backward()
    outputs[0].sum().backward()
    assert [number for number, _ in ended] == [2, 0]
    assert all(4 * PAUSE <= clock.seconds < 10 * PAUSE for _, clock in ended)
