"""What `netmoe` refuses: what cannot move with samples, and what tokens that hop do not go with."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.checks import check_config
from megatron_moe_opt.options import Options
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.variants import whole_variant
from tests.unit.config_cases import MOVES, config, refusal

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize(
    ("wrong", "overrides"),
    [
        ("--hidden-dropout 0.1", {"hidden_dropout": 0.1}),
        ("--fp32-residual-connection", {"fp32_residual_connection": True}),
        ("--recompute-modules layernorm", {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}),
        ("--moe-expert-capacity-factor", {"moe_expert_capacity_factor": 1.0}),
        (
            "--moe-shared-expert-overlap",
            {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True},
        ),
        (
            "--recompute-granularity selective with --te-precision-config-file or --kitchen-config-file",
            {"recompute_granularity": "selective", "recompute_modules": ["moe"], "quant_recipe": object()},
        ),
        ("--moe-latent-size", {"moe_latent_size": 8}),
        (
            "--moe-router-load-balancing-type sinkhorn",
            {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        ),
    ],
)
def test_netmoe_refuses_what_cannot_move_with_samples(wrong, overrides):
    refusal(f"{wrong} does not work with --moe-token-dispatcher-type netmoe", name="netmoe", **MOVES | overrides)


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--moe-router-load-balancing-type quantile_balancing", "moe_router_load_balancing_type", "quantile_balancing"),
        ("--moe-router-load-balancing-type sinkhorn", "moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("--dsa-indexer-topk-freq", "dsa_indexer_topk_freq", 2),
    ],
)
def test_netmoe_refuses_what_later_versions_of_megatron_balance_and_share_by_sample(flag, field, value):
    ours = config("netmoe", **MOVES)
    setattr(ours, field, value)
    with pytest.raises(ConfigurationError, match=f"{flag} does not work with --moe-token-dispatcher-type netmoe"):
        check_config(ours, "netmoe", Options())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--reset-attention-mask", True),
        ("--export-kd-teacher-load", "teacher"),
        ("--flextron", True),
        ("--moe-routing-trace-path", "folder"),
        ("--save-activations-interval", 10),
        ("--save-dgrads-interval", 10),
    ],
)
def test_netmoe_refuses_what_masks_compares_and_saves_the_samples_of_a_rank(monkeypatch, flag, value):
    arguments = SimpleNamespace(**{flag[2:].replace("-", "_"): value})
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
    refusal(f"{flag} does not work with --moe-token-dispatcher-type netmoe", name="netmoe", **MOVES)
    config("monta", **MOVES)
    vars(arguments).clear()
    config("netmoe", **MOVES)


def test_netmoe_refuses_groups_without_another_place_for_samples():
    assert config("netmoe", **MOVES).moe_token_dispatcher_type == "netmoe"
    refusal("= 1 is no multiple, from 2 on, of --tensor-model-parallel-size 1", name="netmoe")
    layout = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
    refusal("= 2 is no multiple, from 2 on, of --tensor-model-parallel-size 2", name="netmoe", **MOVES | layout)


def test_netmoe_refuses_a_megatron_without_its_seams(monkeypatch):
    monkeypatch.delattr(TransformerLayer, "_forward_mlp")
    with pytest.raises(ConfigurationError, match="cannot plug into this megatron-core: TransformerLayer._forward_mlp"):
        system_of("netmoe").attach(None, Options())


@pytest.mark.parametrize(
    ("options", "settings", "sentence"),
    [
        (
            {"way": "hops"},
            {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 1},
            "--expert-model-parallel-size 1 has all experts on every rank, and --moe-opt-way hops",
        ),
        (
            {"way": "hops", "monta_level": "O3"},
            {},
            "--moe-opt-monta-level is about the lanes of rows, and --moe-opt-way",
        ),
        (
            {"network_levels": (2, 1)},
            {},
            "--moe-opt-levels 2,1 says over which links tokens hop, and rows do not: give",
        ),
        (
            {"way": "hops"},
            {"moe_router_padding_for_quantization": True},
            "--moe-router-padding-for-quantization gives tokens more experts than top-k, and --moe-opt-way hops",
        ),
        (
            {"way": "joint"},
            {},
            "--moe-opt-way joint is for partitions, and samples of --moe-token-dispatcher-type netmoe",
        ),
        (
            {"way": "shared-rows"},
            {},
            "--moe-opt-way shared-rows is for partitions, and samples of --moe-token-dispatcher-type netmoe",
        ),
    ],
    ids=str,
)
def test_what_samples_whose_tokens_hop_do_not_go_with_is_refused(options, settings, sentence):
    check_config(config("netmoe", **MOVES), "netmoe", Options(way="hops", chunks=4, network_levels=(2, 1)))
    ours = config("netmoe", **MOVES)
    for name, value in settings.items():  # stock takes some with fp8 only
        setattr(ours, name, value)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        check_config(ours, "netmoe", Options(**options))


@pytest.mark.parametrize("variant", ["netmoe", "netmoe:O2x3", "netmoe:hops", "netmoe:hopsx4"])
def test_variants_of_netmoe_say_what_they_are(variant):
    assert whole_variant(variant, 1) == variant
