"""A plan.json under `auto`: what a configuration cannot run, or layers cannot change to, is neither run nor tried."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator as calculators
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_moe_opt
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration import optimizer_step
from megatron_moe_opt.integration.auto import (
    auto_layer,
    first_step,
    given_plan,
    layers_in_turn,
    memory_room,
    step_clock,
)
from megatron_moe_opt.integration.auto import controller as controlling
from megatron_moe_opt.integration.auto import turns as turning
from megatron_moe_opt.integration.auto.auto_layer import current_controller
from megatron_moe_opt.integration.auto.auto_report import settled_lines
from megatron_moe_opt.integration.auto.controller import Controller
from megatron_moe_opt.integration.auto.first_step import Alike, FirstStep, Seen, SeenExperts
from megatron_moe_opt.integration.auto.look import NO_STEP, passes_held
from megatron_moe_opt.integration.auto.memory_room import COMMUNICATOR_BYTES, MOST_OF_FREE, Room
from megatron_moe_opt.integration.auto.move_costs import MoveCosts
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.layer import expert_migration_layer
from megatron_moe_opt.integration.micro_batches import _followed, later_micro_batches, trains
from megatron_moe_opt.integration.optimizer_step import gradients_cleared, step_ended
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.plan_file import TOKENS, Plan
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction, Refusal, told_together
from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of

CANDIDATES = ("netmoe", "parm:S2", "expert-migration:2x4", "expert-migration:8", "mpmoe:2:S1", "monta:O2x2", "alltoall")

PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SEEN = Seen(LayerWorkload(16, 16, 16, False, 8, 2, 4, 16, 8), 32.0)
DRAWN = {"tensor_model_parallel_size": 2, "moe_router_force_load_balancing": True}


@pytest.fixture
def planned(tmp_path: Path):
    """Builds a configuration with a plan for a variant."""
    megatron_moe_opt.use_host_backend()

    def build(variant: str, **overrides) -> Controller:
        predictions = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 0.0, 1) for name in CANDIDATES)
        Plan({1: variant}, predictions, "a cluster", ep=8, etp=1, experts=8).save(tmp_path / "plan.json")
        megatron_moe_opt.register(Options(plan=tmp_path / "plan.json"))
        TransformerConfig(
            num_layers=overrides.pop("num_layers", 1), hidden_size=16, num_attention_heads=2, num_moe_experts=8,
            moe_router_topk=2, expert_model_parallel_size=8,
            expert_tensor_parallel_size=overrides.pop("expert_tensor_parallel_size", 1), add_bias_linear=False,
            hidden_dropout=0.0, attention_dropout=0.0, moe_token_dispatcher_type="auto", **overrides,
        )  # fmt: skip
        return current_controller()

    yield build
    megatron_moe_opt.register()


def test_a_model_in_process_groups_of_its_own_needs_a_profile():
    """As Megatron-Bridge makes them on demand, and models of several parts, without Megatron's parallel state."""
    megatron_moe_opt.use_host_backend()
    with pytest.raises(ConfigurationError, match="measures in the process groups that Megatron makes, and this model"):
        MoveCosts(None, Options()).check(None)


@pytest.mark.parametrize(
    ("variant", "overrides", "message"),
    [
        ("netmoe", {"fp32_residual_connection": True}, "runs netmoe: --fp32-residual-connection does not"),
        ("expert-migration:8", {"quant_recipe": object()}, "keeps state of weights in the module that they leave"),
        ("parm:S2", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "drop one of the two"),
        ("parm:S2", DRAWN, "runs parm:S2: --moe-router-force-load-balancing has each rank of a TP group route"),
        ("alltoall", {"tensor_model_parallel_size": 2}, "stock Megatron does not train MoE layers under TP without"),
        ("monta:O2x4:fp8", {}, "has monta:O2x4:fp8, which rounds what travels, and auto trains like stock"),
        ("expert-migration:8:r50", {}, "has expert-migration:8:r50, which rounds what travels"),
        ("mpmeo", {}, "runs mpmeo, which is none of alltoall, monta, "),
        ("monta:O9", {}, "has monta:O9, which is no variant: "),
    ],
)
def test_what_cannot_run_is_refused_before_training(planned, variant, overrides, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        planned(variant, **overrides)
    assert "--moe-opt-plan" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 2}, "whose MoE layers are 1, and this one's are 1, 2: make a plan for this model"),
        ({"num_layers": 3, "moe_layer_freq": [0, 1, 1]}, "whose MoE layers are 1, and this one's are 2, 3"),
        ({"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size 2 is not what --moe-opt-plan"),
    ],
)
def test_a_plan_of_another_model_is_refused_before_training(planned, overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        planned("monta:O2x2", **overrides)
    planned("monta:O2x2", num_layers=2, moe_layer_freq=2)  # the first of two
    planned("monta:O2x2", num_layers=2, moe_layer_freq=[0, 1])  # as many: all run the same


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ({}, 2 * 1024),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}, 512),
        ({"tensor_model_parallel_size": 2}, 2 * 1024),  # all TP ranks hold the same
        ({"variable_seq_lengths": True}, None),
    ],
)
def test_tokens_that_a_plan_was_not_made_for_are_said(planned, monkeypatch, capsys, tmp_path, overrides, tokens):
    config, file = planned("monta:O2x2", **overrides).config, tmp_path / "other.json"
    arguments = SimpleNamespace(micro_batch_size=2, seq_length=1024)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=arguments))
    made = Plan.load(tmp_path / "plan.json")
    dataclasses.replace(made, made_for={TOKENS: 4096}).save(file)
    given_plan.read_plan(file, config)
    said = f"predictions may not hold: tokens of a rank {tokens} (there 4096); make a new plan\n"
    assert (said in capsys.readouterr().out) == (tokens is not None)
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars")  # another training loop, which does not say
    given_plan.read_plan(file, config)
    assert not capsys.readouterr().out


