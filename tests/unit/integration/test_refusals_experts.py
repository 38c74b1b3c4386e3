"""What is refused where experts are called once a partition (`mpmoe`), or travel."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto import first_step
from megatron_moe_opt.integration.checks import check_config
from megatron_moe_opt.integration.layer import expert_migration_layer
from megatron_moe_opt.integration.layer.layer_seam import own_method
from megatron_moe_opt.options import Options, split_options
from megatron_moe_opt.systems import system_of
from tests.unit.config_cases import config, refusal

pytestmark = pytest.mark.usefixtures("registered")


REPLICATED = {"tensor_model_parallel_size": 2, "sequence_parallel": False}


@pytest.mark.parametrize(
    ("field", "value", "flag", "names"),
    [
        (
            "expert_gtp_weight_remat_size",
            2,
            "--expert-tensor-parallel-num-weight-shards",
            ("mpmoe", "expert-migration"),
        ),
        ("moe_paged_stash", True, "--moe-paged-stash", ("mpmoe",)),
    ],
)
def test_what_megatron_019_does_with_experts_that_are_called_once_is_refused(field, value, flag, names):
    for name in ("monta", *names):
        ours = config(name)
        setattr(ours, field, value)
        if name == "monta":
            check_config(ours, name, Options())
            continue
        with pytest.raises(ConfigurationError, match=f"{flag} .* --moe-token-dispatcher-type {name} .* or use monta"):
            check_config(ours, name, Options())


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--flextron", True, "multiplies experts' rows by what a router of its own has chosen"),
        ("--save-tokens-per-expert-interval", 10, "saves what experts' last call in a step has"),
        ("--save-activations-interval", 10, "saves what experts' last call in a step has"),
        ("--save-dgrads-interval", 10, "saves what experts' last call in a step has"),
    ],
)
def test_hooks_of_experts_are_refused_where_nobody_else_calls_these(monkeypatch, flag, value, why):
    arguments = SimpleNamespace(**{flag[2:].replace("-", "_"): value})
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
    for name in ("mpmoe", "expert-migration"):
        refusal(f"{flag} {why}", name=name)
    assert first_step.refusal(config("auto"), "mpmoe:4").startswith(f"{flag} {why}")
    config("monta")
    vars(arguments).clear()
    config("mpmoe")


def test_rows_that_are_filled_up_and_count_do_not_hop():
    """A row of probability 0 gives the second bias, where the probability is on the input: stock adds it."""
    counting = {
        "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True, "moe_router_topk": 1,
        "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True, "add_bias_linear": True,
        "expert_model_parallel_size": 2,
    }  # fmt: skip
    sentence = "--moe-pad-expert-input-to-capacity with --moe-apply-probs-on-input has biases of experts count in rows"
    refusal(sentence, name="expert-migration", **counting)
    config("expert-migration", **counting | {"add_bias_linear": False})
    config("mpmoe", **counting)
    megatron_moe_opt.register(Options(way="hops"))
    try:
        refusal(f"{sentence} that are filled up, which --moe-opt-way hops does not send", name="mpmoe", **counting)
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("reuse", "settings", "sentence"),
    [
        ("S3", {"fp8": "hybrid"}, "--moe-opt-memory-reuse S3 does not know what experts in --fp8-format save: use"),
        ("S4", {"quant_recipe": object()}, "experts in --te-precision-config-file or --kitchen-config-file save: use"),
        (
            "S2",
            {"use_transformer_engine_op_fuser": True},
            "--moe-opt-memory-reuse S2 may offload what an expert's first matrix product makes, which --use-t",
        ),
        (
            None,
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            "--recompute-modules moe_act is recomputed by backward passes of the whole graph only",
        ),
        ("S4", {"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading offloads what"),
        (
            None,
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "moe_act"]},
            "--offload-modules moe_act brings back what experts saved in their last call first, and --moe-token-di",
        ),
        (None, {"moe_router_padding_for_quantization": True}, "--moe-router-padding-for-quantization pads an expert's"),
    ],
    ids=str,
)
def test_what_partitions_do_not_go_with_is_refused(reuse, settings, sentence):
    ours = config("mpmoe")
    for name, value in settings.items():
        setattr(ours, name, value)
    check_config(config("mpmoe"), "mpmoe", Options(memory_reuse=reuse))
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        check_config(ours, "mpmoe", Options(memory_reuse=reuse))
    if reuse is not None:
        check_config(ours, "mpmoe", Options())


def test_a_fused_expert_may_be_recomputed_and_not_offloaded():
    ours = config("mpmoe")
    ours.use_transformer_engine_op_fuser = True
    check_config(ours, "mpmoe", Options(memory_reuse="S3"))
    with pytest.raises(ConfigurationError, match="--moe-opt-memory-reuse auto may offload .* --use-transformer-engine"):
        check_config(ours, "mpmoe", Options(memory_reuse="auto", profile=Path("c.json")))


def test_rows_to_all_shards_at_once_need_experts_that_are_cut():
    joint, cut = Options(way="joint"), {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}
    check_config(config("mpmoe", **cut), "mpmoe", joint)
    with pytest.raises(
        ConfigurationError, match="--expert-tensor-parallel-size 1 experts are whole: give --moe-opt-way"
    ):
        check_config(config("mpmoe"), "mpmoe", joint)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"way": "hops"}, "--moe-opt-chunks 2 cuts rows that go over EP and then over expert-TP, and with "
         "--moe-opt-way hops others may: give --moe-opt-way rows, or drop it"),
        ({"way": "auto", "profile": Path("c.json")}, "with --moe-opt-way auto others may"),
        ({"memory_reuse": "S3"}, "and with --moe-opt-memory-reuse S3 they would wait for each other's buffers"),
        ({"memory_reuse": "auto", "profile": Path("c.json")}, "with --moe-opt-memory-reuse auto they would wait"),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_of_partitions_go_by_rows_and_share_no_memory(options, sentence):
    check_config(config("mpmoe"), "mpmoe", Options(chunks=2))
    check_config(config("mpmoe"), "mpmoe", Options(chunks=1, **options))
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        check_config(config("mpmoe"), "mpmoe", Options(chunks=2, **options))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "with --sequence-parallel or --tensor-model-parallel-size 1 ranks have tokens of their own: give --moe"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "ranks have tokens of their own: give --moe"),
        (REPLICATED | {"moe_expert_capacity_factor": 1.0}, "which trains another function than with each rank's part"),
        (REPLICATED | {"moe_input_jitter_eps": 0.1}, "which --moe-opt-way shared-rows cannot bring together: drop it"),
    ],
    ids=str,
)
def test_rows_to_be_shared_out_need_tokens_that_all_tp_ranks_hold_and_route_alike(settings, sentence):
    shared = Options(way="shared-rows")
    check_config(config("mpmoe", **REPLICATED), "mpmoe", shared)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        check_config(config("mpmoe", **settings), "mpmoe", shared)


@pytest.mark.parametrize(
    ("options", "settings", "sentence"),
    [
        ({"domain_sizes": (2,), "way": "hops"}, {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2},
         "--expert-tensor-parallel-size 2 cuts experts, which do not travel in parts: set it to 1, or drop "
         "--moe-opt-domain-sizes 2"),
        ({"domain_sizes": (2,), "way": "hops"}, {"quant_recipe": object()}, "--moe-opt-domain-sizes 2 has experts "
         "travel, and --te-precision-config-file or --kitchen-config-file keeps state of weights in the module"),
        ({"domain_sizes": (2, 1)}, {}, "--moe-opt-domain-sizes 2,1 has experts travel between ranks to which tokens "
         "then do not hop, and rows do not hop at all: give --moe-opt-way hops, or drop it"),
        ({"domain_sizes": "auto", "profile": "p"}, {}, "--moe-opt-domain-sizes auto is not for "
         "--moe-token-dispatcher-type mpmoe to choose: name the sizes"),
        ({"prefetch_layers": 0}, {}, "--moe-opt-prefetch-layers 0 is about experts that travel, and under"),
        ({"profile": "p", "compression_ratio": 4.0}, {}, "--moe-opt-compression-ratio 4 is about experts that "
         "travel, and under --moe-token-dispatcher-type mpmoe none does"),
    ],
)  # fmt: skip
def test_what_experts_cannot_travel_through_partitions_with_is_refused(options, settings, sentence):
    megatron_moe_opt.register(Options(**options))
    try:
        refusal(sentence, name="mpmoe", **settings)
    finally:
        megatron_moe_opt.register()


def test_a_layer_without_the_experts_seam_is_refused():
    layer = SimpleNamespace(routed_experts_compute=lambda tokens: tokens)
    with pytest.raises(
        ConfigurationError, match="cannot plug into this megatron-core: MoELayer.routed_experts_compute"
    ):
        system_of("mpmoe").attach(layer, Options())


@pytest.mark.parametrize(("name", "options"), [("mpmoe", {}), ("expert-migration", {"domain_sizes": (2,)})])
def test_a_layer_whose_class_calls_experts_in_a_way_of_its_own_is_refused(name, options):
    class Own(MoELayer):
        def routed_experts_compute(self, hidden_states, probs):
            return super().routed_experts_compute(2 * hidden_states, probs)

    layer = Own.__new__(Own)
    torch.nn.Module.__init__(layer)
    with pytest.raises(ConfigurationError, match=r"Own\.routed_experts_compute is not Megatron's, and would not be"):
        system_of(name).attach(layer, Options(**options))


def test_what_is_ours_is_no_method_of_the_layers_own():
    """As where experts travel, whose call is a partial function: `auto` looks at such layers when it plans anew."""
    layer = MoELayer.__new__(MoELayer)
    torch.nn.Module.__init__(layer)
    for one in (expert_migration_layer._compute, functools.partial(expert_migration_layer._compute, layer)):
        layer.routed_experts_compute = one
        assert own_method(layer, "routed_experts_compute") is None
    layer.routed_experts_compute = functools.partial(test_what_is_ours_is_no_method_of_the_layers_own)
    assert own_method(layer, "routed_experts_compute") == "MoELayer.routed_experts_compute"


@pytest.mark.parametrize(
    ("sizes", "settings", "sentence"),
    [
        ((2, 1), {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}, "--expert-tensor-parallel-size 2 "
         "cuts experts, which do not travel in parts under --moe-token-dispatcher-type expert-migration: set it to 1"),
        ((2, 1), {"quant_recipe": object()}, "--moe-opt-domain-sizes 2,1 has experts travel, and --te-precision-config-"
         "file or --kitchen-config-file keeps state of weights in the module that they leave: drop it"),
    ],
)  # fmt: skip
def test_what_experts_cannot_travel_with_is_refused(sizes, settings, sentence):
    megatron_moe_opt.register(Options(domain_sizes=sizes))
    try:
        refusal(sentence, name="expert-migration", **settings)
        megatron_moe_opt.register(Options(domain_sizes=(1, 1)))
        if sizes is not None:  # where no expert travels, nothing is in the way
            config("expert-migration", **settings)
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--moe-opt-domain-sizes 2,0", "'2,0' is not a list of numbers from 1 on, separated by commas"),
        ("--moe-opt-prefetch-layers -1", "is not a number from 0 on"),
        ("--moe-opt-domain-sizes 2 --moe-opt-compression-ratio 1", "'1' is not a ratio above 1"),
        ("--moe-opt-domain-sizes 2 --moe-opt-resident-layers 1", "no room for --moe-opt-prefetch-layers 1 and the"),
        ("--moe-opt-domain-sizes 2 --moe-opt-gradient-compression-ratio inf", "'inf' is not a ratio above 1"),
    ],
)  # fmt: skip
def test_bad_options_of_migration_are_refused(arguments, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        split_options(arguments.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compression_ratio": 25.0}, "--moe-opt-compression-ratio 25 has nothing to compress where no expert"),
        ({"gradient_compression_ratio": 9.0}, "gradient-compression-ratio 9 has nothing to compress where no expert"),
        ({"resident_layers": 2}, "--moe-opt-resident-layers 2 bounds what is held of experts that travel, and none"),
        ({"prefetch_layers": 4}, "--moe-opt-prefetch-layers 4 is about experts that travel, and none does: give"),
        ({"residuals": "shared"}, "--moe-opt-residuals shared is about experts that travel, and none does: give"),
    ],
)
def test_what_is_about_experts_that_travel_is_refused_where_none_does(options, sentence):
    try:
        for name, more in (
            ("expert-migration", {}), ("mpmoe", {"way": "hops", "domain_sizes": (1, 1)}),
        ):  # fmt: skip
            megatron_moe_opt.register(Options(**options, **more))
            refusal(sentence, name=name)
        if "resident_layers" in options:
            megatron_moe_opt.register(Options(**options))
            config("auto")  # which may have them travel
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"residuals": "shared"},
            "--moe-opt-residuals shared says how compressed experts travel, and they travel whole",
        ),
        (
            {"compression_ratio": 25.0, "shared_expert_interval": 50},
            "--moe-opt-shared-expert-interval 50 is about --moe-opt-residuals shared: give that",
        ),
    ],
)
def test_what_is_about_compressed_experts_is_refused_where_none_are(options, sentence):
    try:
        megatron_moe_opt.register(Options(domain_sizes=(2,), **options))
        refusal(sentence, name="expert-migration")
    finally:
        megatron_moe_opt.register()


def test_options_of_migration():
    line = "--moe-opt-domain-sizes 2,4 --moe-opt-levels 2,8 --moe-opt-compression-ratio 25 --lr 1"
    options, rest = split_options([*line.split(), "--moe-opt-gradient-compression-ratio", "9.5"])
    domains = {"domain_sizes": (2, 4), "network_levels": (2, 8)}
    assert options == Options(**domains, compression_ratio=25.0, gradient_compression_ratio=9.5)
    assert rest == ["--lr", "1"]


def test_gradients_are_compressed_only_where_they_travel_and_keep_their_scale():
    options = Options(domain_sizes=(2,), gradient_compression_ratio=9.0)
    megatron_moe_opt.register(options)
    try:
        assert config("expert-migration", bf16=True).bf16
        refusal("--moe-opt-gradient-compression-ratio 9 keeps parts of gradients from step to step, and --fp16 changes "
                "the loss scale between them: use --bf16", name="expert-migration", fp16=True)  # fmt: skip
        refusal("--moe-opt-gradient-compression-ratio 9 keeps parts of gradients from step to step, and "
                "--calculate-per-token-loss divides each step's by its own", name="expert-migration",
                calculate_per_token_loss=True)  # fmt: skip
        for name in ("monta", "alltoall"):
            refusal("--moe-opt-gradient-compression-ratio 9 is for --moe-token-dispatcher-type mpmoe, expert-"
                    f"migration, not {name}", name=name)  # fmt: skip
        megatron_moe_opt.register(dataclasses.replace(options, profile=Path("c.json")))
        refusal("--moe-opt-gradient-compression-ratio 9 is lossy, which", name="auto")
    finally:
        megatron_moe_opt.register()


def test_gathered_experts_stay_in_as_many_layers_as_are_needed_ahead():
    limits = [
        Options(domain_sizes=(2,), **settings).resident_limit
        for settings in (
            {}, {"prefetch_layers": 3}, {"resident_layers": 5}, {"resident_layers": "all"}, {"compression_ratio": 9},
        )
    ]  # fmt: skip
    assert limits == [2, 4, 5, None, 2]
