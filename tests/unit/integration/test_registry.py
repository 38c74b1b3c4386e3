"""Registration: our names are valid in Megatron, stock stays stock, and bad settings are one clear sentence."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_moe_opt
from megatron_moe_opt import versions
from megatron_moe_opt.errors import ConfigurationError, sentence
from megatron_moe_opt.integration import checks, registry
from megatron_moe_opt.integration.auto import first_step
from megatron_moe_opt.integration.auto.auto_layer import current_controller
from megatron_moe_opt.integration.layer.replicated_tokens import keeps_from_splitting_rows
from megatron_moe_opt.options import Options, options_help
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.versions import megatron_is_before
from tests.unit.config_cases import MOVES, config, refusal

pytestmark = pytest.mark.usefixtures("registered")


def test_groups_that_are_no_processgroups_of_pytorchs_own_are_refused():
    """As reinforcement learning has them that destroys and makes them anew between phases."""

    class Reloadable(dist.ProcessGroup):
        pass

    for own in range(3):
        ep, etp, joint = (Reloadable(0, 1) if one == own else dist.ProcessGroup(0, 1) for one in range(3))
        stock = SimpleNamespace(ep_group=ep, tp_group=etp, tp_ep_group=joint)
        with pytest.raises(ConfigurationError, match="^the process groups of MoE layers are Reloadables, .* alltoall"):
            registry._groups_of(stock)
    stock = SimpleNamespace(ep_group=dist.ProcessGroup(0, 1), tp_group=None, tp_ep_group=None)
    assert registry._groups_of(stock).ep is stock.ep_group


def test_argparse_choices_follow_from_the_annotation():
    (field,) = (f for f in dataclasses.fields(TransformerConfig) if f.name == registry.FIELD)
    ours = ("monta", "parm", "netmoe", "mpmoe", "deepspeed", "expert-migration", "auto")
    assert get_args(field.type) == ("allgather", "alltoall", "flex", *ours)
    (field,) = (f for f in dataclasses.fields(MLATransformerConfig) if f.name == registry.FIELD)
    assert "monta" in get_args(field.type)


@pytest.mark.parametrize("config_class", [TransformerConfig, MLATransformerConfig])
def test_configuration_keeps_our_name(config_class):
    ours = config(config_class=config_class)
    assert ours.moe_token_dispatcher_type == "monta"
    assert dataclasses.replace(ours, hidden_size=32).moe_token_dispatcher_type == "monta"
    assert copy.deepcopy(ours).moe_token_dispatcher_type == "monta"


def test_guards_of_post_init_see_alltoall():
    # Each of these is refused by Megatron for names it does not know as alltoall.
    overlap = config(moe_shared_expert_intermediate_size=16, moe_shared_expert_overlap=True)
    assert overlap.moe_shared_expert_overlap and overlap.moe_token_dispatcher_type == "monta"
    assert config(variable_seq_lengths=True).variable_seq_lengths
    with pytest.raises(ValueError, match="flex"):
        config(moe_enable_deepep=True)


def test_the_real_name_is_restored_when_megatron_refuses():
    ours = config()
    ours.moe_router_padding_for_quantization = True  # refused by stock without fp8
    with pytest.raises(ValueError, match="fp8"):
        ours.__post_init__()
    assert ours.moe_token_dispatcher_type == "monta"


def test_the_dense_model_that_a_mixture_is_upcycled_from_is_let_through(monkeypatch):
    """Megatron-LM builds it first, from the same command line without experts."""
    monkeypatch.setattr(checks, "training_arguments", lambda: types.SimpleNamespace(moe_use_upcycling=True))
    assert config(num_moe_experts=None).moe_token_dispatcher_type == "monta"
    monkeypatch.setattr(checks, "training_arguments", lambda: types.SimpleNamespace(moe_use_upcycling=False))
    refusal("--moe-token-dispatcher-type monta needs a mixture of experts", num_moe_experts=None)


def test_cuda_graphs_end_before_a_dispatcher_begins():
    """Attention, dense MLPs and the router are let through; what holds a dispatcher, and samples that move, are not."""
    graphs = {"cuda_graph_impl": "transformer_engine"}
    padded = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    assert config(**graphs, cuda_graph_scope=["attn", "moe_router"]).cuda_graph_impl == "transformer_engine"
    config(**graphs, cuda_graph_scope=["attn", "mlp"], num_layers=2, moe_layer_freq=[0, 1])
    for scope, why in (
        ([], "the whole layer is captured, with messages, which monta sends"),
        (["attn", "moe"], "moe captures messages, which monta sends on streams of its own"),
        (["moe_router", "moe_preprocess"], "moe_preprocess captures the packing of rows, whose result monta keeps"),
    ):
        refusal(f"monta: {why}", **graphs, **padded, cuda_graph_scope=scope)
    refusal("splits tokens", **graphs, cuda_graph_scope=["moe_router"], tensor_model_parallel_size=2)
    flag = "modules" if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__ else "scope"  # since 0.19
    refusal(
        f"--cuda-graph-impl transformer_engine --cuda-graph-{flag} attn does not work with --moe-token-dispatcher-type",
        name="netmoe",
        **MOVES,
        **graphs,
        cuda_graph_scope=["attn"],
    )


def test_registering_twice_wraps_once():
    wrapped = TransformerConfig.__post_init__, MoELayer.__init__
    megatron_moe_opt.register()
    assert (TransformerConfig.__post_init__, MoELayer.__init__) == wrapped


def test_bad_settings_are_refused_in_one_sentence():
    known = "allgather, alltoall, flex, monta, parm, netmoe, mpmoe, expert-migration, auto"  # without the reference
    with pytest.raises(ConfigurationError, match=f"mota is not a dispatcher: choose one of {known}$"):
        config("mota")
    refusal("--moe-token-dispatcher-type monta needs a mixture of experts", num_moe_experts=None)
    refusal("--expert-model-parallel-size 3 does not divide --num-experts 4", expert_model_parallel_size=3)
    # before Megatron, which would end in a traceback
    refusal(
        "--expert-model-parallel-size 2 does not divide --num-experts 7",
        num_moe_experts=7,
        expert_model_parallel_size=2,
    )
    uncut = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2, "add_bias_linear": False}
    if megatron_is_before(0, 19):
        refusal("--expert-tensor-parallel-size 2 beside --tensor-model-parallel-size 1 at", **uncut)
    assert config(**uncut, tensor_model_parallel_size=2, sequence_parallel=True).expert_tensor_parallel_size == 2
    refusal("--cuda-graph-impl local does not work with", cuda_graph_impl="local")
    refusal(
        "--transformer-impl inference_optimized brings its own",
        transformer_impl="inference_optimized",
        normalization="RMSNorm",
        moe_router_dtype="fp32",
    )


OVERLAP = MOVES | {"overlap_moe_expert_parallel_comm": True, "bf16": True}


def test_batches_overlap_where_only_the_dispatcher_is_ours():
    for name in ("monta", "parm", "expert-migration", "auto"):
        assert config(name, **OVERLAP, delay_wgrad_compute=True).overlap_moe_expert_parallel_comm
    for name in ("netmoe", "mpmoe"):
        refusal(f"{name} has a pipeline of its own through them: drop one of the two", name=name, **OVERLAP)
    replicated = {"tensor_model_parallel_size": 2} | OVERLAP
    refusal("splits the tokens that all TP ranks hold: add --sequence-parallel", **replicated)
    graphed = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]} | OVERLAP
    config("monta", **graphed)
    refusal("runs no router when a step begins, by which", name="auto", **graphed)
    megatron_moe_opt.register(Options(domain_sizes=(2,)))
    try:
        config("expert-migration", **OVERLAP)
        refusal("--delay-wgrad-compute keeps state of", name="expert-migration", delay_wgrad_compute=True, **OVERLAP)
        megatron_moe_opt.register(Options(telemetry=True))
        refusal("--overlap-moe-expert-parallel-comm does not run the stages of a MoE layer one after", **OVERLAP)
    finally:
        megatron_moe_opt.register()


def test_a_schedule_for_replicated_tokens_is_refused_under_sequence_parallelism():
    megatron_moe_opt.register(Options(parm_schedule="S2"))
    try:
        config("parm", tensor_model_parallel_size=2)
        with pytest.raises(ConfigurationError, match="--moe-opt-parm-schedule S2 splits what all TP ranks hold, but"):
            config("parm", tensor_model_parallel_size=2, sequence_parallel=True)
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("drawn", "settings"),
    [
        ("--moe-router-force-load-balancing", {"moe_router_force_load_balancing": True}),
        ("--moe-input-jitter-eps 0.1", {"moe_input_jitter_eps": 0.1}),
    ],
)
def test_a_routing_that_each_rank_draws_is_refused_where_tp_ranks_route_the_same_tokens(drawn, settings):
    replicated = {"tensor_model_parallel_size": 2} | settings
    refused = f"{drawn} has each rank of a TP group route the tokens that all of them hold in its own way"
    try:
        for schedule in ("S2", "AAS"):
            megatron_moe_opt.register(Options(parm_schedule=schedule))
            refusal(f"{refused}, which --moe-opt-parm-schedule {schedule} cannot", name="parm", **replicated)
            config("parm", **settings)  # no rank holds another's tokens
        refusal(f"{refused}, which --moe-token-dispatcher-type deepspeed cannot", name="deepspeed", **replicated)
        megatron_moe_opt.register(Options(parm_schedule="S1"))
        config("parm", **replicated)
        reason = keeps_from_splitting_rows(config("parm", **replicated))  # what a profile chooses between
        assert reason is None if drawn is None else reason.startswith(f"{drawn} has each rank")
    finally:
        megatron_moe_opt.register()


def test_rows_are_shared_out_in_a_tp_group_only_where_it_holds_a_joint_group_or_is_in_one():
    uneven = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3, "expert_tensor_parallel_size": 1}
    try:
        megatron_moe_opt.register(Options(parm_schedule="S2"))
        refusal("--tensor-model-parallel-size 2, which neither divides", name="parm", num_moe_experts=6, **uneven)
        config("parm", num_moe_experts=6, sequence_parallel=False, **uneven | {"expert_model_parallel_size": 6})
        megatron_moe_opt.register(Options(parm_schedule="S1"))
        config("parm", num_moe_experts=6, **uneven)
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("flag", "overrides"),
    [
        ("--cuda-graph-impl local", {"cuda_graph_impl": "local"}),
        (
            "--overlap-moe-expert-parallel-comm",
            {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "bf16": True},
        ),
    ],
)
def test_telemetry_needs_stages_one_after_another_under_stock_too(flag, overrides):
    config("alltoall", **overrides)
    megatron_moe_opt.register(Options(telemetry=True))
    try:
        config("alltoall")
        config("alltoall", num_moe_experts=None, cuda_graph_impl="local")
        refusal(f"{flag} does not run the stages of a MoE layer one after another, as", name="alltoall", **overrides)
    finally:
        megatron_moe_opt.register()


def test_no_expert_is_padded_to_more_rows_than_there_are_tokens():
    padded = {"moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "probs"}
    config(moe_expert_capacity_factor=2.0, **padded)
    config(moe_expert_capacity_factor=2.1)  # nothing is padded
    refusal("set it to at most 2, or drop the padding", moe_expert_capacity_factor=2.1, **padded)


@pytest.mark.parametrize("settings", [{"moe_z_loss_coeff": 0.1}, {"moe_aux_loss_coeff": [0.0, 0.1]}])
def test_rows_are_not_split_after_the_gate_where_its_losses_count_tokens(settings):
    """Megatron-Core 0.16 multiplies them by the router's tokens, which are those of all TP ranks then."""
    per_token = {"calculate_per_token_loss": True, "tensor_model_parallel_size": 2} | settings
    if isinstance(settings.get("moe_aux_loss_coeff"), list):
        per_token["moe_router_load_balancing_type"] = ["aux_loss", "seq_aux_loss"]
    sentence = "--calculate-per-token-loss counts a router's losses once for each token that it sees, on all TP ranks"
    refusal(f"{sentence}, which --moe-token-dispatcher-type deepspeed cannot", name="deepspeed", **per_token)
    megatron_moe_opt.register(Options(parm_schedule="S2"))
    try:
        refusal(f"{sentence}, which --moe-opt-parm-schedule S2 cannot bring together", name="parm", **per_token)
        config("parm", **per_token | {"calculate_per_token_loss": False})
        config("parm", **per_token | {"tensor_model_parallel_size": 1})
    finally:
        megatron_moe_opt.register()
    config("parm", **per_token)  # S1


