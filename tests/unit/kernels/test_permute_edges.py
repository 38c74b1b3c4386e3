"""Empty sizes, skewed and dropped routing, and the sentences with which bad input is refused."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels
from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.row_map import row_map_from_sources
from tests import kernel_reference as reference


def round_trip(tokens, routing_map, probs):
    permuted, permuted_probs, indices = kernels.permute(tokens, routing_map, probs)
    return permuted, permuted_probs, kernels.unpermute(permuted, indices, tokens.shape, probs, routing_map)


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 4), (5, 4), (0, 0), (5, 0)])
def test_nothing_routed(num_tokens, num_experts):
    tokens = torch.randn(num_tokens, 6, requires_grad=True)
    probs = torch.rand(num_tokens, num_experts, requires_grad=True)
    permuted, permuted_probs, out = round_trip(tokens, torch.zeros(num_tokens, num_experts), probs)
    assert permuted.shape == (0, 6)
    assert permuted_probs.shape == (0,)
    assert torch.equal(out, torch.zeros(num_tokens, 6))
    grads = torch.autograd.grad(out.sum() + permuted.sum() + permuted_probs.sum(), [tokens, probs])
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_zero_hidden_size():
    permuted, _, out = round_trip(torch.empty(3, 0), torch.ones(3, 2), torch.ones(3, 2))
    assert permuted.shape == (6, 0)
    assert out.shape == (3, 0)


def test_one_hot_expert_and_tokens_without_experts():
    routing_map = torch.zeros(64, 8, dtype=torch.bool)
    routing_map[::2, 5] = True
    tokens, probs = torch.randn(64, 33), torch.rand(64, 8)
    row_map = kernels.build_row_map(routing_map)
    assert row_map.expert_counts.tolist() == [0, 0, 0, 0, 0, 32, 0, 0]
    permuted, permuted_probs, out = round_trip(tokens, routing_map, probs)
    assert torch.equal(permuted, tokens[::2])
    assert torch.equal(permuted_probs, probs[::2, 5])
    assert torch.equal(out[1::2], torch.zeros(32, 33))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
def test_routing_map_of_any_dtype_and_layout(dtype):
    routing_map = (torch.rand(20, 9) < 0.3).to(dtype)
    expected = reference.routed_pairs(routing_map)[0]
    transposed = routing_map.T.contiguous().T
    assert not transposed.is_contiguous()
    for form in (routing_map, transposed):
        assert torch.equal(kernels.build_row_map(form).sources, expected)


def test_probs_need_not_be_contiguous():
    tokens, routing_map = torch.randn(20, 5), torch.rand(20, 9) < 0.3
    probs = torch.rand(9, 20).T.requires_grad_()
    permuted, permuted_probs, _ = kernels.permute(tokens, routing_map, probs)
    permuted_probs.sum().backward()  # an expanded gradient
    assert torch.equal(permuted_probs, reference.permute(tokens, routing_map, probs)[1])
    assert torch.equal(probs.grad, routing_map.float())


def test_num_out_tokens_without_padding_is_not_read_on_cpu():
    """Megatron-Core's unfused permute ignores it too."""
    tokens, routing_map = torch.randn(20, 5), torch.rand(20, 9) < 0.3
    for num_out_tokens in (0, 7, 10**6):
        assert torch.equal(
            kernels.permute(tokens, routing_map, num_out_tokens=num_out_tokens)[0],
            kernels.permute(tokens, routing_map)[0],
        )


def test_only_the_asked_gradients_are_computed():
    tokens, probs, routing_map = torch.randn(4, 3), torch.rand(4, 2, requires_grad=True), torch.ones(4, 2)
    permuted, permuted_probs, _ = kernels.permute(tokens, routing_map, probs)
    permuted_probs.sum().backward()
    assert torch.equal(probs.grad, torch.ones(4, 2))
    assert tokens.grad is None


def test_fewer_experts_than_a_word_and_odd_counts():
    """Expert counts around the eight bytes in which the map is read."""
    for num_experts in (1, 7, 8, 9, 15, 16, 17, 65):
        routing_map = torch.rand(50, num_experts) < 0.4
        sources, experts = reference.routed_pairs(routing_map)
        row_map = kernels.build_row_map(routing_map)
        assert torch.equal(row_map.sources, sources)
        assert torch.equal(row_map.experts.long(), experts[row_map.rows])
        assert torch.equal(row_map.expert_counts, routing_map.sum(0))


