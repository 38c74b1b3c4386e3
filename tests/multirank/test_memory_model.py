"""The memory model against real Megatron-Core models on 4 ranks: parameters, buffers, optimizer states, saved bytes."""

from __future__ import annotations

from dataclasses import replace

import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.transformer.spec_utils import build_module
from packaging.version import Version

from megatron_moe_opt.planning.training.memory import layer_activations, logits_memory, state_memory
from megatron_moe_opt.planning.training.model import ModelShape, Parameters
from megatron_moe_opt.topology.layouts import Layout
from tests.ranks.gpt import VOCAB, gpt
from tests.ranks.megatron import moe_config, parallel
from tools.bench.live_memory import device_memory

WORLD = 4
SHAPE = ModelShape(layers=2, hidden=64, heads=4, vocabulary=VOCAB, experts=8, topk=2, ffn=96)
LAYOUTS = [
    {},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"tp": 4, "ep": 2, "etp": 2},
    {"tp": 2, "ep": 4},
    {"pp": 2, "ep": 2},
    {"pp": 2, "tp": 2, "etp": 2},
]


def layout_of(sizes):
    """Sizes by the names that `parallel` has for them."""
    return Layout(WORLD, **{{"etp": "expert_tp"}.get(name, name): size for name, size in sizes.items()})


def _config(shape, **changes):
    """Megatron's configuration of a shape."""
    return {
        "num_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        "moe_layer_freq": [0] * shape.dense_layers + [1] * (shape.layers - shape.dense_layers),
        "ffn_hidden_size": shape.dense_ffn or shape.ffn,
        "kv_channels": shape.head_size,
        "gated_linear_unit": shape.gated,
        "activation_func": torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        "add_bias_linear": shape.bias,
        "normalization": "RMSNorm" if shape.norm_parameters == 1 else "LayerNorm",
        "qk_layernorm": shape.qk_norm,
    } | changes


def _counted(shape):
    """(stage, parameters of this rank's part of the model)."""
    config = moe_config(**_config(shape))
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=shape.vocabulary,
        max_sequence_length=32,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )
    dense = expert = 0
    for name, parameter in model.named_parameters():
        if ".local_experts." in name:
            expert += parameter.numel()
        else:
            dense += parameter.numel()
    return parallel_state.get_pipeline_model_parallel_rank(), Parameters(dense, expert)


def _counts_of_layouts(shape, layouts):
    found = []
    for layout in layouts:
        with parallel(**layout):
            found.append(_counted(shape))
    return found


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        ModelShape(2, 64, 8, VOCAB, 8, 2, 96, kv_heads=4, head_size=16, qk_norm=True, tied=True),
        ModelShape(2, 64, 4, VOCAB, 4, 2, 32, gated=False, bias=True, norm_parameters=2),
        ModelShape(4, 64, 4, VOCAB, 8, 2, 96, shared_ffn=48, dense_layers=1, dense_ffn=192),
        ModelShape(4, 64, 4, VOCAB, 8, 2, 96, bias=False, dense_layers=3, dense_ffn=64),
    ],
)
def test_parameters_are_those_of_the_model(ranks, shape):
    layouts = [layout for layout in LAYOUTS if not shape.bias or layout.get("etp", 1) == 1]  # Megatron's restriction
    for rank, found in enumerate(ranks.run(_counts_of_layouts, shape=shape, layouts=layouts)):
        for layout, (stage, counted) in zip(layouts, found, strict=True):
            assert shape.parameters(layout_of(layout), stage) == counted, (rank, layout)


def _buffers(layout, distributed_optimizer):
    """(stage, bytes of weights, of gradients, of optimizer states) of a bf16 model after a step."""
    with parallel(**layout):
        model = gpt(bf16=True, microbatches=1, distributed_optimizer=distributed_optimizer)
        model.train_step()
        weights = sum(parameter.nbytes for parameter in model.model.parameters())
        buffers = model.model.buffers + model.model.expert_parallel_buffers
        gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
        optimizer = 0
        for chained in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
            seen = {}
            for group in chained.optimizer.param_groups:
                for main in group["params"]:
                    seen[id(main)] = main.nbytes
                    for state in chained.optimizer.state[main].values():
                        if torch.is_tensor(state) and state.numel() > 1:
                            seen[id(state)] = state.nbytes
            optimizer += sum(seen.values())
        return parallel_state.get_pipeline_model_parallel_rank(), weights, gradients, optimizer


@pytest.mark.parametrize("layout", [{"ep": 4}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}])
@pytest.mark.parametrize("zero", [0, 1])
def test_bytes_of_weights_gradients_and_optimizer(ranks, layout, zero):
    """Megatron's distributed optimizer is ZeRO-1; without it every rank holds all states. Buffers are padded."""
    found = ranks.run(_buffers, layout=layout, distributed_optimizer=zero == 1)
    for stage in range(layout.get("pp", 1)):
        of_stage = [sizes for at, *sizes in found if at == stage]
        expected = state_memory(SHAPE, layout_of(layout), stage, zero)
        for weights, gradients, _ in of_stage:
            assert weights == expected.weights
            assert expected.gradients <= gradients <= expected.gradients + 4096
        optimizer = sum(optimizer for *_, optimizer in of_stage) / len(of_stage)  # shards need not be equal
        assert optimizer == pytest.approx(expected.optimizer, rel=1e-9)


