"""The memory model: ZeRO, the paper's equation 2 and Table 4, and what the parts add up to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.training.memory import (
    RECOMPUTE,
    BytesPerParameter,
    layer_activations,
    state_memory,
    training_memory,
)
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.throughput import GpuSpeed, throughput
from megatron_moe_opt.topology.layouts import Layout
from tools.papers.formulas.monta import paper_activations

SHAPE = ModelShape(layers=8, hidden=1024, heads=16, vocabulary=32000, experts=8, topk=2, ffn=4096)


def test_parameters_of_mixtral_8x7b():
    """46.7 billion in all, 12.9 billion active, as its makers say (input embeddings counted)."""
    mixtral = ModelShape(32, 4096, 32, 32000, 8, 2, 14336, kv_heads=8)
    assert mixtral.parameters(Layout()).total == 46_702_792_704
    assert mixtral.active_matrices + 32000 * 4096 == pytest.approx(12.88e9, rel=1e-3)


def test_bytes_per_parameter_are_megatron_s():
    """The table of Megatron's distributed optimizer: bf16 parameters, fp32 gradients: 18, or 6 + 12 / d with it."""
    parameters = SHAPE.parameters(Layout(8)).total
    assert state_memory(SHAPE, Layout(8), zero=0).total == 18 * parameters
    assert state_memory(SHAPE, Layout(8), zero=1).total == (6 + 12 / 8) * parameters


def test_zero_shards_dense_parameters_over_more_ranks_than_experts():
    """The paper's 2 + 2 + 12 bytes; 16 ranks: 8 copies of what is dense, 2 of each expert."""
    parallel, each = Layout(world=16, tp=2, ep=8), BytesPerParameter(2, 2, 12)
    parameters = SHAPE.parameters(parallel)
    dense, expert = parameters.dense, parameters.expert
    found = [state_memory(SHAPE, parallel, zero=stage, each=each).total for stage in range(4)]
    assert found == [
        16 * dense + 16 * expert,
        (4 + 12 / 8) * dense + (4 + 12 / 2) * expert,
        (2 + 14 / 8) * dense + (2 + 14 / 2) * expert,
        16 / 8 * dense + 16 / 2 * expert,
    ]


def test_states_spread_over_all_ranks_add_up():
    """The cluster holds every parameter once with ZeRO-3, whatever the layout."""
    for layout in ({}, {"ep": 8}, {"tp": 2, "ep": 4, "expert_tp": 2}, {"pp": 4, "ep": 2}, {"cp": 2, "tp": 4}):
        parallel = Layout(8, **layout)
        ranks = 8 // parallel.pp
        total = sum(state_memory(SHAPE, parallel, stage, zero=3).total * ranks for stage in range(parallel.pp))
        # Norms and routers are not split by TP, so that each TP rank holds them: bring them to one copy.
        whole = SHAPE.parameters(Layout()).total
        replicated = SHAPE.layers * (2 * SHAPE.hidden + SHAPE.experts * SHAPE.hidden) + SHAPE.hidden
        assert total == pytest.approx(18 * (whole + (parallel.tp - 1) * replicated), rel=1e-12)


TABLE_4 = {"tokens": 4096, "sequence": 2048, "hidden": 1024, "heads": 16, "layers": 8, "topk": 2}


def test_equation_2_is_the_dense_model_s_where_one_expert_is_chosen():
    """Korthikanti et al. 2022, eq. 1: s b h (34 + 5 a s / h) bytes a layer."""
    found = paper_activations(**TABLE_4 | {"topk": 1})["none"]
    assert found == 4096 * 1024 * 8 * (34 + 5 * 16 * 2048 / 1024)
    assert paper_activations(**TABLE_4)["none"] - found == 4096 * 1024 * 8 * 21