def test_auto_is_refused_where_equal_runs_must_end_alike():
    refusal(
        "--deterministic-mode has equal runs end alike, and --moe-token-dispatcher-type auto chooses by measured times",
        name="auto",
        deterministic_mode=True,
    )
    config("monta", deterministic_mode=True)


@pytest.mark.parametrize("name", ["monta", "parm", "auto"])
def test_projections_of_latent_experts_need_sequence_parallelism_under_tp(name):
    latent = {"moe_latent_size": 8, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    refusal(
        "--moe-latent-size 8 has projections on all TP ranks, whose gradients nobody completes", name=name, **latent
    )
    config(name, **latent, sequence_parallel=True)


def test_steps_of_the_optimizer_in_a_graph_are_refused_where_they_are_counted(monkeypatch):
    monkeypatch.setattr(checks, "training_arguments", lambda: SimpleNamespace(optimizer_cuda_graph=True))
    config("monta")
    config("expert-migration")
    sentence = "--optimizer-cuda-graph replays steps of the optimizer without a word to --moe-token-dispatcher-type"
    refusal(f"{sentence} auto, which changes dispatchers between steps", name="auto")
    megatron_moe_opt.register(Options(domain_sizes=(2,)))
    try:
        refusal(f"{sentence} expert-migration, whose experts travel once a step", name="expert-migration")
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(("name", "what"), [("expert-migration", "experts"), ("mpmoe", "experts"), ("netmoe", "norms")])
def test_fully_sharded_weights_are_refused_where_modules_are_called_in_our_order(monkeypatch, name, what):
    loop = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(use_megatron_fsdp=True))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", loop)
    refusal(f"--moe-token-dispatcher-type {name} calls {what} in its own order: drop it", name=name, **MOVES)
    with registry.aside():  # what a profile measures beside the run is not sharded
        config(name, **MOVES)
    for name in ("monta", "parm"):
        config(name)


