"""What samples that move would save on a run's own routing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from megatron_moe_opt.integration.auto.sample_saving import MOST_PASSES, SampleRouting, keeps_home, replayed
from megatron_moe_opt.topology.sample_holders import SampleHolders

TWO_NODES = SampleHolders.from_ranks([0, 1], ([0], [1]), ("a", "b"), 1)


def routed(prefers: list[int], blocks: tuple[int, ...] = (4,), passes: int = 4) -> list[list[np.ndarray]]:
    """Returns the routing of a rank whose samples each send 30 tokens to one expert of four, and
    one to each of the others; in blocks of so many layers.
    """
    counts = np.ones((passes, len(prefers), 4), np.int64)
    counts[:, np.arange(len(prefers)), prefers] = 30
    return [[counts] * layers for layers in blocks]


def test_samples_that_prefer_experts_of_the_other_node_would_go_there():
    """Each has 32 of 33 tokens for one node. Stock leaves them on the other one; of 4 layers' 8 all-to-alls 2 stay."""
    saved = replayed([routed([2, 3]), routed([0, 1])], TWO_NODES)
    crossing, moved = 31, 2
    assert saved == pytest.approx((1 - moved / crossing) * 6 / 8, abs=0.01)
    assert replayed([routed([0, 1]), routed([2, 3])], TWO_NODES) == pytest.approx(0.0, abs=0.01)


def test_samples_are_at_home_between_virtual_stages():
    def saved(*blocks: int) -> float | None:
        return replayed([routed([2, 3], blocks), routed([0, 1], blocks)], TWO_NODES)

    assert saved(2, 2) == pytest.approx(saved(4) * 4 / 6, abs=0.01)
    assert saved(1, 1, 1, 1) == 0.0  # alone, a layer would have to bring home what it moves
    assert saved(1, 3) == pytest.approx(saved(3) * 3 / 4)


def test_parts_of_a_sample_on_the_ranks_of_a_tp_group_are_added():
    of_tp_2 = SampleHolders.from_ranks([0, 1, 2, 3], ([0, 1], [0, 1], [2, 3], [2, 3]), ("a", "a", "b", "b"), 2)
    whole = replayed([routed([2, 3]), routed([0, 1])], TWO_NODES)
    halves = [routed([2, 3]), routed([2, 3]), routed([0, 1]), routed([0, 1])]
    assert replayed(halves, of_tp_2) == pytest.approx(whole, abs=0.01)


def test_what_is_unlike_is_not_replayed():
    alike = routed([2, 3])
    assert replayed([alike, routed([0, 1, 2])], TWO_NODES) is None
    assert replayed([alike, routed([2, 3], (2, 2))], TWO_NODES) is None
    assert replayed([[[np.zeros((0, 0, 0), np.int64)]]] * 2, TWO_NODES) is None
    assert replayed([[], []], TWO_NODES) is None
    assert replayed([alike, alike], SampleHolders.from_ranks([0, 1], ([0], [1]), ("a", "a"), 1)) == 0.0


def test_it_counts_the_tokens_of_each_sample():
    class Router(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, torch.eye(3, dtype=torch.bool)[torch.arange(6) % 3]  # [S * B, E], samples side by side

    router = Router()
    routing = SampleRouting(SimpleNamespace(router=router))
    router.eval()(torch.zeros(3, 2, 4))
    router.train()
    for _ in range(MOST_PASSES + 1):
        router(torch.zeros(3, 2, 4))
    counts = routing.take()
    assert counts.shape == (MOST_PASSES, 2, 3) and routing.samples == 2 and not routing.is_repeated
    assert (counts == [[1, 1, 1], [1, 1, 1]]).all() and not router._forward_hooks


CONFIG = {
    "attention_dropout": 0.0, "moe_router_force_load_balancing": False, "moe_input_jitter_eps": None,
    "recompute_granularity": None, "recompute_modules": None, "tensor_model_parallel_size": 1,
    "sequence_parallel": False, "fp8": None, "fp8_recipe": "delayed", "fp4": None, "quant_recipe": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "samples", "aux_loss", "is_repeated", "reason"),
    [
        ({}, 4, 0.0, False, None),
        ({"tensor_model_parallel_size": 2}, 4, 0.0, False, "TP without --sequence-parallel"),
        ({"attention_dropout": 0.1}, 1, 0.0, False, "--attention-dropout 0.1"),
        ({"moe_input_jitter_eps": 0.01}, 1, 0.0, False, "--moe-input-jitter-eps 0.01"),
        ({"fp8": "hybrid"}, 1, 0.0, False, "--fp8-format scales a tensor by the samples that share a rank"),
        ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, 1, 0.0, False, None),
        ({"fp4": "e2m1"}, 1, 0.0, False, "--fp4-format scales a tensor"),
        ({}, 2, 0.01, False, "aux_loss balances the samples that share a rank"),
        ({}, 1, 0.01, False, None),
        ({}, 4, 0.0, True, "recomputed by torch.utils.checkpoint"),
        ({"recompute_granularity": "full"}, 4, 0.0, True, None),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, 4, 0.0, True, None),
    ],
)
def test_samples_that_would_train_otherwise_elsewhere_stay_at_home(overrides, samples, aux_loss, is_repeated, reason):
    router = torch.nn.Identity()
    router.tp_cp_group = None
    router.get_aux_loss_coeff = lambda kind: aux_loss if kind == "aux_loss" else 0.0
    layer = SimpleNamespace(router=torch.nn.Sequential(router))  # something is around it, as LoRA is
    heard = SimpleNamespace(layer=layer, samples=samples, is_repeated=is_repeated)
    found = keeps_home(SimpleNamespace(**CONFIG | overrides), [heard])
    assert found is None if reason is None else reason in found


def test_a_pass_that_is_run_again_is_noticed_and_not_counted():
    class Router(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden, torch.ones(6, 3, dtype=torch.bool)

    router = Router()
    routing = SampleRouting(SimpleNamespace(router=router))
    hidden = torch.zeros(3, 2, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda one: router(one)[0].exp(), hidden, use_reentrant=False).sum().backward()
    assert routing.is_repeated and len(routing.take()) == 1
