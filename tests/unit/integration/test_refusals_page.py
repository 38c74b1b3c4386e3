"""docs/refusals.md: what its table says is refused is what the code refuses, cell by cell."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.checks import check_arguments, check_config
from megatron_moe_opt.options import Options
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.versions import megatron_is_before
from tests.unit.config_cases import MOVES, config

pytestmark = pytest.mark.usefixtures("registered")

PAGE = Path(__file__).parents[3] / "docs/refusals.md"
COLUMNS = {
    "`monta`": ("monta", {}),
    "`parm`": ("parm", {}),
    "`mpmoe`": ("mpmoe", {}),
    "`netmoe`": ("netmoe", {}),
    "`expert-migration` (no expert travels)": ("expert-migration", {}),
    "`expert-migration` (experts travel)": ("expert-migration", {"domain_sizes": (2,)}),
    "`auto`": ("auto", {}),
}
"""The dispatcher of each column, and the options that it has there."""

BASE = MOVES | {"expert_model_parallel_size": 4}
"""A configuration that every dispatcher takes."""
ARGUMENTS = {
    "num_experts": 4, "expert_model_parallel_size": 4, "save": None, "ckpt_format": "torch_dist",
    "non_persistent_ckpt_type": None, "use_distributed_optimizer": False, "dist_ckpt_optim_fully_reshardable": False,
}  # fmt: skip
REPLICATED = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
WITH_SP = REPLICATED | {"sequence_parallel": True}
ORDER = "the order's file"
"""Stands for the file of an order of experts that fits BASE."""


@dataclass(frozen=True)
class Case:
    """What a row speaks of: fields of TransformerConfig, Megatron-LM's arguments, options of ours."""

    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


_TRAVEL = {"way": "hops", "domain_sizes": (2,)}
VARIANTS = {
    "parm": {f"schedule {schedule}": Case(options={"parm_schedule": schedule}) for schedule in ("S2", "AAS")},
    "mpmoe": {
        **{strategy: Case(options={"memory_reuse": strategy}) for strategy in ("S1", "S2", "S3", "S4")},
        "joint": Case(WITH_SP | {"expert_tensor_parallel_size": 2}, options={"way": "joint"}),
        "hops": Case(options={"way": "hops"}),
        "travel": Case(options=_TRAVEL),
        "compressed": Case(options=_TRAVEL | {"gradient_compression_ratio": 9.0}),
        "one partition": Case(options={"partitions": 1}),
    },
    "netmoe": {
        "hops": Case(options={"way": "hops"}),
        "recomputed": Case({"recompute_granularity": "full"}),
    },
    "expert-migration": {
        "returned compressed": Case(options={"domain_sizes": (2,), "gradient_compression_ratio": 9.0}),
    },
}
"""The ways to run a dispatcher, or a model under it, on which a refusal may depend."""
CONDITIONS = {
    "with schedule S2": {"schedule S2", "schedule AAS"},
    "with memory reuse": {"S1", "S2", "S3", "S4"},
    "with memory reuse S1 or S2": {"S1", "S2"},
    "with hops": {"hops", "travel", "compressed"},
    "with joint": {"joint"},
    "where experts travel": {"travel", "compressed"},
    "with compressed gradients": {"compressed", "returned compressed"},
    "where MoE layers are recomputed": {"recomputed"},
}
"""The words of cells, and the variants under which alone a row is refused then."""
REFUSED, EXCEPTIONS = "refused", {"but for one partition": {"one partition"}}
"""What a cell says that is refused however it is run, and what it names behind that which is not."""

QUANTIZED = [Case({"fp8": "hybrid"}), Case({"fp4": "nvfp4"}), Case({"quant_recipe": object()})]
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
TOGETHER = {"options": {"expert_order": ORDER}}


def _arguments(*flags: str, **beside: Any) -> list[Case]:
    return [Case(arguments={flag[2:].replace("-", "_"): 10}, **beside) for flag in flags]