def test_a_stage_without_moe_layers_goes_along_where_register_came_after_the_configuration():
    """Its ranks have no layer to plan, and the others would wait for them after the first step."""
    made = config("auto")
    megatron_moe_opt.register()
    assert current_controller() is None
    LanguageModule(made, SimpleNamespace(cp=None, tp=None, pp=None, embd=None))
    assert current_controller() is not None


def test_a_model_that_is_given_to_such_a_wrapper_is_refused_without_megatron_lms_arguments(monkeypatch):
    """As under Megatron-Bridge. The wrapper then runs into what this environment lacks, which is its own matter."""
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars", raising=False)
    names = ("FullyShardedDataParallelV2", "FullyShardedDataParallel")  # the first from 0.20 on
    wrapper = next(found for name in names if (found := getattr(mcore_fsdp_adapter, name, None)) is not None)

    def wrapped(name: str) -> tuple[Exception, Any]:
        layer = MoELayer.__new__(MoELayer)
        torch.nn.Module.__init__(layer)
        layer.config = config(name, **MOVES)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (of either)
            wrapper(layer.config, None, module=torch.nn.ModuleList([layer]))
        return caught.value, layer.config

    for name, what in (("expert-migration", "experts"), ("mpmoe", "experts"), ("netmoe", "norms")):
        error, _ = wrapped(name)
        assert isinstance(error, ConfigurationError) and f"{name} calls {what} in its own order: drop it" in str(error)
    error, of_stock = wrapped("alltoall")
    assert not isinstance(error, ConfigurationError)
    assert "--use-megatron-fsdp" in first_step.refusal(of_stock, "mpmoe:4")  # as `auto` asks
    assert first_step.refusal(of_stock, "monta:O1") is None