ROUTING = torch.ones(4, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.permute(torch.randn(3, 4).T, ROUTING), r"tokens of shape \[4, 3\] .* is not contiguous: pass"),
        (lambda: kernels.permute(torch.randn(4, 8)[:, :4], ROUTING), r"tokens .* is not contiguous"),
        (lambda: kernels.permute(torch.randn(4, 3).double(), ROUTING), "tokens is Double: only float32, bfloat16"),
        (lambda: kernels.permute(torch.randn(5, 3), ROUTING), r"tokens of shape \(5, 3\) and routing_map of shape"),
        (lambda: kernels.permute(torch.randn(4), ROUTING), r"must be \[tokens, hidden\] and \[tokens, experts\]"),
        (lambda: kernels.permute(torch.randn(4, 3), ROUTING, torch.rand(4, 3)), r"probs have shape \[4, 3\], but"),
        (lambda: kernels.permute(torch.randn(4, 3), ROUTING, torch.ones(4, 2).int()), "probs are Int: only"),
        (lambda: kernels.permute(torch.randn(4, 3, device="meta"), ROUTING), "tokens is on meta, where"),
        (
            lambda: kernels.permute(torch.randn(4, 3), ROUTING, num_out_tokens=10, drop_and_pad=True),
            r"capacity 5 must lie in \[0, 4\]",
        ),
        (lambda: kernels.build_row_map(torch.ones(4)), r"routing_map must be \[tokens, experts\]"),
        (
            lambda: kernels.unpermute(torch.randn(6, 3).T, torch.arange(3), (3, 6)),
            "permuted_tokens .* is not contiguous",
        ),
        (lambda: kernels.unpermute(torch.randn(3, 4), torch.arange(3), (3, 5)), "do not fit restore_shape"),
        (lambda: kernels.unpermute(torch.randn(3, 4), torch.tensor([0, 3, 1]), (3, 4)), r"sorted_indices\[1\] is 3"),
        (lambda: kernels.unpermute(torch.randn(3, 4), torch.tensor([0, 1, -1]), (3, 4)), r"sorted_indices\[2\] is -1"),
        (lambda: kernels.unpermute(torch.randn(3, 4), torch.arange(4), (4, 4)), "has 3 rows, but the row map has 4"),
        (lambda: kernels.unpermute(torch.randn(3, 4), torch.arange(3).int(), (3, 4)), "must be int64, but is Int"),
        (
            lambda: kernels.unpermute(torch.randn(8, 3), torch.arange(8) % 4, (4, 3), torch.ones(4, 2)),
            "needs the routing_map",
        ),
        (
            lambda: kernels.unpermute(torch.randn(8, 3), torch.arange(8) // 2, (4, 3), torch.ones(4, 2), ROUTING),
            "sorted_indices are not those that permute returns",
        ),
        (
            lambda: kernels.unpermute(torch.randn(6, 3), torch.zeros(6).long(), (4, 3), torch.ones(4, 2), ROUTING),
            "sorted_indices have 6 rows, but the routing_map has 8",
        ),
        (
            lambda: kernels.unpermute(
                torch.randn(7, 3), torch.zeros(7).long(), (4, 3), torch.ones(4, 2), ROUTING, drop_and_pad=True
            ),
            "7 rows .* are not a multiple of 2 experts",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_forged_row_map_cannot_reach_other_memory():
    extension = load_extension()
    good = kernels.build_row_map(ROUTING)
    offsets, rows, experts, num_experts = good.tensors
    tokens = torch.randn(4, 3)
    forgeries = {
        "a row is outside": (offsets, rows + 1, experts, num_experts),
        "an expert is outside": (offsets, rows, experts - 1, num_experts),
        "offsets must rise": (offsets.flip(0).contiguous(), rows, experts, num_experts),
    }
    for message, tensors in forgeries.items():
        with pytest.raises(ValueError, match=message):
            extension.permute_rows(tensors, tokens, torch.rand(4, 2))


def test_a_map_without_experts_refuses_probs():
    row_map = row_map_from_sources(torch.arange(4), 4)
    with pytest.raises(ValueError, match="probs"):
        kernels.permute_packed(torch.randn(4, 3), torch.empty(4, 0), row_map)
