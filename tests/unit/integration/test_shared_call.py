"""Shared experts in halves, whose tensors Megatron keeps in the module between its steps."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.integration.layer.shared_halves import halves_of
from megatron_moe_opt.runtime.through_experts.shared_call import SharedCall


class Shared(torch.nn.Module):
    """The steps of Megatron's SharedExpertMLP, or of its FusedSharedExpertMLP, whose first one is both products."""

    stream = SimpleNamespace(wait_stream=lambda stream: None)

    def __init__(self, fused: bool, grouped: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(moe_grouped_gemm=grouped)
        self.fused, self.fc1, self.fc2 = fused, torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.cached_fc1_input = self.cached_fc2_input = self.cached_fc2_output = None

    def linear_fc1_forward_and_act(self) -> None:
        middle, self.cached_fc1_input = self.fc1(self.cached_fc1_input).relu(), None
        if self.fused:
            self.cached_fc2_output = self.fc2(middle)
        else:
            self.cached_fc2_input = middle

    def linear_fc2_forward(self) -> None:
        if self.fused:
            assert self.cached_fc2_output is not None
        else:
            self.cached_fc2_output, self.cached_fc2_input = self.fc2(self.cached_fc2_input), None


@pytest.fixture(autouse=True)
def _one_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


@pytest.mark.parametrize("fused", [False, True])
def test_halves_give_what_the_whole_does_and_leave_nothing_in_the_module(fused):
    torch.manual_seed(0)
    shared, tokens, grad = Shared(fused), torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    expected = shared.fc2(shared.fc1(tokens).relu())
    of_whole = torch.autograd.grad(expected, [tokens, *shared.parameters()], grad)

    call = SharedCall(halves_of(shared), tokens)
    call.run_first()
    call.run_second()
    output = call.take_output()
    assert torch.equal(output, expected) and not output.requires_grad
    assert shared.cached_fc1_input is shared.cached_fc2_input is shared.cached_fc2_output is None
    call.backward_of_second(grad)
    call.backward_of_first()
    found = [call.take_gradient(), *(one.grad for one in shared.parameters())]
    assert tokens.grad is None  # autograd adds to it, as to what came before the tokens
    assert all(torch.equal(*pair) for pair in zip(found, of_whole, strict=True))


@pytest.mark.parametrize(("requires_grad", "trains", "numel"), [(True, True, 20), (False, True, 0), (False, False, 20)])
def test_autograd_comes_by_where_something_is_trained_and_holds_no_tokens_for_it(requires_grad, trains, numel):
    shared, tokens = Shared(False), torch.randn(5, 4, requires_grad=requires_grad)
    with torch.set_grad_enabled(trains):
        call = SharedCall(halves_of(shared), tokens)
        begin = call.begin()
    assert begin.numel() == numel and begin.requires_grad == (requires_grad or trains) and call.num_bytes == 80
    shared.fc1.requires_grad_(False)
    gone = weakref.ref(tokens)
    del tokens, begin
    call.run_first()
    assert gone() is None


@pytest.mark.parametrize("grouped", [False, True])
def test_ungrouped_experts_wait_for_the_first_product_with_which_they_share_a_workspace(monkeypatch, grouped):
    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
    shared = Shared(fused=False, grouped=grouped)
    SharedCall(halves_of(shared), torch.randn(5, 4)).run_first()
    assert waited == ([] if grouped else [shared.stream])