@pytest.mark.parametrize(
    ("options", "name", "sentence"),
    [
        (
            {"monta_level": "O3"},
            "alltoall",
            "monta-level O3 is for --moe-token-dispatcher-type monta, netmoe, not alltoall",
        ),
        (
            {"chunks": 8},
            "parm",
            "chunks 8 is for --moe-token-dispatcher-type monta, netmoe, mpmoe, expert-migration, not parm: drop one of",
        ),
        (
            {"partitions": (2, 4), "profile": "c.json"},
            "monta",
            "partitions 2,4 is for --moe-token-dispatcher-type mpmoe, not monta",
        ),
        ({"way": "hops"}, "monta", "way hops is for --moe-token-dispatcher-type netmoe, mpmoe, not monta"),
        (
            {"domain_sizes": (2,)},
            "monta",
            "domain-sizes 2 is for --moe-token-dispatcher-type mpmoe, expert-migration, not",
        ),
        ({"network_levels": (2, 4)}, "deepspeed", "levels 2,4 is for --moe-token-dispatcher-type netmoe, mpmoe"),
        (
            {"prefetch_layers": 0},
            "allgather",
            "prefetch-layers 0 is for --moe-token-dispatcher-type mpmoe, expert-migration",
        ),
        (
            {"profile": "c.json"},
            "deepspeed",
            "profile c.json is for --moe-token-dispatcher-type monta, parm, netmoe, mpmoe, ",
        ),
        ({"profile": "c.json", "parm_schedule": "S1"}, "parm", "profile c.json has nothing to choose for --moe-token-"),
        ({"profile": "c.json"}, "mpmoe", "drop it, or give --moe-opt-partitions auto"),
        ({"profile": "c.json", "domain_sizes": (1,)}, "expert-migration", "or leave --moe-opt-domain-sizes at auto"),
    ],
    ids=str,
)
def test_options_that_change_nothing_are_refused(options, name, sentence):
    megatron_moe_opt.register(Options(**options), refuse_unread=True)
    try:
        refusal(sentence, name=name)
        megatron_moe_opt.register(Options(**options))  # a program may build layers of several kinds
        config(name)
    finally:
        megatron_moe_opt.register()


