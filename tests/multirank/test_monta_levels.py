"""`monta` at every level and chunk count against stock `alltoall`: the experts see the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe_opt.options import Options
from tests.multirank.test_dispatchers import (
    DROP,
    PAD,
    RAGGED,
    RECOMPUTE,
    SHARED,
    case_id,
    compare,
)
from tests.multirank.test_dispatchers import LAYOUTS as NAMED_LAYOUTS
from tests.ranks.devices import same
from tests.ranks.layers import BATCH, BesideStock

CHUNKS = (2, 3, 8)
PIPELINES = [("O1", 1), *((level, chunks) for level in ("O2", "O3") for chunks in CHUNKS)]
SOME_PIPELINES = [("O1", 1), ("O2", 3), ("O3", 2), ("O3", 8)]
TOPK = (1, 2, 4)
SEQUENCE = 20  # with TP 4: 15 tokens a rank, less than 8 experts x 8 chunks
LAYOUTS = [(tp, ep) for tp in (1, 2, 4) for ep in (1, 2, 4) if tp * ep <= 8]


def run_with_experts_inputs(beside: BesideStock, layer: Any) -> dict[str, torch.Tensor]:
    """What a layer makes of the tokens, and what its experts are given: tokens, rows per expert, probabilities."""
    seen: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.extend(tensor.detach().clone() for tensor in args))
    return beside.run(layer) | {f"experts' input {i}": tensor for i, tensor in enumerate(seen)}


def compare_pipelines(tp: int, ep: int, pipelines: list[tuple[str, int]]) -> list[str]:
    """What differs from stock, over top-k, routing and pipelines: all of them at top-2, every other one elsewhere."""
    from tests.ranks.megatron import parallel

    different = []
    with parallel(tp=tp, ep=ep, etp=tp):
        for number, topk in enumerate(TOPK):
            # hot: all but the first experts, and all but one rank, get nothing
            for routing in (None, "hot") if topk == 2 else (None,):
                beside = BesideStock({"moe_router_topk": topk}, routing, sequence=SEQUENCE)
                expected = run_with_experts_inputs(beside, beside.stock)
                assert "experts' input 2" in expected
                for level, chunks in pipelines if topk == 2 else pipelines[number // 2 :: 2]:
                    ours = beside.ours("monta", Options(monta_level=level, chunks=chunks))
                    found = run_with_experts_inputs(beside, ours)
                    assert found.keys() == expected.keys()
                    different += [
                        f"{level} x {chunks}, top-{topk}, {routing}: {name}"
                        for name in expected
                        if not same(found[name], expected[name])
                    ]
    return different


@pytest.mark.parametrize(("tp", "ep"), [layout for layout in LAYOUTS if layout[0] * layout[1] <= 4])
def test_levels_and_chunk_counts_equal_stock_bit_for_bit(ranks, tp, ep):
    pipelines = PIPELINES if (tp, ep) in ((2, 2), (1, 4)) else SOME_PIPELINES if ep > 1 else SOME_PIPELINES[::3]
    assert ranks.run(compare_pipelines, tp=tp, ep=ep, pipelines=pipelines) == [[]] * 4


def test_groups_of_eight_equal_stock_bit_for_bit(eight_ranks):
    for tp, ep in LAYOUTS:
        if tp * ep == 8:
            assert eight_ranks.run(compare_pipelines, tp=tp, ep=ep, pipelines=SOME_PIPELINES) == [[]] * 8


IN_CHUNKS = Options(monta_level="O3", chunks=3)
CASES = [
    *((layout, extra, None) for layout in ("ep4", "tp2-ep2-etp2") for extra in (DROP, PAD, SHARED, RECOMPUTE)),
    ("tp2-ep2-etp2", SHARED | {"moe_shared_expert_overlap": True}, None),
    ("tp2-ep2-etp2", {"moe_router_dtype": "fp64"}, None),
    ("tp2-ep2-etp2", {"hidden_size": 60, "num_attention_heads": 4}, None),
    ("ep4", {"num_moe_experts": 4}, None),
    ("cp2-tp2-ep2-etp2", {}, None),
    *(("tp2-ep2-etp2", {}, routing) for routing in ("skewed", *RAGGED)),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_other_settings_in_chunks(ranks, case):
    layout, settings, routing = case
    arguments = {"layout": NAMED_LAYOUTS[layout], "settings": settings, "routing": routing, "steps": 2}
    for result in ranks.run(compare, dispatcher="monta", options=IN_CHUNKS, **arguments):
        assert result["equal"], result["errors"]


@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
def test_bf16_in_chunks_is_within_the_contract(ranks, router_dtype):
    arguments = {"layout": NAMED_LAYOUTS["tp2-ep2-etp2"], "settings": {"moe_router_dtype": router_dtype}}
    for result in ranks.run(compare, dispatcher="monta", dtype="bfloat16", options=IN_CHUNKS, **arguments):
        assert max(result["errors"].values()) < 1e-2, result["errors"]


def pool_misses(steps: int) -> list[int]:
    """Returns the number of buffers that had to be made anew in each step."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.kernels import host_pool
    from tests.ranks.megatron import moe_config, parallel

    misses = []
    with parallel(tp=2, ep=2, etp=2):
        megatron_moe_opt.register(IN_CHUNKS)
        layer = build_layer(moe_config(moe_token_dispatcher_type="monta"))
        megatron_moe_opt.register()
        hidden = torch.randn(SEQUENCE // 2, BATCH, 64, requires_grad=True)
        for _ in range(steps):
            before = host_pool.stats()["misses"]
            layer(hidden)[0].sum().backward()
            misses.append(host_pool.stats()["misses"] - before)
    return misses


def test_buffers_are_used_again_in_the_next_step(ranks):
    for misses in ranks.run(pool_misses, steps=6):
        assert misses[-1] == 0, misses
