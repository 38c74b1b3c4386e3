"""One call of experts, its saved tensors and its gradients, without dispatch."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall, Experts
from megatron_moe_opt.runtime.through_experts.expert_pipeline import _Sum
from megatron_moe_opt.schedules.mpmoe import Restore

ROWS, HIDDEN, MIDDLE = 12, 8, 20


def experts() -> tuple[Experts, torch.nn.ParameterList]:
    """Two experts with views of what they save (chunk), a shared weight, and one parameter that is not used."""
    torch.manual_seed(3)
    shapes = (HIDDEN, 2 * MIDDLE), (MIDDLE, HIDDEN), (HIDDEN,), (3,)
    weights = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def run(tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, _: object = ()) -> torch.Tensor:
        outputs = []
        for part, factors in zip(tokens.split(counts.tolist()), probs.split(counts.tolist()), strict=True):
            gate, value = (part @ weights[0]).chunk(2, dim=-1)
            outputs.append((torch.nn.functional.silu(gate) * value * factors[:, None]) @ weights[1] + weights[2])
        return torch.cat(outputs)

    return Experts(run, tuple(weights)), weights


@pytest.mark.parametrize(
    ("middle", "hands_over"),
    [(Restore.KEEP, False), (Restore.KEEP, True), (Restore.OFFLOAD, False), (Restore.RECOMPUTE, False)],
)
@pytest.mark.parametrize("counts", [(5, 7), (0, 12), (12, 0)])
def test_gradients_are_autograds(middle, hands_over, counts):
    module, weights = experts()
    counts = torch.tensor(counts)
    tokens, probs, grad = torch.randn(ROWS, HIDDEN), torch.rand(ROWS), torch.randn(ROWS, HIDDEN)
    leaves = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    expected = module.run(leaves[0], counts, leaves[1])
    of_leaves = torch.autograd.grad(expected, (*leaves, *weights[:3]), grad)

    addresses = {weight.untyped_storage().data_ptr() for weight in weights}
    call = ExpertCall(module, counts, probs, middle, addresses, hands_over)
    buffer = tokens.clone()  # overwritten after the forward pass, as partitions that share it do
    output = call.forward(buffer)
    assert torch.equal(output, expected) and not output.requires_grad
    if middle is Restore.OFFLOAD:
        call.offload_middle()
        # fc1's output, silu's, its product with the values, and that with the probabilities: 5 times MIDDLE.
        assert module.middle_row_bytes == 4 * 5 * MIDDLE and HOST_MEMORY.used == ROWS * module.middle_row_bytes
        call.fetch_middle(None)
    if hands_over:
        handed_over = call.hand_over_middle()
        assert sum(tensor.nbytes for tensor in handed_over) == ROWS * 4 * 5 * MIDDLE
        copies, freed = [tensor.clone() for tensor in handed_over], [weakref.ref(tensor) for tensor in handed_over]
        del handed_over
        assert all(tensor() is None for tensor in freed)
        call.take_back_middle(iter(copies))
    if middle is not Restore.KEEP:
        buffer.fill_(float("nan"))
    again = buffer if middle is Restore.KEEP else torch.cat((torch.zeros(2, HIDDEN), tokens))[2:]  # elsewhere
    if middle is Restore.RECOMPUTE:
        call.recompute(again)
    hooked: list[torch.Tensor] = []
    handle = weights[0].register_hook(hooked.append)  # for the sum over partitions: not now
    taken: dict[int, torch.Tensor] = {}
    found = call.backward(again, grad, taken.__setitem__)
    assert all(torch.equal(*pair) for pair in zip((*found, *(taken[i] for i in range(3))), of_leaves, strict=True))
    assert set(taken) == {0, 1, 2} and HOST_MEMORY.used == 0
    of_tokens = weakref.ref(found[0])
    del found  # the pipeline's, which sends it; the call itself lives until all partitions are through
    assert of_tokens() is None
    assert all(weight.grad is None for weight in weights)
    weights[0].sum().backward()
    assert len(hooked) == 1
    handle.remove()


def test_gradients_of_partitions_are_summed_in_float32_and_rounded_once():
    parameter = torch.zeros(64, 8, dtype=torch.bfloat16)
    parts = torch.randn(16, 64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    total = _Sum(parameter, len(parts))
    for part in parts:
        total.add(part)
    assert torch.equal(total.value, parts.float().sum(0).bfloat16())
    one_by_one = parts[0].clone()
    for part in parts[1:]:
        one_by_one += part
    assert not torch.equal(total.value, one_by_one)