def test_chunks_at_the_level_that_has_none_are_refused():
    megatron_moe_opt.register(Options(chunks=8))
    try:
        refusal("--moe-opt-chunks 8 has no meaning at level O1, which does not cut, and is the one", name="monta")
    finally:
        megatron_moe_opt.register()


def test_a_refusal_that_megatron_raises_again_is_said_as_it_was():
    refused = ConfigurationError("--flag 3 is wrong: give 2")

    class Inner:
        def __init__(self) -> None:
            raise refused

    class Outer:
        def __init__(self) -> None:
            build_module(Inner)

    with pytest.raises(ConfigurationError, match="Outer$") as caught:
        build_module(Outer)
    assert sentence(caught.value) == str(refused)
    assert sentence(refused) == str(refused)


def test_every_option_says_who_reads_it():
    for field in dataclasses.fields(Options):
        assert bool(checks.readers(field.name)) == (field.name != "telemetry")
        assert field.metadata["flag"] in options_help()


def test_stock_is_left_alone():
    assert config("alltoall", tensor_model_parallel_size=2).moe_token_dispatcher_type == "alltoall"
    assert config("allgather").moe_token_dispatcher_type == "allgather"


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0", "1.0"])
def test_unsupported_megatron_is_refused(monkeypatch, version):
    monkeypatch.setattr(versions, "megatron_version", lambda: version)
    with pytest.raises(ConfigurationError, match=f"megatron-core {version} is not supported: install one from 0.16"):
        megatron_moe_opt.register()


def test_megatron_that_needs_a_newer_python_is_refused(monkeypatch):
    """It may begin with an older one, and end in an import of what that has not."""
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "11", "9"))
    monkeypatch.setattr(versions, "megatron_version", lambda: "0.17.1")  # which trains with it
    versions.check_megatron()
    monkeypatch.setattr(versions, "megatron_version", lambda: "0.18.2")
    with pytest.raises(ConfigurationError, match="megatron-core 0.18.2 does not run on Python .*: use Python 3.12 or"):
        megatron_moe_opt.register()
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "12", "0"))
    versions.check_megatron()


def test_missing_megatron_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "megatron_version", lambda: None)
    with pytest.raises(ConfigurationError, match="megatron-core is not installed: install megatron-core 0.16 to 0.20"):
        megatron_moe_opt.register()