def tried(controller: Controller, workers: tuple[int, ...]) -> tuple[list[str], str | None]:
    workload = LayerWorkload(16, 16, 16, False, 8, 2, 4, 16, 8, workers=workers)
    (found,) = controller._make_plan(FirstStep(((Seen(workload, 32.0),), ())))
    assert {one.variant for one in (*found.predicted, *found.refused)} - {"allgather"} == set(CANDIDATES)
    return [one.variant for one in found.predicted], found.planned


def test_runners_up_that_cannot_run_are_not_tried(planned):
    controller = planned("monta:O2x2")
    others = ["mpmoe:2:S1", "monta:O2x2", "alltoall"]
    assert tried(controller, (2, 4)) == (["parm:S2", "expert-migration:2x4", *others], "monta:O2x2")
    assert tried(controller, (8,)) == (["parm:S2", "expert-migration:8", *others], "monta:O2x2")
    quantized = planned("monta:O2x2", quant_recipe=object())
    assert tried(quantized, (8,)) == (["parm:S2", *others[1:]], "monta:O2x2")


def test_what_an_earlier_start_has_ended_in_is_not_tried(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--save", str(tmp_path)])
    (tmp_path / "moe-opt-first-turns.txt").write_text("mpmoe:2:S1\nmonta:O2x2\nallgather\n")
    (found,) = planned("monta:O2x2")._make_plan(FirstStep(((SEEN,), ())))
    assert [one.variant for one in found.predicted] == ["parm:S2", "monta:O2x2", "alltoall"]  # what has run is no trial
    why = {one.variant: one.reason for one in found.refused}
    assert not found.beside and "an earlier start" in why["mpmoe:2:S1"] and why["allgather"] == why["mpmoe:2:S1"]


def test_what_tp_ranks_would_route_differently_is_not_tried(planned):
    (found,) = planned("monta:O2x2", **DRAWN)._make_plan(FirstStep(((SEEN,), ())))
    (reason,) = (one.reason for one in found.refused if one.variant == "parm:S2")
    assert reason.startswith("--moe-router-force-load-balancing has each rank of a TP group route the tokens that all")


def test_passes_in_which_graphs_are_captured_are_none_of_training(monkeypatch):
    """They come between steps, and are in no step's time."""
    from megatron.core.transformer import cuda_graphs

    module = torch.nn.Linear(1, 1)
    assert trains(module) and not trains(module.eval())
    monkeypatch.setattr(cuda_graphs, "is_graph_capturing", lambda: True)
    assert not trains(module.train())


def test_a_schedule_that_is_asked_for_before_the_first_step_knows_of_micro_batches(planned, monkeypatch):
    """Megatron-LM's loop asks so, once: experts that travel come into layers later."""
    stock = inspect.unwrap(schedules.forward_backward_no_pipelining)
    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", stock)
    planned("monta:O2x2")
    assert inspect.unwrap(schedules.forward_backward_no_pipelining) is stock
    assert schedules.forward_backward_no_pipelining is not stock


def test_allgather_is_tried_where_all_passes_have_as_many_tokens(planned):
    seen = [dataclasses.replace(SEEN, tokens=tokens) for tokens in ((16, 16), (16, 16), (12, 16))]
    controller = planned("monta:O2x2", bf16=True)
    (alike,), (unlike,) = (
        controller._make_plan(FirstStep((tuple(seen[:2]), tuple(one)))) for one in (seen[:1], seen[2:])
    )
    assert alike.beside == ("allgather",) and unlike.beside == ()
    (reason,) = (one.reason for one in unlike.refused if one.variant == "allgather")
    assert reason == "takes as many tokens from each rank, and passes had 12 to 16"


def test_what_layers_cannot_leave_stays(planned):
    dropping = {"tensor_model_parallel_size": 2, "moe_expert_capacity_factor": 1.5}
    assert tried(planned("netmoe"), (8,))[1] is None
    sinkhorn = {"tensor_model_parallel_size": 2, "moe_router_load_balancing_type": "sinkhorn"}
    for another_function in (dropping, sinkhorn):
        assert tried(planned("parm:S2", **another_function), (8,))[1] is None
    variants, chosen = tried(planned("parm:S2", tensor_model_parallel_size=2), (8,))
    assert chosen == "parm:S2" and "parm:S2" in variants


def test_layers_of_each_shape_are_planned_by_themselves(planned, monkeypatch):
    """Three layers of one shape and one of another, on a stage each: what takes longest comes first."""

    def predicted(workload, cluster, budget, wires):
        assert wires == ()  # what rounds rows is not asked for
        times = {"alltoall": 2.0 * workload.topk, "monta:O1": 3.0 + workload.topk}
        found = [Prediction(name, time, time, time, 0.0, workload.topk, {"all": time}) for name, time in times.items()]
        return tuple(sorted(found, key=lambda one: one.seconds)), ()

    monkeypatch.setattr(first_step, "candidates", predicted)
    monkeypatch.setattr(Cluster, "load", lambda file: SimpleNamespace(gpu_settings=None))
    controller = planned("monta:O2x2")
    controller.given = None
    few, many = (Seen(LayerWorkload(16, 16, 16, False, 8, topk, 4, 16, 8), 32.0, passes=2) for topk in (1, 5))
    of_many, of_few = controller._make_plan(FirstStep(((few,) * 3, (many,))))
    assert (of_few.planned, of_few.shape.topk, of_few.passes) == ("alltoall", 1, 6)
    assert (of_many.planned, of_many.shape.topk, of_many.passes) == ("monta:O1", 5, 2)
    assert [(one.variant, one.seconds) for one in of_many.predicted] == [("monta:O1", 8.0), ("alltoall", 10.0)]
    assert of_many.shape == dataclasses.replace(many.workload, tokens=0)


def test_samples_move_in_trials_only_where_that_may_be_the_fastest_and_trains_alike(planned, monkeypatch):
    times = {"monta:O1": 1.0, "netmoe:hops": 1.2, "alltoall": 2.0}

    def predicted(workload, *_):
        return tuple(Prediction(name, time * workload.topk, time, 0.0, 0.0, 1) for name, time in times.items()), ()

    monkeypatch.setattr(first_step, "candidates", predicted)
    monkeypatch.setattr(Cluster, "load", lambda file: SimpleNamespace(gpu_settings=None))
    controller = planned("monta:O2x2")
    controller.given = None
    seen = FirstStep(((SEEN,),), placement_saving=0.3)

    def refused(seen: FirstStep) -> str | None:
        found = controller._make_plan(seen)[0]
        reason = next((one.reason for one in found.refused if one.variant == "netmoe"), None)
        assert (reason is None) == ("netmoe:hops" in [one.variant for one in found.predicted])
        return reason

    assert refused(seen) is None
    another = dataclasses.replace(SEEN, workload=dataclasses.replace(SEEN.workload, topk=1))
    assert "layers of each size" in refused(dataclasses.replace(seen, seen=((SEEN, another),)))
    at_home = refused(dataclasses.replace(seen, at_home="they stay"))
    assert at_home.startswith("they stay; by the samples of one step, netmoe:hops would send 30.0% less")
    without = refused(dataclasses.replace(seen, placement_saving=0.0))
    assert "send 0.0% less between nodes and take 0.60 of alltoall's time (monta:O1 0.50): too little" in without
    times["netmoe:hops"] = 1.6
    assert refused(seen).endswith("too little to be tried")


OF_EXPERTS = ("monta:O2x2", "alltoall", "mpmoe:2", "mpmoe:2:S1", "mpmoe:2:S2", "mpmoe:2:S3", "mpmoe:2:hops:8",
              "expert-migration:1", "expert-migration:8")  # fmt: skip
MPMOE = tuple(name for name in OF_EXPERTS if name.startswith("mpmoe"))
TRAVELLING = ("mpmoe:2:hops:8", "expert-migration:8")
PLAIN, FROZEN = SeenExperts(), SeenExperts(trained=False)


@pytest.mark.parametrize(
    ("of_ranks", "left_out", "reason"),
    [
        ([[PLAIN], [PLAIN]], (), ""),
        ([[PLAIN], [SeenExperts(outside=(64,))]], MPMOE, "a trained tensor of shape [64] takes part in the experts"),
        ([[PLAIN], [SeenExperts(called_by="Own.compute")]], (*MPMOE, TRAVELLING[-1]), "experts"),
        ([[SeenExperts(stays_behind="a buffer")], [PLAIN]], TRAVELLING, "experts travel, and a buffer does not"),
        ([[PLAIN, SeenExperts(draw=True)], [PLAIN, PLAIN]], OF_EXPERTS[2:], "experts draw random numbers (dropout)"),
        ([[PLAIN, PLAIN], [PLAIN, FROZEN]], TRAVELLING, "experts travel, and those of some layer are frozen"),
        ([[PLAIN], [SeenExperts(trained=False, group=4)]], (), ""),  # a stage, or other replicas of the experts
        ([[PLAIN, FROZEN], [PLAIN, FROZEN]], (), ""),
        ([[SeenExperts(dtypes=("bf16",))], [SeenExperts(dtypes=("fp32",))]], TRAVELLING, "experts travel, and param"),
        ([[SeenExperts(dtypes=("bf16",)), SeenExperts(dtypes=("fp32",))]], (), ""),  # a message has those of a layer
    ],
    ids=[
        "nothing",
        "outside",
        "own call",
        "buffers",
        "drawn",
        "frozen",
        "unlike groups",
        "frozen layer",
        "dtypes",
        "dtypes of layers",
    ],
)
def test_what_experts_of_one_rank_cannot_run_under_is_tried_on_none(planned, of_ranks, left_out, reason):
    controller = planned("monta:O2x2")
    predictions = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 0.0, 1) for name in OF_EXPERTS)
    controller.given.plan = dataclasses.replace(controller.given.plan, candidates=predictions)
    here = dataclasses.replace(SEEN, workload=dataclasses.replace(SEEN.workload, workers=(8,)))
    seen = tuple(tuple(dataclasses.replace(here, experts=one) for one in of_rank) for of_rank in of_ranks)
    (found,) = controller._make_plan(FirstStep(seen))
    refused = {one.variant: one.reason for one in found.refused if one.variant != "allgather"}
    assert tuple(refused) == left_out and all(one.startswith(reason) for one in refused.values())
    assert tuple(one.variant for one in found.predicted) == tuple(name for name in OF_EXPERTS if name not in left_out)


