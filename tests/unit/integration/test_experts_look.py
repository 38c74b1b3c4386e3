"""What a call of experts shows: what is trained in it and not theirs, and whether it draws random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.integration.auto.experts_look import ExpertsLook
from megatron_moe_opt.integration.auto.first_step import SeenExperts

ROWS, HIDDEN = 3, 4
NOTHING = SeenExperts(None, draw=False, trained=True, dtypes=("torch.float32",), group=2)


class Experts(torch.nn.Module):
    """One expert, called as Megatron calls those of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.register_buffer("scale", torch.ones(HIDDEN))

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tokens @ self.weight * self.scale * probs[:, None], None


@pytest.fixture
def experts(monkeypatch) -> Experts:
    """Experts that ranks 2 and 3 share."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 3])
    return Experts()


def call(experts: Experts, tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    output, _ = experts(tokens, torch.tensor([ROWS]), probs)
    return output


def inputs(trained: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and probabilities, leaves of a graph."""
    return torch.randn(ROWS, HIDDEN, requires_grad=trained), torch.rand(ROWS, requires_grad=trained)


def seen(look: ExpertsLook) -> SeenExperts:
    """Returns what is seen, once it is sure that no hook stays for it."""
    found = look.seen(None)
    look.before_pass()  # of a pass that is not looked at
    assert not any("ExpertsLook" in hook.__qualname__ for hook in hooks(look))
    return found


def hooks(look: ExpertsLook) -> list[Any]:
    return [*look._experts._forward_pre_hooks.values(), *look._experts._forward_hooks.values()]


def gate(experts: Experts, factors: torch.Tensor, way: str) -> None:
    """Has a hook multiply what the experts are given, or what they return."""
    if way == "inputs":
        experts.register_forward_pre_hook(lambda _, given: (given[0] * factors, *given[1:]))
    else:
        experts.register_forward_hook(lambda _, given, returned: (returned[0] * factors, None))


@pytest.mark.parametrize("way", ["inputs", "outputs"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_gate_is_found_that_is_put_on_after_the_layer_was_built(experts, way, trained):
    look = ExpertsLook(experts)
    gate(experts, factors := torch.ones(HIDDEN, requires_grad=True), way)
    look.before_pass()
    call(experts, *inputs(trained))
    assert seen(look) == replace(NOTHING, outside=(HIDDEN,))
    look.again()
    factors.requires_grad_(False)  # it is frozen by the time that is planned anew
    look.before_pass()
    call(experts, *inputs(trained))
    assert seen(look) == NOTHING


@pytest.mark.parametrize("way", ["parameter", "buffer", "made of a parameter", "leaves", "made of leaves", "frozen"])
def test_what_is_the_experts_own_or_comes_with_their_inputs_is_not_outside(experts, way):
    look, given = ExpertsLook(experts), inputs(trained="leaves" in way)
    if "parameter" in way:
        experts.factors = torch.nn.Parameter(torch.ones(HIDDEN))
        gate(experts, experts.factors * 2 if way.startswith("made") else experts.factors, "outputs")
    if way == "buffer":
        experts.scale.requires_grad_()
    if way == "made of leaves":
        given = [one * 2 for one in given]
    if way == "frozen":
        experts.requires_grad_(False)
    look.before_pass()
    call(experts, *given)
    assert seen(look) == replace(NOTHING, trained=way != "frozen")


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_looks_at_the_pass_that_is_recomputed_where_the_first_has_no_graph(experts, reentrant):
    look = ExpertsLook(experts)
    gate(experts, torch.ones(HIDDEN, requires_grad=True), "outputs")
    look.before_pass()
    output = checkpoint(lambda *given: call(experts, *given), *inputs(), use_reentrant=reentrant)
    assert look._outside == (None if reentrant else (HIDDEN,))
    output.sum().backward()
    assert seen(look) == replace(NOTHING, outside=(HIDDEN,))


@pytest.mark.parametrize("reentrant", [None, True])
def test_experts_whose_hooks_draw_random_numbers_do(experts, reentrant):
    look = ExpertsLook(experts)
    experts.register_forward_pre_hook(lambda _, given: (torch.nn.functional.dropout(given[0]), *given[1:]))
    look.before_pass()
    if reentrant is None:
        call(experts, *inputs())
    else:
        checkpoint(lambda *given: call(experts, *given), *inputs(), use_reentrant=reentrant).sum().backward()
    assert seen(look) == replace(NOTHING, draw=True)


def test_hooks_that_fused_experts_call_without_inputs_see_nothing(experts):
    """Megatron's do inside of the call, those that were on the experts in their first call also later."""
    look = ExpertsLook(experts)
    gate(experts, torch.ones(HIDDEN, requires_grad=True), "outputs")
    look.before_pass()
    before, *_ = experts._forward_pre_hooks.values()
    *_, behind = experts._forward_hooks.values()
    experts.register_forward_pre_hook(lambda *_: (before(experts, None), behind(experts, None, None))[0])
    call(experts, *inputs())
    before(experts, None)
    behind(experts, None, None)
    assert seen(look) == replace(NOTHING, outside=(HIDDEN,))


def test_parameters_are_those_after_the_pass(experts):
    look = ExpertsLook(experts)
    experts.bias = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    assert seen(look) == replace(NOTHING, dtypes=("torch.bfloat16", "torch.float32"))