def test_a_moved_seam_is_refused():
    @dataclasses.dataclass
    class Moved:
        moe_token_dispatcher_type: str = "alltoall"

    with pytest.raises(ConfigurationError, match="moe_token_dispatcher_type is not a field with a Literal type"):
        registry._stock_names(Moved)


@pytest.mark.parametrize(
    ("options", "name", "sentence"),
    [
        (Options(profile=Path("c.json"), profile_seconds=5), "auto",
         "--moe-opt-profile-seconds 5 is for an auto that measures the cluster itself, and --moe-opt-profile c.json"),
        (Options(profile=Path("c.json"), plan=Path("p.json")), "auto",
         "--moe-opt-profile c.json or runs what --moe-opt-plan p.json says: drop one of the two"),
        (Options(plan=Path("p.json"), activation_budget=1024), "auto",
         "--moe-opt-activation-budget 1024 bounds what --moe-token-dispatcher-type auto chooses, and --moe-opt-plan p"),
        (Options(plan=Path("p.json"), allow_lossy=True), "auto",
         "--moe-opt-allow-lossy is for an auto that chooses, and --moe-opt-plan p.json has been chosen"),
        (Options(profile=Path("c.json"), domain_sizes=(2,), compression_ratio=25.0), "auto",
         "--moe-opt-compression-ratio 25 is lossy, which --moe-token-dispatcher-type auto never is"),
        (Options(profile=Path("c.json"), monta_level="O3"), "auto",
         "--moe-opt-monta-level O3 is what --moe-token-dispatcher-type auto chooses: drop it"),
        (Options(activation_budget=1024), "mpmoe", "--moe-opt-activation-budget 1024 has nothing to choose"),
        (Options(plan=Path("p.json")), "monta", "plan p.json is for --moe-token-dispatcher-type auto, not monta"),
        (Options(plan=Path("p.json")), "alltoall", "plan p.json is for --moe-token-dispatcher-type auto, not alltoall"),
    ],
)  # fmt: skip
def test_auto_plans_by_one_thing_and_is_never_lossy(options, name, sentence):
    megatron_moe_opt.register(options)
    try:
        refusal(sentence, name=name)
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ({"num_experts": 7, "expert_model_parallel_size": 2}, {}, "--expert-model-parallel-size 2 does not divide"),
        ({"num_experts": None}, {"telemetry": True}, "--moe-opt-telemetry True is for MoE layers, and a model without"),
        ({"num_experts": None}, {"domain_sizes": (2, 1)}, "--moe-opt-domain-sizes 2,1 is for MoE layers"),
    ],
)
def test_arguments_are_refused_before_megatron_looks_at_them(monkeypatch, arguments, options, sentence):
    """Its own checks end with a traceback, or in a dense model that reads no option of ours.

    Whoever has imported megatron.training by then is held to it too.
    """
    arguments_of_loop, loop = (types.ModuleType(f"megatron.training.{name}") for name in ("arguments", "initialize"))
    validated = []
    arguments_of_loop.validate_args = loop.validate_args = lambda arguments, defaults: validated.append(arguments)
    for module in (arguments_of_loop, loop):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    registry.before_validation(lambda one: checks.check_arguments(one, Options(**options), True))
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        loop.validate_args(SimpleNamespace(**{"expert_model_parallel_size": 1} | arguments), {})
    assert not validated
    divisible = SimpleNamespace(num_experts=8, expert_model_parallel_size=2)
    loop.validate_args(divisible, {})
    assert validated == [divisible]
    checks.check_arguments(SimpleNamespace(num_experts=None, expert_model_parallel_size=1), Options(), True)


def test_arguments_in_checkpoints_name_a_dispatcher_that_stock_knows(monkeypatch):
    """Who makes a model by them may lack the package; the run's own stay what they are."""
    module = types.ModuleType("megatron.training.checkpointing")
    module.generate_state_dict = lambda args, model, iteration=None: {"args": args, "iteration": iteration}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry.name_in_checkpoints("alltoall", lambda name: name == "monta")
    for name, saved in (("monta", "alltoall"), ("allgather", "allgather")):
        arguments = SimpleNamespace(moe_token_dispatcher_type=name, hidden_size=8)
        found = module.generate_state_dict(arguments, None, iteration=3)
        assert found["iteration"] == 3 and vars(found["args"]) == {"moe_token_dispatcher_type": saved, "hidden_size": 8}
        assert arguments.moe_token_dispatcher_type == name