def test_table_4_by_tensor_parallel_size():
    whole, split = paper_activations(**TABLE_4), paper_activations(**TABLE_4, tp=4)
    assert whole["tp"] == whole["sp"] == whole["none"] == split["none"]
    # Korthikanti et al. 2022, eq. 2, for one expert: 10 + 24 / t + 5 a s / (h t).
    one = paper_activations(**TABLE_4 | {"topk": 1}, tp=4)
    assert one["tp"] == 4096 * 1024 * 8 * (10 + 24 / 4 + 5 * 16 * 2048 / 1024 / 4)
    assert split["none"] > split["tp"] > split["sp"] > split["selective"] > split["full"]
    assert split["sp"] == whole["sp"] / 4
    assert split["full"] == 2 * 4096 * 1024 * 8 / 4


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 8]))
def test_fused_layers_keep_what_equation_2_counts_but_for_named_terms(topk, tp, batch, ep):
    """Experts of 4 h without a gate. Ours has no dropout masks (1 + k), keeps the second norm's input once and not k
    times (2 k - 2), keeps the router's input (2), and statistics and choices that eq. 2 neglects."""
    sequence = 512
    model = ModelShape(1, 1024, 16, 32000, 8, topk, 4096, gated=False)
    parallel = Layout(8, tp=tp, ep=ep if tp == 1 else 1)
    terms = layer_activations(model, parallel, batch, sequence)
    own, unit = batch * sequence // tp, batch * sequence * 1024 // tp
    statistics = terms["router"] + terms["attention"] + 2 * own * 4 + topk * own * 2  # the last: probabilities
    paper = paper_activations(batch * sequence, sequence, 1024, 16, 1, topk, tp)["selective"]
    masks, second_norm, router_input = 1 + topk, 2 * topk - 2, 2
    assert sum(terms.values()) - statistics == paper - unit * (masks + second_norm - router_input)


def test_unfused_layers_keep_more():
    fused = layer_activations(SHAPE, Layout(), 1, 2048)
    unfused = layer_activations(SHAPE, Layout(), 1, 2048, fused=False)
    assert fused.keys() == unfused.keys()
    assert [name for name in fused if fused[name] != unfused[name]] == [
        "norms",
        "attention input",
        "attention",
        "expert middle",
    ]
    assert all(unfused[name] >= fused[name] for name in fused)
    assert unfused["attention"] == 6 * 16 * 2048 * 2048


def test_even_routing_gives_every_rank_the_same_rows():
    """topk rows a token, each held by all expert-TP peers; expert parallelism does not change their number."""
    for layout in ({"ep": 8}, {"ep": 2}, {"tp": 2, "ep": 4}, {"tp": 4, "expert_tp": 4, "ep": 2}):
        parallel = Layout(8, **layout)
        rows = 2 * parallel.expert_tp * 1024 // parallel.tp
        assert layer_activations(SHAPE, parallel, 1, 1024)["expert input"] == 2 * rows * 1024


def test_context_parallelism_splits_tokens():
    whole, half = (layer_activations(SHAPE, Layout(2, cp=cp), 1, 4096) for cp in (1, 2))
    assert {name: 2 * size for name, size in half.items()} == whole


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_training_memory_of_pipeline_stages(recompute):
    """1F1B: stage i of p holds p - i micro-batches, where there are as many."""
    parallel = Layout(8, pp=4, ep=2)
    found = [training_memory(SHAPE, parallel, 1, 512, 16, stage, recompute=recompute) for stage in range(4)]
    activations = [stage.activations for stage in found]
    assert activations == [activations[3] * in_flight for in_flight in (4, 3, 2, 1)]
    assert [stage.total - stage.activations for stage in found] == [
        state_memory(SHAPE, parallel, stage).total for stage in range(4)
    ]
    terms = layer_activations(SHAPE, parallel, 1, 512)
    per_layer = {
        "none": sum(terms.values()),
        "selective": sum(terms.values()) - terms["attention"],
        "full": 2 * 512 * 1024,
    }
    assert activations[3] == 2 * per_layer[recompute]
    assert training_memory(SHAPE, parallel, 1, 512, 2, recompute=recompute).activations == 2 * activations[3]