def test_what_a_gpu_may_have_no_room_for_is_not_tried(planned):
    controller = planned("alltoall")
    held = {"mpmoe:2:S1": 900, "alltoall": 500, "monta:O2x2": 601}
    controller.given.plan = dataclasses.replace(
        controller.given.plan,
        candidates=tuple(Prediction(name, 1e-3, 1e-3, 0.0, 0.0, size) for name, size in held.items()),
    )
    assert passes_held(SimpleNamespace(passes=4), controller.config) == 1  # there is one pipeline stage
    pipeline = SimpleNamespace(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert [passes_held(SimpleNamespace(passes=2), pipeline, later) for later in (0, 6, 16)] == [2, 6, 8]
    for spare, tried in ((800, list(held)), (799, ["alltoall", "monta:O2x2"]), (201, ["alltoall"]), (None, list(held))):
        rooms = () if spare is None else (room_of(10**6, 2), room_of(spare, 2), room_of(0, 0))  # one has no MoE layer
        (found,) = controller._make_plan(FirstStep(((SEEN,),), rooms))
        assert [one.variant for one in found.predicted] == tried
        assert all("could run out of memory" in one.reason for one in found.refused if one.variant != "allgather")


def test_passes_of_batches_that_are_ramped_up_are_those_of_the_last(planned):
    def later(batch: int, ramp: list[int] | None, consumed: int = 0) -> int:
        calculators.init_num_microbatches_calculator(0, ramp, batch, micro_batch_size=2, data_parallel_size=2)
        calculators.update_num_microbatches(consumed)
        try:
            return later_micro_batches()
        finally:
            calculators.destroy_num_microbatches_calculator()

    assert (later_micro_batches(), later(32, None), later(32, [8, 8, 96]), later(32, [8, 8, 96], 100)) == (0, 0, 8, 0)


def test_others_experts_take_room_once_however_many_passes_are_under_way(planned, tmp_path):
    """Three passes of 10 bytes more, and 400 bytes of experts."""
    controller = planned("alltoall")
    travels = Prediction("expert-migration:2x1", 1e-3, 1e-3, 0.0, 0.0, 910, held_more=HeldMore(of_others=400))
    candidates = Prediction("alltoall", 1e-3, 1e-3, 0.0, 0.0, 500), travels
    dataclasses.replace(controller.given.plan, candidates=candidates).save(tmp_path / "travels.json")
    controller.given.plan = Plan.load(tmp_path / "travels.json")
    seen = Seen(dataclasses.replace(SEEN.workload, workers=(2, 4)), 32.0)
    for spare, number in ((430, 2), (429, 1)):
        room = room_of(spare + 3 * COMMUNICATOR_BYTES, passes=3)  # the domains' own groups
        (found,) = controller._make_plan(FirstStep(((seen,),), (room,)))
        assert found.predicted == candidates[:number]


def test_a_plan_is_held_against_what_it_took_itself(planned):
    """It ran in the step that was looked at, beside which what holds less is no more than nothing."""
    controller = planned("monta:O2x2")
    (found,) = controller._make_plan(FirstStep(((SEEN,),), (room_of(0, 1),)))
    assert found.planned == found.ran == "monta:O2x2"
    assert found.above("alltoall") == (0, 0) and found.communicators("monta:O2x2") == 0


def test_communicators_of_a_variants_own_take_room_too(planned):
    """Tokens hop over two levels in two; where experts travel there is one of all GPUs besides theirs."""
    controller = planned("monta:O2x2")
    needed = {"alltoall": 0, "expert-migration:1x1": 2, "expert-migration:2x4": 3, "expert-migration:2x2": 4}
    controller.given.plan = dataclasses.replace(
        controller.given.plan,
        candidates=tuple(Prediction(name, 1e-3, 1e-3, 0.0, 0.0, 0) for name in ("monta:O2x2", *needed)),
    )
    seen = Seen(dataclasses.replace(SEEN.workload, workers=(2, 4)), 32.0)
    for spare in (0, 2, 3, 4):
        (found,) = controller._make_plan(FirstStep(((seen,),), (room_of(spare * COMMUNICATOR_BYTES, 4),)))
        tried = [name for name, number in needed.items() if number <= spare]
        assert [one.variant for one in found.predicted] == ["monta:O2x2", *tried]
    needed |= {"netmoe:hops": 3, "mpmoe:2:hops": 2, "mpmoe:2:hops:1x2": 4, "netmoe": 1, "parm:S1": 0, "allgather": 0}
    assert {name: found.communicators(name) for name in needed} == needed
    cut = dataclasses.replace(found, workload=dataclasses.replace(found.workload, etp=2))
    assert [cut.communicators(name) for name in ("alltoall", "monta:O2x2", "mpmoe:2:hops", "parm:S1")] == [0, 0, 3, 1]


def room_of(spare: int, passes: int) -> Room:
    """Returns the room of a GPU with so many bytes to plan with."""
    return Room(free=math.ceil(spare / MOST_OF_FREE), at_work=10**6, passes=passes, layers=1)


def test_megatrons_own_are_tried_without_a_prediction(planned, monkeypatch):
    """Where this configuration can run them, and all ranks' tokens have room."""
    gathered = 2 * 16 * 8 * 16 * 4
    for overrides, spare, reason in (
        ({}, None, None),
        ({}, gathered, None),
        ({}, gathered - 1, f"gathers {gathered} bytes of tokens on each rank, and {gathered - 1} are free"),
        ({"tensor_model_parallel_size": 2}, None, "stock Megatron does not train MoE layers under TP without"),
        ({"variable_seq_lengths": True}, None, "Megatron refuses it here: Token dispatcher type: allgather does not"),
        (PADDED, None, "not tried under --moe-pad-expert-input-to-capacity, where Megatron treats"),
    ):
        rooms = () if spare is None else (room_of(spare, 1),)
        (found,) = planned("monta:O2x2", **overrides)._make_plan(FirstStep(((SEEN,),), rooms))
        assert found.beside == (() if reason else ("allgather",))
        refused = {one.variant: one.reason for one in found.refused}
        assert refused["allgather"].startswith(reason) if reason else "allgather" not in refused
    monkeypatch.setattr("megatron_moe_opt.integration.flex_backends.missing_for_flex", lambda backend: None)
    everything = ("deepep", "hybridep", "ncclep")
    monkeypatch.setattr("megatron_moe_opt.integration.flex_backends.flex_backends", lambda: everything)
    (found,) = planned("monta:O2x2", bf16=True, params_dtype=torch.bfloat16)._make_plan(FirstStep(((SEEN,),)))
    tried = {*found.beside, *(one.variant for one in found.refused)}
    assert found.beside[:2] == ("allgather", "flex:deepep") and "flex:hybridep" in tried
    assert "flex:ncclep" not in tried
    (found,) = planned("monta:O2x2", fp16=True, params_dtype=torch.float16)._make_plan(FirstStep(((SEEN,),)))
    assert found.beside == ("allgather",)
    assert {one.reason for one in found.refused if "flex" in one.variant} == {"its kernels sum rows of bfloat16 alone"}


def test_a_back_end_of_flex_that_does_not_import_is_left_out_with_the_reason(planned, monkeypatch, tmp_path):
    """Whatever it raises, for instance because a library that it was built with is gone."""
    from megatron_moe_opt.integration import flex_backends

    (tmp_path / "deep_ep.py").write_text("raise OSError('libnvshmem_host.so.3: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = "DeepEP is installed, but importing deep_ep fails with OSError: libnvshmem_host.so.3: cannot open"
    assert flex_backends.missing_for_flex("deepep").startswith(reason)
    (found,) = planned("monta:O2x2")._make_plan(FirstStep(((SEEN,),)))
    refused = {one.variant: one.reason for one in found.refused}
    assert found.beside == ("allgather",) and refused["flex:deepep"].startswith(reason)
    (tmp_path / "deep_ep.py").unlink()
    assert flex_backends.missing_for_flex("deepep") == "DeepEP is not installed"
    assert flex_backends.missing_for_flex("ncclep") == "Transformer Engine's NCCL-EP is not installed"


@pytest.fixture
def timed(planned, monkeypatch):
    """A controller in trials of one variant, one layer of it, and a clock that stands until it is moved on."""
    controller, now = planned("monta:O2x2"), [0.0]
    layer = torch.nn.Module()
    layer.forward = lambda seconds: now.__setitem__(0, now[0] + float(seconds[0]))
    layer.config, layer.experts, layer.token_dispatcher = controller.config, torch.nn.Module(), None
    for module in (controlling, step_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Controller, "_largest", lambda self, seconds: seconds)
    monkeypatch.setattr(given_plan.GivenPlan, "_agree", lambda self, group: None)
    groups = SimpleNamespace(ep_size=8, etp_size=1, ep=None, joint=None)
    controller.add(PlannedLayer(layer, groups, controller.options, lambda *_: None))
    found = (Prediction("monta:O2x2", 1.0, 0, 0, 0, 0),)
    controller.shapes = (Alike(None, found, (), "monta:O2x2", 1, SEEN.workload),)
    controller.first_step = FirstStep(((SEEN,),))
    controller._begin_trials(0)
    return controller, layer, now


def test_a_step_that_the_optimizer_skips_counts_for_nothing(timed):
    """The first steps under fp16 are skipped: their passes are none of a step's, nor their time the next one's."""
    controller, layer, now = timed
    (planned_layer,) = controller.layers
    turns, controller.turns = controller.turns, None
    planned_layer.passes, planned_layer.rows, planned_layer.tokens = 2, 64, 16
    step_ended(updated=False)
    assert (planned_layer.passes, planned_layer.rows, planned_layer.tokens) == (0, 0, 0)
    controller.turns = turns
    for number in range(3):
        if number == 2:
            layer(torch.tensor([5.0]))
            step_ended(updated=False)
        layer(torch.tensor([1.0]))
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(1.0) == 0.0


@pytest.mark.parametrize(("tp", "in_its_place"), [(1, "alltoall"), (2, "monta:O1")])
def test_a_layer_of_another_model_runs_what_trains_where_its_own_configuration_refuses_a_variant(
    planned, monkeypatch, tp, in_its_place
):
    """Stock, too, which trains no layer under TP without sequence parallelism."""
    controller, used = planned("monta:O2x2", tensor_model_parallel_size=tp, sequence_parallel=tp > 1), []
    monkeypatch.setattr(layers_in_turn, "link", lambda layers: None)
    other = copy.copy(controller.config)
    other.fp32_residual_connection, other.sequence_parallel = True, False
    layers = [
        SimpleNamespace(layer=SimpleNamespace(config=config), passes=1, use=used.append, keep=lambda _: set())
        for config in (controller.config, other)
    ]
    for variant in ("netmoe", "monta:O2x2", "alltoall", "allgather"):
        controller.layers.run(variant, layers)
    of_stock = ["alltoall", in_its_place, "allgather", "allgather" if tp == 1 else in_its_place]
    assert used == ["netmoe", in_its_place, "monta:O2x2", "monta:O2x2", *of_stock]


def test_a_step_that_is_captured_ends_the_run(timed, monkeypatch):
    """Where no arguments of Megatron-LM's tell of `--optimizer-cuda-graph` beforehand."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigurationError, match="--optimizer-cuda-graph replays steps .* drop it"):
        step_ended(True)


def chunk_with(config: Any) -> torch.nn.Module:
    """Returns a stand-in for a model, of which its optimizer knows."""
    chunk = torch.nn.Identity()
    chunk.config = config
    return chunk


def test_steps_of_another_model_count_for_nothing(timed):
    """A dense critic is such a model, whose optimizer steps more often."""
    controller, layer, now = timed
    dense, ours = chunk_with(copy.copy(controller.config)), chunk_with(controller.config)
    dense.config.num_moe_experts = None
    for number in range(3):
        for chunk in (dense, ours, dense):
            if chunk is ours:
                layer(torch.tensor([1.0]))
            step_ended(True, SimpleNamespace(model_chunks=[chunk]))
        assert controller.turns.trials.steps == number + 1
    step_ended(True)  # of nobody knows which, in which no layer has run
    assert controller.turns.trials.steps == 3 and controller.turns.trials.medians() == {"monta:O2x2": 1.0}


def test_what_lies_between_two_steps_is_not_timed(timed):
    controller, layer, now = timed
    for number in range(3):
        if number == 1:
            layer.eval()
            layer(torch.tensor([7.0]))  # an evaluation
            layer.train()
        if number == 2:
            now[0] += 9.0  # a checkpoint
        layer(torch.tensor([1.0]))  # micro-batches
        layer(torch.tensor([1.0]))
        now[0] += 0.5  # their backward passes, the optimizer
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(2.5) == 0.0


def test_what_is_sent_before_a_layer_runs_is_timed(timed):
    """Experts that travel are sent when gradients are cleared; what is another model's, or an
    evaluation, is not timed.
    """
    controller, layer, now = timed
    dense = SimpleNamespace(config=copy.copy(controller.config))
    dense.config.num_moe_experts = None
    for number in range(3):
        gradients_cleared()
        if number == 1:  # the step of another model
            now[0] += 7.0
            step_ended(True, SimpleNamespace(model_chunks=[dense]))
            gradients_cleared()
        now[0] += 3.0
        gradients_cleared()  # of an optimizer that consists of others
        if number == 2:
            layer.eval()
            layer(torch.tensor([7.0]))  # of a loop that clears gradients behind a step, and evaluates then
            layer.train()
            now[0] += 3.0
            layer(torch.tensor([3.0]))
        layer(torch.tensor([1.0]))
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(4.0) == 0.0


@pytest.mark.parametrize(("free", "fits"), [(125, True), (124, False), (None, True)])
def test_what_was_chosen_stays_where_what_is_planned_by_has_no_room(timed, monkeypatch, capsys, free, fits):
    """Stock holds 100 bytes more, and four fifths of what is free may be planned with. Without a GPU nobody knows."""
    controller, _, _ = timed
    found = (Prediction("monta:O2x2", 1.0, 0, 0, 0, 50), Prediction("alltoall", 2.0, 0, 0, 0, 150))
    controller.shapes = (Alike(None, found, (), "monta:O2x2", 1, SEEN.workload),)
    controller.chosen, controller.settled = {None: "monta:O2x2"}, True
    controller.layers[0].passes = 1
    room = None if free is None else Room(free, 0, 1, 1)
    monkeypatch.setattr(memory_room, "room", lambda passes, layers: room)
    monkeypatch.setattr(layers_in_turn, "known_to_all", lambda own: [True, own])
    ran = []
    monkeypatch.setattr(controller.layers, "run", lambda variant, layers: ran.append(variant))
    drift = SimpleNamespace(record=lambda _: 1.0, why_over=lambda _: "steps take longer", next_look=70)
    monkeypatch.setattr(controller, "_drift", drift)
    controller._watch()
    assert ran == ["alltoall"] * fits and controller.settled == (not fits)
    stays = "monta:O2x2 had been chosen; steps take longer: it stays, as alltoall, by which"
    assert (stays in capsys.readouterr().out) == (not fits)
    assert fits or controller._drift.next_look == 70


@pytest.mark.parametrize(
    "medians", [{}, {"monta:O1": 0.3, "mpmoe:4:hops": 0.2}, {"alltoall": 0.4, "mpmoe:4:hops": 0.2}], ids=list
)
def test_the_last_line_names_the_flags_of_what_stays(medians):
    """Where stock does not train or has no room, too."""
    times = {variant: [seconds] for variant, seconds in medians.items()}
    trials = SimpleNamespace(medians=lambda: medians, times=times, steps=9)
    turns = SimpleNamespace(alike=SimpleNamespace(predicted=(), planned="monta:O1", passes=1), trials=trials)
    *_, last = settled_lines(SimpleNamespace(turns=turns, shapes=()), "mpmoe:4:hops")
    flags = "--moe-token-dispatcher-type mpmoe --moe-opt-partitions 4 --moe-opt-way hops"
    assert last == f"to run it without trials: {flags}"


@pytest.mark.parametrize(("iteration", "look"), [(0, 1000), (999, 1000), (5000, 10_000)])
def test_a_run_that_goes_on_looks_anew_later(timed, monkeypatch, iteration, look):
    controller, _, _ = timed
    monkeypatch.setattr(controlling, "training_arguments", lambda: SimpleNamespace(iteration=iteration))
    controller._rest()
    assert controller.settled and controller._drift.next_look == look
    controller._rest()
    assert controller._drift.next_look == look


def test_of_two_models_the_first_ones_steps_are_timed(timed):
    """An actor's and a critic's, each with MoE layers under auto."""
    controller, layer, now = timed
    models = [SimpleNamespace(model_chunks=[chunk_with(controller.config)]) for _ in range(2)]
    for seconds in (1.0, 1.0, 1.0):
        for number, model in enumerate(models):
            gradients_cleared(model)
            layer(torch.tensor([seconds + 5.0 * number]))
            step_ended(True, model)
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(1.0) == 0.0


def test_where_no_optimizer_of_megatrons_ends_a_step_a_line_says_so(timed, monkeypatch, capsys):
    _, layer, _ = timed
    monkeypatch.setattr("megatron_moe_opt.dispatchers.say._said", set())
    for _ in range(NO_STEP + 1):
        _followed(lambda **_: layer(torch.tensor([1.0])), num_microbatches=1)
    said = capsys.readouterr().out
    assert said.count(f"have run {NO_STEP} times without a step of one of its optimizers to plan by") == 1


def test_a_ramped_batch_does_not_make_steps_longer(timed):
    controller, layer, now = timed
    for micro_batches in (2, 4, 8):
        with step_of(micro_batches):
            for _ in range(micro_batches):
                layer(torch.tensor([1.5]))
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(3.0) == 0.0


def test_what_follows_a_steps_passes_takes_as_long_however_many_they_are(timed):
    """The optimizer's part, which the times of steps with more micro-batches have no more of."""
    controller, layer, now = timed

    def stock(num_microbatches, forward_only):
        for _ in range(num_microbatches):
            layer(torch.tensor([1.5]))

    for micro_batches in (2, 4, 8):
        _followed(stock, num_microbatches=micro_batches)
        now[0] += 0.5
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(3.5) == 0.0


def test_a_model_without_layers_under_auto_has_not_the_steps_that_count(timed, monkeypatch):
    """An actor's step comes first, and the planned layers are a critic's: by `register` between the two."""
    controller, layer, _ = timed
    monkeypatch.setattr(controlling.dist, "get_world_size", lambda: 1)
    actor, critic = (SimpleNamespace(model_chunks=[chunk_with(controller.config)]) for _ in range(2))
    monkeypatch.setattr("megatron_moe_opt.dispatchers.say._said", set())
    monkeypatch.setattr(controller, "_look", SimpleNamespace(taken={}.popitem))
    controller.turns = None
    step_ended(True, actor)
    layer(torch.tensor([1.0]))
    with pytest.raises(KeyError):
        step_ended(True, critic)


def test_a_step_in_which_no_layer_has_run_is_not_planned_by(timed, monkeypatch, capsys):
    """As of another model, a dense critic, whose optimizer does not say whose it is."""
    controller, layer, _ = timed
    controller.turns = None
    monkeypatch.setattr("megatron_moe_opt.dispatchers.say._said", set())
    monkeypatch.setattr(controlling.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(controller, "_look", SimpleNamespace(taken=lambda: pytest.fail("there was nothing to see")))
    for _ in range(2):
        step_ended(True)
    assert controller.turns is None and not controller.settled
    assert capsys.readouterr().out.count("no MoE layer has run in this step of an optimizer") == 1
    layer(torch.tensor([1.0]))
    monkeypatch.setattr(controller, "_look", SimpleNamespace(taken={}.popitem))
    with pytest.raises(KeyError):
        step_ended(True)


def test_a_schedule_of_forward_passes_alone_is_no_step_of_training(timed):
    """Reinforcement learning samples in such ones, with the model in training mode."""
    controller, layer, _ = timed
    (planned_layer,) = controller.layers

    def stock(num_microbatches, forward_only):
        layer(torch.tensor([7.0 if forward_only else 1.0]))

    for _ in range(3):
        planned_layer.look()
        for forward_only in (True, False):
            _followed(stock, num_microbatches=1, forward_only=forward_only)
        assert planned_layer.passes == 1
        controller.after_step()
    assert controller.turns.trials.steps == 3 and controller.turns.trials.longer_than(1.0) == 0.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_ramped_batch_does_not_make_steps_of_a_pipeline_longer(monkeypatch, chunks):
    """Which fills and drains in every one of them, faster with virtual stages."""
    now, stages, taken = [0.0], 4, []
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = step_clock.StepClock(lambda: now[0], stages, chunks)
    for micro_batches in (4, 8, 16):
        with step_of(micro_batches):
            clock.layer_begins(is_training=True)
        now[0] += micro_batches + (stages - 1) / chunks
        taken.append(clock.take())
    assert taken == pytest.approx([4 + (stages - 1) / chunks] * 3)


def test_what_another_rank_has_no_package_for_is_left_out_before_ranks_wait_for_each_other(timed, monkeypatch, capsys):
    """Also where it has run before: what it communicates with was released when it lost, or was left."""
    controller, _, _ = timed
    monkeypatch.setattr(turning, "known_to_all", lambda own: [own, "DeepEP is not installed"])
    monkeypatch.setattr(turning, "failure_to_start", lambda *_: pytest.fail("it waits for the other rank"))
    controller.turns._starting.add("flex:deepep")
    assert controller.turns._starts("flex:deepep", [])
    controller._begin_trials(0)
    assert not controller.turns._starts("flex:deepep", [])
    said = "not flex:deepep: what it communicates with cannot be made on rank 1 (DeepEP is not installed): no rank"
    assert said in capsys.readouterr().out


def test_ranks_without_the_layers_that_are_tried_need_no_memory_for_them(timed, monkeypatch):
    controller, _, _ = timed
    controller.first_step = FirstStep(((SEEN,),), (room_of(0, 1),))
    controller._begin_trials(0)
    turns, asked = controller.turns, []
    monkeypatch.setattr(turning.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(turning, "known_to_all", lambda own: [own])
    monkeypatch.setattr(memory_room, "could_take", asked.append)
    assert turns._fits("netmoe", []) and not asked
    turns._fitting.clear()
    assert not turns._fits("netmoe", controller.layers) and len(asked) == 1
    # What has had its first turn keeps what that made: all others are asked again, and it only if another comes.
    monkeypatch.setattr(memory_room, "could_take", lambda size: asked.append(size) or True)
    turns._fitting.clear()
    for first, other in (("netmoe", "mpmoe:2:S1"), ("mpmoe:2:S1", "netmoe")):
        assert turns._fits(first, controller.layers) and other not in turns._fitting
        turns.trials.times[first] = [1.0]
    assert turns._fits("netmoe", controller.layers) and {"netmoe", "mpmoe:2:S1"} <= turns._fitting


def test_it_is_said_that_layers_which_are_built_later_are_not_planned(timed, monkeypatch, capsys):
    controller, _, _ = timed
    monkeypatch.setattr("megatron_moe_opt.dispatchers.say._said", set())
    controller.add(controller.layers[0])
    assert "call megatron_moe_opt.register() before they are built" in capsys.readouterr().out


def test_a_second_plan_needs_no_file_and_may_fail(timed, monkeypatch, tmp_path, capsys):
    """The file may be gone by then, as of a job whose scratch is: a plan that cannot be made
    leaves what was chosen before.
    """
    controller, _, _ = timed
    planned_by = []

    def no_plan(cluster, *_):
        planned_by.append(cluster)
        raise ConfigurationError("no candidate")

    monkeypatch.setattr(controlling, "tried_by_profile", no_plan)
    monkeypatch.setattr(controlling, "found_by_first", lambda find, group: find())
    monkeypatch.setattr(layers_in_turn, "release_domain_groups", lambda group: None)
    monkeypatch.setattr(controlling, "known_to_all", lambda own: [own])
    monkeypatch.setattr(controller, "_look", SimpleNamespace(taken=lambda: controller.first_step))
    controller.layers[0].passes = 1
    controller.given, controller.costs = None, MoveCosts(controller.config, Options(profile=tmp_path / "gone.json"))
    monkeypatch.setattr(Cluster, "load", lambda file: read.append(file) or "costs")
    controller.chosen, read = {None: "mpmoe:2:S1"}, []
    for _ in range(2):
        controller.settled, controller.turns = False, None
        controller._begin()
        assert controller.settled and controller.layers.current == "mpmoe:2:S1"
    assert read == [tmp_path / "gone.json"] and planned_by == ["costs"] * 2
    assert "(no candidate); what was chosen before runs on" in capsys.readouterr().out


def test_variants_keep_to_the_bounds_of_the_run(tmp_path):
    layer, plugged = torch.nn.Module(), {}
    layer.config = SimpleNamespace()
    layer.experts, layer.token_dispatcher = torch.nn.Module(), None
    run = Options(profile=tmp_path / "c.json", network_levels=(2, 4), prefetch_layers=2, resident_layers=3)
    planned_layer = PlannedLayer(layer, None, run, lambda _, name, options: plugged.update({name: options}))
    for variant in ("monta:O2x2", "expert-migration:2x4"):
        planned_layer.use(variant)
    assert plugged["monta"].resident_layers is None  # no expert travels
    assert plugged["expert-migration"].resident_layers == 3
    assert all((one.network_levels, one.prefetch_layers) == ((2, 4), 2) for one in plugged.values())


def test_refusals_of_a_system_for_one_reason_are_told_in_one_line():
    refused = [Refusal(f"mpmoe:{count}", f"{count} partitions of 2 rows") for count in (4, 8)]
    told = told_together([*refused, Refusal("mpmoe:2", "something else"), Refusal("parm", "4 partitions of 2 rows")])
    assert told == [
        ("mpmoe:4 and 1 more", "4 partitions of 2 rows"),
        ("mpmoe:2", "something else"),
        ("parm", "4 partitions of 2 rows"),
    ]


@pytest.mark.parametrize("updated", [True, False])
def test_ranks_that_may_skip_steps_alone_are_refused(monkeypatch, updated):
    """Some would wait for the others: after a step that all have made, `auto` asks all of them, and experts travel."""
    monkeypatch.setattr(auto_layer, "_controller", object())
    optimizer = SimpleNamespace(config=SimpleNamespace(grad_norm_skip_threshold=100.0))
    of_auto = auto_layer._after_step if updated else auto_layer._after_skipped_step
    for callback in (of_auto, expert_migration_layer._refuse_lone_skips):
        monkeypatch.setattr(optimizer_step, "_at_end", {updated: [callback]})
        with pytest.raises(ConfigurationError, match="with a grad_norm_skip_threshold each rank skips by itself"):
            optimizer_step.step_ended(updated, optimizer)