ROWS: dict[str, list[Case]] = {
    "`--expert-model-parallel-size 1`": [Case({"expert_model_parallel_size": 1})],
    "`--expert-model-parallel-size` x expert-TP that is no multiple, from 2 on, of TP x CP": [
        Case({"context_parallel_size": 4}), Case({"context_parallel_size": 3}),
    ],
    "`--expert-tensor-parallel-size 1`": [Case({"expert_tensor_parallel_size": 1})],
    "`--expert-tensor-parallel-size` above 1": [Case({"expert_tensor_parallel_size": 2})],
    "`--sequence-parallel`, at TP above 1": [Case(WITH_SP)],
    "`--tensor-model-parallel-size` without `--sequence-parallel`, where neither TP nor EP x expert-TP divides the "
    "other": [Case(REPLICATED | {"tensor_model_parallel_size": 3})],
    "`--moe-input-jitter-eps`, `--moe-router-force-load-balancing` or `--moe-router-force-biased`, at TP without "
    "`--sequence-parallel`": [
        Case(REPLICATED | {"moe_input_jitter_eps": 0.1}), Case(REPLICATED | {"moe_router_force_load_balancing": True}),
        Case(REPLICATED | {"moe_router_force_biased": 0.1}),
    ],
    "`--calculate-per-token-loss`": [Case({"calculate_per_token_loss": True})],
    "`--calculate-per-token-loss` with an auxiliary or z-loss, at TP without `--sequence-parallel`": [
        Case(REPLICATED | {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1}),
        Case(REPLICATED | {"calculate_per_token_loss": True, "moe_aux_loss_coeff": 0.1}),
    ],
    "`--moe-router-padding-for-quantization`, at TP without `--sequence-parallel`": [
        Case(REPLICATED | {"moe_router_padding_for_quantization": True}),
    ],
    "`--moe-latent-size`": [Case({"moe_latent_size": 8})],
    "`--moe-expert-capacity-factor`": [Case({"moe_expert_capacity_factor": 1.0}), Case(PADDED)],
    "`--moe-expert-capacity-factor` with `--moe-pad-expert-input-to-capacity`, `--moe-apply-probs-on-input` and "
    "biases": [
        Case(PADDED | {"moe_apply_probs_on_input": True, "add_bias_linear": True}),
    ],
    "`--moe-router-padding-for-quantization`": [Case({"moe_router_padding_for_quantization": True})],
    "`--moe-router-load-balancing-type` `sinkhorn` or `quantile_balancing`": [
        Case({"moe_router_load_balancing_type": one}) for one in ("sinkhorn", ["aux_loss", "quantile_balancing"])
    ],
    "`--moe-shared-expert-overlap`": [Case({"moe_shared_expert_overlap": True})],
    "`--moe-paged-stash`": [Case({"moe_paged_stash": True})],
    "`--fp16`": [Case({"fp16": True})],
    "`--fp8-format`, `--fp4-format`, `--te-precision-config-file` or `--kitchen-config-file`": QUANTIZED,
    "`--use-transformer-engine-op-fuser` or `--moe-use-grouped-tensor`": [
        Case({"use_transformer_engine_op_fuser": True}), Case({"moe_use_grouped_tensor": True}),
    ],
    "`--use-transformer-engine-op-fuser` with `--grad-reduce-in-bf16`": [
        Case(
            {
                "use_transformer_engine_op_fuser": True,
                "gradient_accumulation_fusion": True,
                "params_dtype": torch.bfloat16,
            },
            {"accumulate_allreduce_grads_in_fp32": False},
        )
    ],
    "`--delay-wgrad-compute`, `--moe-single-grouped-bias` or `--hybrid-context-parallel`": [
        Case({one: True}) for one in ("delay_wgrad_compute", "moe_single_grouped_bias", "hybrid_context_parallel")
    ],
    "`--hidden-dropout` above 0": [Case({"hidden_dropout": 0.1})],
    "`--fp32-residual-connection`, `--fused-residual-rmsnorm`, `--mlp-chunks-for-training`, `--mrope-section` or "
    "`--dsa-indexer-topk-freq`": [
        Case({"fp32_residual_connection": True}), Case({"fused_residual_rmsnorm": True}),
        Case({"mlp_chunks_for_training": 2}), Case({"mrope_section": [1, 1]}), Case({"dsa_indexer_topk_freq": 2}),
    ],
    "`--recompute-modules moe_act`": [Case({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]})],
    "`--recompute-modules layernorm`": [
        Case({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}),
    ],
    "`--fine-grained-activation-offloading`": [Case({"fine_grained_activation_offloading": True})],
    "`--fine-grained-activation-offloading` with `--offload-modules` `expert_fc1`": [
        Case({"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]}),
    ],
    "`--fine-grained-activation-offloading` with `--offload-modules` `moe_act` or `fused_group_mlp`": [
        Case({"fine_grained_activation_offloading": True, "offload_modules": [one]})
        for one in ("moe_act", "fused_group_mlp")
    ],
    "`--overlap-moe-expert-parallel-comm`": [Case(OVERLAP)],
    "`--overlap-moe-expert-parallel-comm` beside `--cuda-graph-impl` of `moe_router`": [
        Case(OVERLAP | GRAPHS | {"cuda_graph_scope": ["moe_router"]}),
    ],
    "`--cuda-graph-impl transformer_engine` of `attn`, `mlp`, `mamba` and `moe_router` alone": [
        Case(GRAPHS | {"cuda_graph_scope": ["attn", "mlp", "mamba", "moe_router"]}),
    ],
    "`--optimizer-cuda-graph`": _arguments("--optimizer-cuda-graph"),
    "`--deterministic-mode` or `--freeze-all-layers`": [
        Case({"deterministic_mode": True}), *_arguments("--freeze-all-layers"),
    ],
    "`--use-megatron-fsdp` or `--use-torch-fsdp2`": _arguments("--use-megatron-fsdp", "--use-torch-fsdp2"),
    "`--expert-tensor-parallel-num-weight-shards`": [Case({"expert_gtp_weight_remat_size": 2})],
    "`--flextron`": _arguments("--flextron"),
    "`--save-tokens-per-expert-interval`": _arguments("--save-tokens-per-expert-interval"),
    "`--save-activations-interval` or `--save-dgrads-interval`": _arguments(
        "--save-activations-interval", "--save-dgrads-interval"
    ),
    "`--moe-routing-trace-path`, `--reset-attention-mask` or `--export-kd-teacher-load`": _arguments(
        "--moe-routing-trace-path", "--reset-attention-mask", "--export-kd-teacher-load"
    ),
    "`--perform-rl-step`": _arguments("--perform-rl-step"),
    # what all refuse alike
    "`--num-experts` not given": [Case({"num_moe_experts": None})],
    "`--expert-model-parallel-size` that does not divide `--num-experts`": [Case(arguments={"num_experts": 7})],
    "`--expert-tensor-parallel-size` unlike TP, at EP 1, before Megatron 0.19": [
        Case({"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 1}),
    ],
    "`--moe-latent-size`, at TP without `--sequence-parallel`": [Case(REPLICATED | {"moe_latent_size": 8})],
    "`--moe-expert-capacity-factor` above experts / top-k, with `--moe-pad-expert-input-to-capacity`": [
        Case(PADDED | {"moe_expert_capacity_factor": 2.1}),
    ],
    "`--fp16` beside `--moe-opt-wire bf16`": [Case({"fp16": True}, options={"wire": "bf16"})],
    "`--fp8-format`, `--fp4-format`, `--te-precision-config-file` or `--kitchen-config-file`, beside `--moe-opt-wire` "
    "in 8 bits": [
        Case(one.config, options={"wire": wire}) for one in QUANTIZED for wire in ("fp8", "mxfp8")
    ],
    "`--overlap-moe-expert-parallel-comm`, at TP without `--sequence-parallel`": [Case(OVERLAP | REPLICATED)],
    "`--overlap-dispatch-backward-with-experts-wgrad`": [Case({"overlap_dispatch_backward_with_experts_wgrad": True})],
    "`--cuda-graph-impl transformer_engine` of `moe_router`, at TP without `--sequence-parallel`": [
        Case(GRAPHS | REPLICATED | {"cuda_graph_scope": ["moe_router"]}),
    ],
    "`--cuda-graph-impl` of anything else": [
        Case({"cuda_graph_impl": "local"}), Case(GRAPHS | {"cuda_graph_scope": []}),
        Case(GRAPHS | {"cuda_graph_scope": ["attn", "moe"]}), Case(GRAPHS | {"cuda_graph_scope": ["moe_preprocess"]}),
    ],
    "`--batch-invariant-mode`, from Megatron 0.20 on": [Case({"batch_invariant_mode": True})],
    "`--transformer-impl inference_optimized`": [Case({"transformer_impl": "inference_optimized"})],
    "`--moe-enable-deepep`, `--fake-process-group` or `--inprocess-restart`": _arguments(
        "--moe-enable-deepep", "--fake-process-group", "--inprocess-restart"
    ),
    "`--cuda-graph-impl`, or either of the flags that overlap (`--overlap-...`), beside `--moe-opt-telemetry`": [
        Case(one, options={"telemetry": True})
        for one in (
            GRAPHS | {"cuda_graph_scope": ["attn"]}, OVERLAP, {"overlap_dispatch_backward_with_experts_wgrad": True},
        )
    ],
    "`--mtp-num-layers` in a hybrid model (`--hybrid-layer-pattern`), beside `--moe-opt-telemetry`": [
        Case({"mtp_num_layers": 2, "is_hybrid_model": True}, options={"telemetry": True})
    ],
    "`--moe-grouped-gemm`, `--mtp-num-layers`, `--use-cpu-initialization`, `--init-model-with-meta-device`, "
    "`--fp8-format`, `--fp4-format`, `--te-precision-config-file` or `--kitchen-config-file`, beside "
    "`--moe-opt-expert-order`": [
        Case(one, **TOGETHER)
        for one in (
            {"moe_grouped_gemm": True}, {"mtp_num_layers": 1}, {"use_cpu_initialization": True},
            {"init_model_with_meta_device": True}, *(case.config for case in QUANTIZED),
        )
    ],
    "`--save-params-interval`, `--save-wgrads-interval`, `--save-dgrads-interval`, "
    "`--save-activations-interval`, `--moe-routing-trace-path` or `--perform-rl-step`, beside "
    "`--moe-opt-expert-order`": _arguments(
        "--save-params-interval", "--save-wgrads-interval", "--save-dgrads-interval", "--save-activations-interval",
        "--moe-routing-trace-path", "--perform-rl-step", **TOGETHER,
    ),
    "`--ckpt-format` other than `torch_dist`, or `--non-persistent-ckpt-type local`, with `--save`, beside "
    "`--moe-opt-expert-order`": [
        Case(arguments={"save": "folder", "ckpt_format": "torch"}, **TOGETHER),
        Case(arguments={"save": "folder", "non_persistent_ckpt_type": "local"}, **TOGETHER),
    ],
    "`--use-distributed-optimizer` without `--dist-ckpt-optim-fully-reshardable`, with `--save`, beside "
    "`--moe-opt-expert-order`": [
        Case(arguments={"save": "folder", "use_distributed_optimizer": True}, **TOGETHER),
    ],
}  # fmt: skip
"""The cases of each row, all of which are refused, or let through, alike."""
OF_OLDER = {"`--expert-tensor-parallel-size` unlike TP, at EP 1, before Megatron 0.19": (0, 19)}
"""Rows that speak of versions before this one."""
OF_NEWER = {"`--batch-invariant-mode`, from Megatron 0.20 on": (0, 20)}
"""Rows that speak of this version and those after it."""
ALSO_NAMED = {"`--expert-model-parallel-size 1`": ("--moe-opt-domain-sizes",)}
"""What a refusal may name that its row does not."""


def _table() -> dict[str, dict[str, str]]:
    """Returns the cells of the page's table by row and column."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    columns, _, *rows = ([cell.strip() for cell in line] for line in lines)
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


@pytest.fixture(scope="module")
def configurations(registered) -> dict[str, Any]:
    """A configuration of each dispatcher."""
    return {name: config(name, **BASE) for name, _ in COLUMNS.values()}


@pytest.fixture
def is_refused(configurations, monkeypatch, tmp_path):
    """Returns the sentence with which the code refuses these cases together under a column's dispatcher, or nothing."""
    order = tmp_path / "order.json"
    facts = {"format": "moe-opt expert order", "version": 1, "num_experts": 4, "nodes": 1, "ranks": 4}
    order.write_text(json.dumps(facts | {"layers": {"1": [[0], [1], [2], [3]]}}))

    def is_refused(column: str, *cases: Case) -> str:
        name, of_column = COLUMNS[column]
        made = copy.copy(configurations[name])
        arguments, given = SimpleNamespace(**ARGUMENTS, moe_token_dispatcher_type=name), dict(of_column)
        for case in cases:
            for key, value in case.config.items():
                setattr(made, _field(made, key), value)
            vars(arguments).update(case.arguments)
            given |= case.options
        if given.get("expert_order") == ORDER:
            given["expert_order"] = order
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
        try:
            options = Options(**given)
            check_arguments(arguments, options, refuses_unread=True)
            check_config(made, name, options)
            if (system := system_of(name)) is not None:  # what follows when the layer is built
                system.domains(options, (made.expert_model_parallel_size,))
        except ConfigurationError as error:
            return str(error)
        return ""

    return is_refused


def _field(made: Any, name: str) -> str:
    renamed = name == "cuda_graph_scope" and hasattr(made, "cuda_graph_modules")  # in Megatron 0.19
    return "cuda_graph_modules" if renamed else name


def _expected(column: str, cell: str) -> tuple[bool, set[str]]:
    """Returns whether a row is refused however a dispatcher is run; and the variants under which it is not alike."""
    whole, _, exception = cell.partition(", ")
    if whole == REFUSED:
        return True, EXCEPTIONS[exception] if exception else set()
    unlike = [CONDITIONS[word] & _variants(column).keys() for word in re.split(", or ", cell) if word]
    assert all(unlike), f"{column}: {cell} says nothing of this dispatcher"
    return False, set().union(*unlike)


def test_the_table_has_every_row_and_column():
    table = _table()
    assert list(table) == list(ROWS)
    assert all(list(row) == list(COLUMNS) for row in table.values())


@pytest.mark.parametrize("column", COLUMNS)
def test_every_way_to_run_a_dispatcher_is_let_through_by_itself(is_refused, column):
    """Or a row that is refused with it would say nothing."""
    assert not is_refused(column)
    for variant, case in _variants(column).items():
        assert not is_refused(column, case), variant
    for case in sum(ROWS.values(), []):
        assert column == "`auto`" or not is_refused(column, Case(options=case.options)), case


def _variants(column: str) -> dict[str, Case]:
    name, given = COLUMNS[column]
    return VARIANTS.get(name, {}) if name != "expert-migration" or given else {}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_says_is_what_the_code_refuses(is_refused, row):
    if row in OF_OLDER and not megatron_is_before(*OF_OLDER[row]):
        pytest.skip("this Megatron is newer")
    if row in OF_NEWER and megatron_is_before(*OF_NEWER[row]):
        pytest.skip("this Megatron is older")
    flags = {*re.findall("--[a-z0-9-]*[a-z0-9]", row), *ALSO_NAMED.get(row, ())}
    for column, cell in _table()[row].items():
        always, unlike = _expected(column, cell)
        for case in ROWS[row]:
            told = f"{column}: {cell or 'works'}, but {case}"
            sentence = is_refused(column, case)
            assert bool(sentence) == always, told
            assert not always or any(flag in sentence for flag in flags), f"{told} is refused for something else"
            found = {name for name, one in _variants(column).items() if bool(is_refused(column, one, case)) != always}
            assert found == unlike, f"{told}: {found}"


def test_a_cell_that_is_wrong_is_found(is_refused, monkeypatch):
    """Were it not, the tests above would say nothing."""
    table = _table()
    for row, column, cell in (
        ("`--hidden-dropout` above 0", "`monta`", "refused"),
        ("`--hidden-dropout` above 0", "`netmoe`", ""),
        ("`--fine-grained-activation-offloading`", "`mpmoe`", "with memory reuse S1 or S2"),
        (
            "`--use-transformer-engine-op-fuser` or `--moe-use-grouped-tensor`", "`mpmoe`",
            "with memory reuse, or where experts travel",
        ),
    ):  # fmt: skip
        wrong = copy.deepcopy(table)
        assert wrong[row][column] != cell
        wrong[row][column] = cell
        with monkeypatch.context() as patched:
            patched.setitem(globals(), "_table", lambda wrong=wrong: wrong)
            with pytest.raises(AssertionError, match=re.escape(f"{column}: {cell or 'works'}, but")):
                test_what_a_row_says_is_what_the_code_refuses(is_refused, row)