@pytest.mark.parametrize(
    ("name", "options", "way_out"),
    [
        ("parm", Options(profile=Path("cluster.json")), "--moe-opt-parm-schedule"),
        ("expert-migration", Options(profile=Path("cluster.json")), "--moe-opt-domain-sizes"),
    ],
)
def test_a_choice_for_the_first_pass_is_refused_where_that_is_of_a_rollout(name, options, way_out):
    arguments = SimpleNamespace(perform_rl_step=True)
    made = config(name, expert_model_parallel_size=4)
    sentence = f"and under --perform-rl-step that is of a rollout: drop it, and give {way_out}"
    with pytest.raises(ConfigurationError, match=sentence):
        system_of(name).check(made, options, arguments)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (
            "--moe-enable-deepep",
            "has rows sent by DeepEP, which flex does and --moe-token-dispatcher-type monta does not",
        ),
        (
            "--fake-process-group",
            "has no other ranks, from which --moe-token-dispatcher-type monta takes",
        ),
        (
            "--inprocess-restart",
            "begins a run anew in processes that --moe-token-dispatcher-type monta ends",
        ),
    ],
)
def test_flags_of_other_dispatchers_and_processes_are_refused(flag, why):
    arguments = SimpleNamespace(num_experts=4, expert_model_parallel_size=2, moe_token_dispatcher_type="monta")
    setattr(arguments, flag[2:].replace("-", "_"), True)
    for check in (
        lambda: checks.check_arguments(arguments, Options(), True),
        lambda: registry.check_named(["--moe-token-dispatcher-type", "monta", flag]),
    ):
        with pytest.raises(ConfigurationError, match=f"^{flag} {why}.*: drop it"):
            check()
    arguments.moe_token_dispatcher_type = "alltoall"
    checks.check_arguments(arguments, Options(), True)
    registry.check_named(["--moe-token-dispatcher-type", "alltoall", flag])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("netmoe", "--hidden-dropout 0.1"),
        ("auto", "--moe-token-dispatcher-type auto was written into a TransformerConfig that was made with alltoall"),
        ("monta", None),
    ],
)
def test_what_is_written_into_a_configuration_later_is_held_to_the_same(name, sentence):
    late = config("alltoall", **MOVES | {"hidden_dropout": 0.1})
    late.moe_token_dispatcher_type = name
    with nullcontext() if sentence is None else pytest.raises(ConfigurationError, match=re.escape(sentence)):
        registry._check_again(late, name)


def test_a_configuration_whose_checks_come_later_is_held_to_the_same():
    """Megatron-Bridge's is such: fields are set one by one, and finalize() may be called more than once."""

    @dataclasses.dataclass
    class Deferred(TransformerConfig):
        def __post_init__(self) -> None:
            pass

        def finalize(self) -> None:
            TransformerConfig.__post_init__(self)

    deferred = Deferred(num_layers=1, hidden_size=16, num_attention_heads=2, add_bias_linear=False)
    deferred.num_moe_experts, deferred.moe_token_dispatcher_type = 4, "monta"
    megatron_moe_opt.register(megatron_moe_opt.Options(monta_level="O3", chunks=2), refuse_unread=True)
    try:
        for _ in range(2):
            deferred.finalize()
        assert deferred.moe_token_dispatcher_type == "monta" and deferred.moe_ffn_hidden_size == 64
        deferred.moe_token_dispatcher_type = "parm"
        with pytest.raises(ConfigurationError, match="--moe-opt-monta-level O3 is for"):
            deferred.finalize()
    finally:
        megatron_moe_opt.register()


def test_gpus_need_an_extension_that_was_built_for_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "build_info", lambda: {"backend": "cpu"})
    registry.check_named(["--moe-token-dispatcher-type", "alltoall"])
    with pytest.raises(ConfigurationError, match="the compiled extension of megatron-moe-opt is for CPUs: run MOE_OPT"):
        registry.check_named(["--moe-token-dispatcher-type", "monta"])
    monkeypatch.setattr(registry, "build_info", lambda: {"backend": "cuda"})
    registry.check_named(["--moe-token-dispatcher-type", "monta"])
