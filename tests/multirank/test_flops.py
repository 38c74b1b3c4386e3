"""The FLOPs formula against what a real Megatron-Core model on 4 ranks multiplies."""

from __future__ import annotations

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.throughput import flops_per_token
from tests.ranks.gpt import MICRO_BATCH, TOKENS, VOCAB, gpt
from tests.ranks.megatron import parallel

SHAPE = ModelShape(layers=2, hidden=64, heads=4, vocabulary=VOCAB, experts=8, topk=2, ffn=96)


def _flops_of_a_micro_batch(layout, **config):
    with parallel(**layout):
        model = gpt(microbatches=1, **config)
        with FlopCounterMode(display=False) as counter:
            model.forward_backward()
        return counter.get_total_flops()


@pytest.mark.parametrize(
    ("layout", "replicas", "changes", "config"),
    [
        ({"ep": 4}, 4, {}, {}),
        ({"tp": 2, "ep": 2}, 2, {}, {}),
        ({"pp": 2, "ep": 2}, 2, {}, {}),
        ({"tp": 2, "ep": 2, "etp": 2}, 2, {"topk": 4}, {"moe_router_topk": 4}),
        ({"ep": 4}, 4, {"gated": False}, {"gated_linear_unit": False}),
        ({"ep": 4}, 4, {"shared_ffn": 48}, {"moe_shared_expert_intermediate_size": 48}),
    ],
)
def test_flops_are_those_of_the_model(ranks, layout, replicas, changes, config):
    shape = ModelShape(**(vars(SHAPE) | changes))
    counted = sum(ranks.run(_flops_of_a_micro_batch, layout=layout, **config))
    # Without flash attention both halves of the causal square are multiplied.
    other_half = 6 * shape.layers * TOKENS * shape.query_size
    expected = (flops_per_token(shape, TOKENS) + other_half) * TOKENS * MICRO_BATCH * replicas
    assert counted == pytest.approx(expected, rel=1e-9)
