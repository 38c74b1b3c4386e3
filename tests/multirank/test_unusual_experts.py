"""Experts that are no plain MLPs, or are trained in turn, under every strategy of mpmoe against stock `alltoall`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron_moe_opt.options import Options
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from tests.ranks.devices import difference
from tests.ranks.layers import BesideStock


class KeepsBits(torch.autograd.Function):
    """A product that saves its input as numbers of another type."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens.view(torch.int32), weight)
        return tokens @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ bits.view(torch.float32)


class Bits(nn.Module):
    """Such a product with a weight of Megatron's."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, None]:
        return KeepsBits.apply(tokens, self.weight), None


class Plain(Bits):
    """One that returns no bias besides, as nn.Linear."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(tokens, self.weight)


class PlainMlp(nn.Module):
    """An expert of such products."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Plain(expert.linear_fc1), Plain(expert.linear_fc2)

    def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate, value = self.linear_fc1(tokens).chunk(2, dim=-1)
        return self.linear_fc2(functional.silu(gate) * value * probs[:, None]), None


def unchanged(layer: Any) -> None:
    pass


def bits(layer: Any) -> None:
    for expert in layer.experts.local_experts:
        expert.linear_fc1 = Bits(expert.linear_fc1)


def plain(layer: Any) -> None:
    experts = layer.experts.local_experts
    for number, expert in enumerate(experts):
        experts[number] = PlainMlp(expert)


def handed_back(layer: Any) -> None:
    """Outputs are the tokens, and gradients of tokens those of outputs."""

    def forward(tokens: torch.Tensor, _: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tokens + 0 * probs[:, None] if torch.is_grad_enabled() else tokens, None

    layer.experts.forward = forward


def doubled_before_the_second_product(layer: Any) -> None:
    """By a number, which saves nothing."""
    for expert in layer.experts.local_experts:
        expert.linear_fc2.register_forward_pre_hook(lambda _, given: (2 * given[0], *given[1:]))


class Gated(PlainMlp):
    """One whose activation takes the tokens, too."""

    def forward(self, tokens: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        gate, value = self.linear_fc1(tokens).chunk(2, dim=-1)
        of_tokens = torch.sigmoid(tokens.mean(-1, keepdim=True))
        return self.linear_fc2(functional.silu(gate) * value * of_tokens * probs[:, None]), None


def gated(layer: Any) -> None:
    experts = layer.experts.local_experts
    for number, expert in enumerate(experts):
        experts[number] = Gated(expert)


def doubled_in_place(layer: Any) -> None:
    layer.experts.register_forward_pre_hook(lambda _, given: (given[0], given[1], given[2].mul_(2.0)))


def trained(layer: Any, name: str, is_trained: bool) -> None:
    for parameter_name, parameter in layer.experts.named_parameters():
        if name in parameter_name:
            parameter.requires_grad_(is_trained)


def in_turn(layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """A step of two passes, in each of which one of the matrices is trained."""
    trained(layer, "fc2", False)
    first = layer(hidden)[0]
    trained(layer, "fc2", True)
    trained(layer, "fc1", False)
    second = layer(2 * hidden)[0]
    trained(layer, "fc1", True)
    (first.square().sum() + second.square().sum()).backward()
    return gradients(layer)


def frozen_before_backward(layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    output = layer(hidden)[0]
    trained(layer, "fc1", False)
    output.square().sum().backward()
    trained(layer, "fc1", True)
    return gradients(layer)


def with_a_look_between(layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts are frozen while they are evaluated between a forward and its backward pass."""
    output = layer(hidden)[0]
    trained(layer, "", False)
    with torch.no_grad():
        layer(2 * hidden)
    trained(layer, "", True)
    output.square().sum().backward()
    return gradients(layer)


def evaluated_and_trained(layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        output = layer(hidden)[0]
    given = hidden.clone().requires_grad_()
    layer(given)[0].square().sum().backward()
    return gradients(layer) | {"output": output, "input grad": given.grad}


def gradients(layer: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


def errors(change: Callable[[Any], None], run: Callable[..., dict[str, torch.Tensor]]) -> dict[str, float | str]:
    """Returns the largest error against stock of each strategy, or what it was refused."""
    from megatron_moe_opt.runtime.through_experts import expert_pipeline
    from tests.ranks.megatron import parallel

    def late(steps: Any) -> None:
        time.sleep(2e-3)  # the next partition's rows have come by then
        sort(steps)

    found: dict[str, float | str] = {}
    sort = expert_pipeline.steps.run_now
    with parallel(), pytest.MonkeyPatch.context() as patch:  # each rank by itself: what fails on one holds up no other
        patch.setattr(expert_pipeline.steps, "run_now", late)
        beside = BesideStock({})
        ours = {one: beside.ours("mpmoe", Options(partitions=3, memory_reuse=one)) for one in STRATEGIES}
        change(beside.stock)
        expected = run(beside.stock, beside._hidden)
        for strategy, layer in ours.items():
            change(layer)
            try:
                got = run(layer, beside._hidden)
            except Exception as error:
                found[strategy] = str(error)
                continue
            assert got.keys() >= expected.keys(), (strategy, got.keys() ^ expected.keys())
            zeros = {name: torch.zeros_like(one) for name, one in got.items()}
            found[strategy] = max(difference(one, expected.get(name, zeros[name])) for name, one in got.items())
    return found


@pytest.mark.parametrize(
    ("change", "run"),
    [
        (bits, evaluated_and_trained),
        (plain, evaluated_and_trained),
        (handed_back, evaluated_and_trained),
        (doubled_before_the_second_product, evaluated_and_trained),
        (gated, evaluated_and_trained),
        (unchanged, with_a_look_between),
        (unchanged, frozen_before_backward),
    ],
)
def test_they_train_as_under_stock(ranks, change, run):
    for found in ranks.run(errors, change=change, run=run):
        assert all(isinstance(one, float) and one < 2e-6 for one in found.values()), found


def test_parameters_that_are_trained_in_turn_have_their_gradients_or_are_refused(ranks):
    for found in ranks.run(errors, change=unchanged, run=in_turn):
        again = [found.pop(strategy) for strategy in ("S3", "S4")]  # run again with what is trained by then
        assert all("frozen in the forward pass is trained by now" in one for one in again)
        assert all(isinstance(one, float) and one < 2e-6 for one in found.values()), found


def test_experts_that_write_into_what_they_are_given_do_not_run_again(ranks):
    for found in ranks.run(errors, change=doubled_in_place, run=evaluated_and_trained):
        assert found.pop("none") < 2e-6
        assert all("run experts again on the tokens and probabilities" in one for one in found.values()), found


def fused_after_a_pass_that_only_looked() -> list[bool]:
    """Returns, of the experts' weights, whether DDP is told that a product has added their gradients."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        beside = BesideStock({})
        layer = beside.ours("mpmoe", Options(partitions=2, memory_reuse="S1"))
        weights = [expert.linear_fc1.weight for expert in layer.experts.local_experts]
        for expert, weight in zip(layer.experts.local_experts, weights, strict=True):
            weight.grad_added_to_main_grad = False  # as Megatron's DDP has it, with or without fusion
            expert.linear_fc1.forward = lambda tokens, weight=weight: (functional.linear(tokens, weight.detach()), None)
        layer(beside._hidden)[0].square().sum().backward()
    return [weight.grad_added_to_main_grad for weight in weights]


def test_without_fusion_no_gradient_counts_as_fused(ranks):
    for added in ranks.run(fused_after_a_pass_that_only_looked):
        assert not any(added)
