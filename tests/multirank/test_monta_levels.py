"""`monta` at every level and chunk count against stock `alltoall`: the experts see the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.multirank.test_dispatchers import route_to, run_layer
from tests.ranks.pool import RankPool

CHUNKS = (1, 2, 3, 5, 8)
PIPELINES = [("O1", 1), *((level, chunks) for level in ("O2", "O3") for chunks in CHUNKS)]
TOPK = (1, 2, 4)
SEQUENCE, BATCH = 20, 3  # with TP 4: 15 tokens a rank, less than 8 experts x 8 chunks
LAYOUTS = [(tp, ep) for tp in (1, 2, 4) for ep in (1, 2, 4)]


def inputs_of_experts(layer: Any) -> list[torch.Tensor]:
    """Grows by what the experts are given: tokens, rows per expert, probabilities."""
    seen: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.extend(tensor.detach().clone() for tensor in args))
    return seen


def results_of(
    config: Any, weights: Any, hidden: torch.Tensor, routing: str | None
) -> tuple[Any, dict[str, torch.Tensor]]:
    from megatron_moe_opt.integration.moe_layer import build_layer

    layer = build_layer(config)
    if weights is not None:
        layer.load_state_dict(weights)
    if routing:
        route_to(layer, routing, seed=3 + dist.get_rank())
    seen = inputs_of_experts(layer)
    results = run_layer(layer, hidden, steps=1)
    return layer.state_dict(), results | {f"experts' input {i}": tensor for i, tensor in enumerate(seen)}


def compare_pipelines(tp: int, ep: int, pipelines: list[tuple[str, int]]) -> list[str]:
    """What differs from stock, over top-k, routing and pipelines."""
    import megatron_moe_opt
    from tests.ranks.megatron import moe_config, parallel

    different = []
    with parallel(tp=tp, ep=ep, etp=tp):
        for topk in TOPK:
            torch.manual_seed(11 + dist.get_rank())
            stock = moe_config(moe_router_topk=topk, moe_router_pre_softmax=True)
            hidden = torch.randn(SEQUENCE // tp, BATCH, stock.hidden_size)
            for routing in (None, "hot"):  # hot: all but the first experts, and all but one rank, get nothing
                weights, expected = results_of(stock, None, hidden, routing)
                assert "experts' input 2" in expected
                for level, chunks in pipelines:
                    megatron_moe_opt.register(Options(monta_level=level, chunks=chunks))
                    ours = dataclasses.replace(stock, moe_token_dispatcher_type="monta")
                    _, found = results_of(ours, weights, hidden, routing)
                    assert found.keys() == expected.keys()
                    different += [
                        f"{level} x {chunks}, top-{topk}, {routing}: {name}"
                        for name in expected
                        if not torch.equal(found[name], expected[name])
                    ]
    megatron_moe_opt.register(Options())
    return different


@pytest.mark.parametrize(("tp", "ep"), [layout for layout in LAYOUTS if layout[0] * layout[1] <= 4])
def test_every_level_and_chunk_count_equals_stock_bit_for_bit(ranks, tp, ep):
    assert ranks.run(compare_pipelines, tp=tp, ep=ep, pipelines=PIPELINES) == [[]] * 4


@pytest.mark.parametrize("world", [8, 16])
def test_larger_groups_equal_stock_bit_for_bit(world):
    pool = RankPool(world)
    try:
        for tp, ep in LAYOUTS:
            if tp * ep == world:
                found = pool.run(compare_pipelines, tp=tp, ep=ep, pipelines=PIPELINES, timeout_s=240)
                assert found == [[]] * world
    finally:
        pool.close()