def _saved(shape, layout, sequence, micro_batch, **changes):
    """(bytes of the storages that one layer's forward keeps for backward, rows that its experts computed)."""
    with parallel(**layout):
        config = moe_config(
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            **_config(shape, num_layers=1, moe_layer_freq=1, **changes),
        )
        spec = get_gpt_layer_local_spec(
            num_experts=shape.experts, moe_grouped_gemm=False, normalization=config.normalization
        )
        layer = build_module(spec, config=config, layer_number=1).to(torch.bfloat16).cuda()
        rope = RotaryEmbedding(config.kv_channels, 1.0)(sequence)
        mask = torch.ones(1, 1, sequence, sequence).triu(1).bool()
        tokens = torch.randn(
            sequence // layout.get("tp", 1), micro_batch, shape.hidden, dtype=torch.bfloat16, requires_grad=True
        )
        rows = []
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        kept = {}
        not_activations = {tensor.untyped_storage().data_ptr() for tensor in [mask, *layer.parameters()]}

        def pack(tensor):
            storage = tensor.untyped_storage()
            # The cosines and sines of the rotation are the same for every layer of a model that caches them.
            rotation = tensor.shape[1:3] == (1, 1) and tensor.size(0) == sequence
            if storage.data_ptr() not in not_activations and not rotation:
                kept[storage.data_ptr()] = storage  # alive, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(tokens, attention_mask=mask, rotary_pos_emb=rope)
        del output
        return sum(storage.nbytes() for storage in kept.values()), rows[0]


def _order_of_choices(shape, layout, tokens):
    """Returns the bytes that Megatron's own sorting keeps since 0.17, where it is not fused: the order of all choices
    [E, T] in int64, in the place of their map and probabilities.
    """
    sorts = Version(megatron.core.__version__) >= Version("0.17")
    return sorts * (8 - 1 - 2) * shape.experts * (tokens // layout.get("tp", 1))


def _unfused(shape, layout, micro_batch, sequence, rows):
    """Returns what Megatron's own layers keep, by what it is: PyTorch 2.6 keeps
    normalized inputs in their own type."""
    terms = layer_activations(shape, layout, micro_batch, sequence, rows, fused=False)
    if Version(torch.__version__) < Version("2.7"):
        terms["norms"] -= 2 * (4 - 2) * shape.hidden * micro_batch * (sequence // layout.tp)
    return terms


def _peak_of_loss(tokens, hidden, vocabulary, dtype):
    """The most bytes at once of the logits, their cross-entropy and its backward pass."""
    with parallel(tp=2):
        in_16_bits = dtype is torch.bfloat16
        config = moe_config(bf16=in_16_bits, params_dtype=dtype, hidden_size=hidden)
        layer = ColumnParallelLinear(
            hidden, vocabulary, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        states = torch.randn(tokens // 2, 1, hidden, dtype=dtype, requires_grad=True)  # with sequence parallelism
        labels = torch.randint(vocabulary, (tokens, 1))

        def loss():
            logits, _ = layer(states)
            return vocab_parallel_cross_entropy(logits, labels).sum()

        with device_memory(states.device) as memory:
            loss().backward()
        return memory.peak


@pytest.mark.host_only(reason="memory is counted without what a GPU's matrix products take for themselves")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_as_large_as_they_are_counted(ranks, dtype):
    tokens, hidden, vocabulary = 256, 8, 8192
    shape = replace(SHAPE, vocabulary=vocabulary)
    counted = logits_memory(shape, Layout(WORLD, tp=2), 0, 1, tokens, dtype.itemsize)
    for peak in ranks.run(_peak_of_loss, tokens=tokens, hidden=hidden, vocabulary=vocabulary, dtype=dtype):
        assert peak == pytest.approx(counted, rel=0.05)


FUSED = pytest.mark.host_only(reason="a GPU's fused norm saves other bytes than the operations that it stands for")


@FUSED
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ({"ep": 1}, {}),
        ({"ep": 4}, {}),
        ({"tp": 2, "ep": 2}, {}),
        ({"tp": 4, "ep": 4}, {}),
        ({"tp": 2, "ep": 2, "etp": 2}, {}),
        ({"tp": 4, "etp": 4}, {}),
        ({"ep": 2}, {"kv_heads": 2}),
        ({"tp": 2, "ep": 2}, {"gated": False}),
        ({"tp": 2, "ep": 2}, {"shared_ffn": 48}),
    ],
)
def test_saved_bytes_are_those_that_autograd_keeps(ranks, layout, changes):
    """Not fused, as on the host: equal to the byte."""
    shape = ModelShape(**(vars(SHAPE) | changes))
    sequence, micro_batch = 64, 2
    found = ranks.run(_saved, shape=shape, layout=layout, sequence=sequence, micro_batch=micro_batch)
    for kept, rows in found:
        expected = _unfused(shape, layout_of(layout), micro_batch, sequence, rows)
        assert kept == sum(expected.values()) + _order_of_choices(shape, layout, sequence * micro_batch), expected


@FUSED
def test_selective_recompute_drops_the_attention_s_middle(ranks):
    layout, sequence = {"tp": 2, "ep": 2}, 64
    found = ranks.run(
        _saved,
        shape=SHAPE,
        layout=layout,
        sequence=sequence,
        micro_batch=2,
        recompute_granularity="selective",
        recompute_modules=["core_attn"],
    )
    for kept, rows in found:
        expected = _unfused(SHAPE, layout_of(layout), 2, sequence, rows)
        del expected["attention"]
        kind_of_mask = 4  # int32, an argument of the checkpointed function
        order = _order_of_choices(SHAPE, layout, sequence * 2)
        assert kept == sum(expected.values()) + order + kind_of_mask, expected