def test_recomputed_modules_are_not_kept():
    """In Megatron `moe` is the whole of a MoE layer behind its norm, and `mlp` of a layer without experts."""
    model = ModelShape(2, 64, 4, 128, 8, 2, 96, shared_ffn=48, dense_layers=1, dense_ffn=192)
    dense, moe = (layer_activations(model, Layout(), 1, 32, moe=moe) for moe in (False, True))
    whole = training_memory(model, Layout(), 1, 32, 1).activations
    routed = moe["router"] + moe["expert input"] + moe["expert middle"] + moe["mlp middle"]
    for modules, saved in (
        (["moe"], routed),
        (["moe", "shared_experts", "core_attn"], routed + moe["attention"] + dense["attention"]),
        (["shared_experts"], moe["mlp middle"]),
        (["mlp"], dense["mlp middle"]),
    ):
        found = training_memory(model, Layout(), 1, 32, 1, recompute="selective", modules=modules)
        assert whole - found.activations == saved


@pytest.mark.parametrize(("layers", "dense_layers", "pp"), [(61, 3, 16), (61, 5, 8), (8, 0, 4), (27, 1, 2), (7, 3, 3)])
def test_layers_that_cannot_be_even_are_fewer_on_the_last_stage(layers, dense_layers, pp):
    model, layout = replace(SHAPE, layers=layers, dense_layers=dense_layers, dense_ffn=512), Layout(pp, pp=pp)
    (stages,) = zip(*(model.chunks_of_stage(layout, stage) for stage in range(pp)), strict=True)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert {len(stage) for stage in stages[:-1]} == {len(stages[0])} and 0 < len(stages[-1]) <= len(stages[0])
    assert sum(model.moe_layers(layout, stage) for stage in range(pp)) == layers - dense_layers
    whole, parts = model.parameters(Layout()), [model.parameters(layout, stage) for stage in range(pp)]
    assert (sum(one.dense for one in parts), sum(one.expert for one in parts)) == (whole.dense, whole.expert)
    for micro_batches in (1, 5, 64):
        held = [training_memory(model, layout, 1, 512, micro_batches, stage).total for stage in range(pp)]
        assert max(held) == max(held[stage] for stage in model.telling_stages(layout))
    device = GpuSpeed(1e12, 0.5)
    even = throughput(replace(model, layers=pp * len(stages[0])), layout, device, 1, 512, 8, 1e-3)
    assert throughput(model, layout, device, 1, 512, 8, 1e-3).step_seconds <= even.step_seconds


def test_leading_dense_layers_have_no_experts():
    model = ModelShape(2, 64, 4, 128, 8, 2, 96, dense_layers=1, dense_ffn=192)
    dense, moe = (layer_activations(model, Layout(), 1, 32, moe=moe) for moe in (False, True))
    assert dense["mlp middle"] == 2 * 32 * 192 * 3
    assert set(moe) - set(dense) == {"router", "expert input", "expert middle"}
    both = training_memory(model, Layout(), 1, 32, 1).activations
    assert both == sum(dense.values()) + sum(moe.values())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Layout(8, tp=3), "tp 3 x cp 1 x pp 1 does not divide the 8 ranks"),
        (lambda: Layout(8, ep=16), "expert-tp 1 x ep 16 x pp 1 does not divide the 8 ranks"),
        (lambda: SHAPE.parameters(Layout(16, ep=16)), "experts = 8 is not a multiple of ep = 16"),
        (lambda: state_memory(SHAPE, Layout(), zero=4), "ZeRO stage 4"),
        (lambda: training_memory(SHAPE, Layout(), 1, 8, 1, recompute="some"), "recompute some"),
    ],
)
def test_refuses(action, message):
    with pytest.raises(ValueError, match=message) as error:
        action()
    assert ("multiple" in message or "divide" in message) == isinstance(error.value, ConfigurationError)
