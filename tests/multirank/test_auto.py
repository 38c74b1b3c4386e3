"""`auto`: trains like stock while it tries dispatchers, and all ranks keep the same one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.domain_curves import KINDS, profile_name, realisable_groups
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.layers import take_turns
from tests.ranks.pool import RankFailure, RankPool

MB = 10**6


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A profile of EP 4 on one node, on which everything costs something."""
    return write_profile(tmp_path / "cluster.json", World((0, 0, 0, 0), ep=4), (4,))


def write_profile(file: Path, world: World, workers: tuple[int, ...]) -> Path:
    curve = ((1, 1e-5), (100 * MB, 0.101))
    keys: list[tuple[Kind, str | None]] = [(kind, None) for kind in (Kind.COPY, Kind.OFFLOAD, Kind.PREFETCH)]
    keys += [(Kind.ALL_TO_ALL, "ep"), (Kind.ALL_TO_ALL, JOINT_GROUP)]
    keys += [(kind, role) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) for role in ("tp", "expert-tp")]
    for kind in KINDS:
        for level, ranks in realisable_groups(workers):
            keys.append((kind, profile_name(kind, workers, level, ranks)))
    gemm = ExpertGemm(64, 96, "fp32", ((16, 1e-4), (1024, 4e-3)))
    Cluster(world, dict.fromkeys(keys, curve), expert_gemm=gemm).save(file)
    return file


class AllAlike(dict[str, float]):
    """Times by which any variant's step takes a second: what is tried does not depend on how busy the machine is."""

    def __missing__(self, variant: str) -> float:
        return 1.0


class FasterWithMoves(AllAlike):
    """Times by which variants whose samples move are fastest, and all others alike."""

    def __missing__(self, variant: str) -> float:
        return 0.5 if variant.startswith("netmoe") else super().__missing__(variant)


def train(
    steps: int,
    options: Options | None,
    sizes: dict[str, int],
    seconds: dict[str, float] | None = None,
    most_steps: int = 26,
    at_first: int = 6,
    savings: Sequence[float] | None = None,
    stops: bool = False,
    learnt: int | None = None,
    wraps: bool = False,
    **config: Any,
) -> dict[str, Any]:
    """Returns the losses of steps of one micro-batch, where `config` has no other number, and what `auto` did.

    Args:
        stops: the run ends behind the first step whose samples move; another one goes on from its state.
        learnt: steps after the first choice in which routers have learnt, so that it is made anew.
        savings: of bytes between nodes, that moves of samples are taken to be worth at each look at them; they go to
            random places.
        most_steps: of trials.
        at_first: the variants of the first sweep, besides those that nobody predicts.
        seconds: that steps of each variant are taken to take; what they take, without.
        wraps: routers are of WrappedRouter.
    """
    import megatron_moe_opt
    from megatron_moe_opt.dispatchers import sample_placement
    from megatron_moe_opt.integration.auto import controller as controlling
    from megatron_moe_opt.integration.auto import look, sample_saving, turns
    from megatron_moe_opt.integration.auto.auto_layer import current_controller
    from megatron_moe_opt.planning.choosing import drift, trials
    from tests.multirank.test_expert_order import WrappedRouter
    from tests.multirank.test_netmoe import at_random
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    largest, settle, moved, said = controlling.Controller._largest, sample_placement.settle, [], []

    def taken(controller: Any, measured: float) -> float:
        largest(controller, measured)  # ranks ask each other all the same
        return seconds[controller.layers.current]

    def count(*given: Any) -> Any:
        move = settle(*given)
        moved.append(bool((move != np.arange(len(move))).any()))
        return move

    with pytest.MonkeyPatch.context() as patch, parallel(**sizes):
        patch.setattr(trials, "TURN", 2)
        patch.setattr(trials, "MOST_STEPS", most_steps)
        patch.setattr(trials, "MOST_AT_FIRST", at_first)
        for module in (controlling, turns):
            patch.setattr(module, "say", lambda _, line: said.append(line))
        if learnt is not None:
            patch.setattr(drift, "WINDOW", learnt // 2)
            patch.setattr(drift, "LEARNT", learnt)
            patch.setattr(drift, "MOST_COST", 1e3)
        if seconds is not None:
            patch.setattr(controlling.Controller, "_largest", taken)
        if savings is not None:
            found = iter(savings)
            patch.setattr(look, "saving_of", lambda *_: next(found))
            patch.setattr(sample_saving, "NEAR", 1e3)
            patch.setattr(sample_placement, "place_samples", at_random)
            patch.setattr(sample_placement, "settle", count)
        megatron_moe_opt.register(options)
        before = set(distributed_c10d._world.pg_map)
        try:
            config = {"learning_rate": 1e-3, "microbatches": 1} | config
            model = gpt(**config)
            controller = current_controller()
            for layer in [one for one in model.model.modules() if wraps and hasattr(one, "router")]:
                layer.router = WrappedRouter(layer.router)
            if stops:
                ran = ""
                while not ran.startswith("netmoe"):
                    ran = controller.layers.current
                    model.train(1)
                stopped = model
                megatron_moe_opt.register(options)
                model = gpt(**config)
                controller = current_controller()
                model.model.module.load_state_dict(stopped.model.module.state_dict())
                model.optimizer.load_state_dict(stopped.optimizer.state_dict())  # not copied: that run has ended
                model.step, model.losses = stopped.step, stopped.losses
                moved.clear()
            model.train(steps - model.step)
            losses = model.losses
        finally:
            megatron_moe_opt.register(Options())
    if controller is None:
        return {"losses": losses}
    alike, trials = (controller.turns.alike, controller.turns.trials) if controller.turns else (None, None)
    return {
        "losses": losses,
        "settled": controller.settled,
        "planned": alike and alike.planned,
        "tried": sorted(trials.times) if trials else [],
        "steps": trials.steps if trials else 0,
        "runs": controller.layers.current,
        "layers": len(controller.layers),
        "netmoe": next((one.reason for one in (alike.refused if alike else ()) if one.variant == "netmoe"), None),
        "moved": sum(moved),
        "said": said,
        "built": [list(layer._built) for layer in controller.layers],
        "groups": sorted(group.group_desc for group in set(distributed_c10d._world.pg_map) - before),
    }


def stocks(ranks: RankPool, steps: int) -> list[list[float]]:
    """Each rank's losses of these steps under stock with EP 4, trained once for all tests."""
    if len(_stocks[0]) < steps:
        answers = ranks.run(train, steps=max(steps, LONGEST), options=None, sizes={"ep": 4})
        _stocks[:] = [answer["losses"] for answer in answers]
    return [losses[:steps] for losses in _stocks]


_stocks: list[list[float]] = [[]]

STEPS = 32  # one to look, 26 of trials at most or one turn of seven for each of two shapes, and some as chosen
LONGEST = 35  # of all tests with stock's losses of `stocks`
ONE_SWEEP = {"steps": 18, "most_steps": 16}  # little more than a turn of each variant
# One turn of a few and of what nobody predicts: allgather, and planned anew after two steps; allgather and flex.
TWICE = {"steps": 2 * (1 + 6 + 2), "most_steps": 6, "at_first": 2}
TWO_BESIDE = {"steps": 12, "most_steps": 8, "at_first": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_trains_like_stock_while_it_tries_and_after(ranks, profile):
    auto = ranks.run(
        train, options=Options(profile=profile), sizes={"ep": 4}, seconds=AllAlike(),
        moe_token_dispatcher_type="auto", **ONE_SWEEP,
    )  # fmt: skip
    first = auto[0]
    assert first["settled"] and first["runs"] in first["tried"] and first["planned"] in first["tried"]
    assert 12 <= first["steps"] <= ONE_SWEEP["most_steps"]
    families = {name.partition(":")[0] for name in first["tried"]}
    assert {"alltoall", "allgather", "mpmoe", "monta", "expert-migration"} <= families
    assert first["built"] == [[first["runs"]]] * 2  # what is not used is not kept
    assert "would send 0.0% less between nodes" in first["netmoe"]  # its samples were counted; there is one node
    assert bool(first["groups"]) == first["runs"].startswith("expert-migration")
    for ours, stock in zip(auto, stocks(ranks, ONE_SWEEP["steps"]), strict=True):
        assert {**ours, "losses": None} == {**first, "losses": None}  # all ranks alike
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


MOE_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


WHOLE_STATE = {"distributed_optimizer": False}
INTERLEAVED = {
    "num_layers": 8, "microbatches": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "sizes", "recomputed", "stops", "steps"),
    [
        (World((0, 0, 0, 0), cp=2, ep=4), {"cp": 2, "ep": 4}, MOE_RECOMPUTED | WHOLE_STATE, True, 24),
        (World((0, 0), ep=2), {"ep": 2, "pp": 2, "vpp": 2}, RECOMPUTED | INTERLEAVED, False, 15),
    ],
    ids=["context, resumed", "virtual stages"],
)
def test_trains_like_stock_while_samples_move_and_after(ranks, tmp_path, world, sizes, recomputed, stops, steps):
    """They begin to in the middle of the trials, end to, and begin again with what stays; or the run ends while they
    move, and another goes on from its state.
    """
    file = write_profile(tmp_path / "cluster.json", world, (world.ep,))
    config = {"sizes": sizes, "moe_router_load_balancing_type": "seq_aux_loss", **recomputed}
    config["moe_shared_expert_intermediate_size"] = 32
    stock = ranks.run(train, options=None, steps=steps, **config)
    auto = ranks.run(
        train, options=Options(profile=file), seconds=FasterWithMoves(), savings=(0.3, 0.3), at_first=5, most_steps=12,
        steps=steps, stops=stops, moe_token_dispatcher_type="auto", **config,
    )  # fmt: skip
    for ours, theirs in zip(auto, stock, strict=True):
        assert ours["settled"] and ours["runs"].startswith("netmoe") and len(ours["tried"]) > 2
        assert ours["built"] == [[ours["runs"]]] * ours["layers"] and ours["moved"] > 4
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


def train_beside_others(file: Path, what: str) -> tuple[list[float], dict[str, Any]]:
    """Returns the losses under stock, and what `auto` does, where somebody's hook halves what MoE layers return, or an
    adapter with dropout stands in the place of a module of attention.
    """
    from tests.ranks import gpt as models

    build = models.gpt

    def gpt(**config: Any) -> models.Gpt:
        model = build(**config)
        for layer in model.model.modules():
            if what == "hook" and hasattr(layer, "token_dispatcher"):
                layer.register_forward_hook(lambda _, inputs, outputs: (outputs[0] / 2, outputs[1]))
            if what == "adapter" and hasattr(layer, "self_attention"):
                layer.self_attention.linear_proj = WithDropout(layer.self_attention.linear_proj)
        return model

    run = {"steps": 9, "sizes": {"ep": 4}} | SEQ_AUX
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "gpt", gpt)
        stock = train(options=None, **run)
        auto = train(
            options=Options(profile=file), seconds=FasterWithMoves(), savings=(0.3,), most_steps=6, at_first=2,
            moe_token_dispatcher_type="auto", **run,
        )  # fmt: skip
    return stock["losses"], auto


class WithDropout(torch.nn.Module):
    """A linear module of Megatron's with dropout behind it, as adapters have it."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns its output with a part dropped, and its bias."""
        output, bias = self.linear(hidden)
        return torch.nn.functional.dropout(output, 0.1), bias


@pytest.mark.parametrize(("what", "why"), [("hook", "test_auto"), ("adapter", "random numbers that its modules draw")])
def test_samples_stay_where_others_would_see_another_tensor_or_draw_other_numbers(ranks, profile, what, why):
    """They are there from the first step on, which is the only one that is looked at."""
    for stock, auto in ranks.run(train_beside_others, file=profile, what=what):
        assert "would not follow samples that move" in auto["netmoe"] and why in auto["netmoe"]
        assert auto["settled"] and not any(name.startswith("netmoe") for name in auto["tried"])
        assert auto["losses"] == pytest.approx(stock, rel=1e-5)


def train_with_a_flex_of_its_own(file: Path, fastest: str, fails_on: int | None = None) -> dict[str, Any]:
    """`flex` runs over a stand-in, which is stock's `alltoall` with a buffer that Megatron keeps for the process.

    Args:
        fails_on: a rank that cannot make the buffer.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    from megatron_moe_opt.integration import flex_backends
    from megatron_moe_opt.integration.auto import layers_in_turn, turns
    from tests.ranks.megatron import moe_config

    class Flex(token_dispatcher.MoEAlltoAllTokenDispatcher):
        def token_dispatch(self, *args: Any) -> Any:
            assert self.config.moe_token_dispatcher_type == "flex"
            fused_a2a._buffer = "held"
            return super().token_dispatch(*args)

    released = []
    missing, release = flex_backends.missing_for_flex, turns.release_buffers

    def buffer(group: Any, row_bytes: int) -> str:
        assert (group.size(), row_bytes) == (4, 4 * moe_config().hidden_size)
        assert dist.get_rank() != fails_on, "no NVLink"
        fused_a2a._buffer = "made"
        return fused_a2a._buffer

    def watch(variant: str) -> None:
        gathered = parallel_state.get_global_memory_buffer().buffer
        assert fails_on is not None or (fused_a2a._buffer is not None if variant.startswith("flex") else gathered)
        release(variant)
        assert fused_a2a._buffer is None if variant.startswith("flex") else not gathered
        released.append(variant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_dispatcher, "MoEFlexTokenDispatcher", Flex)
        patch.setattr(flex_backends, "missing_for_flex", lambda one: None if one == "deepep" else missing(one))
        patch.setattr(flex_backends, "SUMMED", torch.float32)
        patch.setattr(fused_a2a, "_buffer", None)
        patch.setattr(fused_a2a, "get_buffer", buffer)
        for module in (layers_in_turn, turns):
            patch.setattr(module, "release_buffers", watch)
        found = train(
            options=Options(profile=file), sizes={"ep": 4}, seconds=AllAlike({fastest: 0.5}),
            moe_token_dispatcher_type="auto", **TWO_BESIDE,
        )  # fmt: skip
    return found | {"released": sorted(released)}


@pytest.mark.parametrize("fastest", ["allgather", "alltoall"])
def test_megatrons_own_dispatchers_are_tried_and_what_loses_holds_nothing(ranks, profile, fastest):
    answers = ranks.run(train_with_a_flex_of_its_own, file=profile, fastest=fastest)
    for ours, stock in zip(answers, stocks(ranks, TWO_BESIDE["steps"]), strict=True):
        assert ours["settled"] and ours["runs"] == fastest and {"allgather", "flex:deepep"} <= set(ours["tried"])
        assert ours["released"] == [one for one in ("allgather", "flex:deepep") if one != fastest]
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


def pass_of_unlike_tokens(file: Path) -> tuple[str, str]:
    """What is said of a pass with other tokens where `auto` runs allgather, and of levels that ranks do not lie in."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.auto.auto_layer import current_controller
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    said = []
    with parallel(ep=4):
        for levels in (None, (2, 3)):
            megatron_moe_opt.register(Options(profile=file, network_levels=levels))
            try:
                layer = build_layer(config := moe_config(moe_token_dispatcher_type="auto"))
                layer(torch.randn(8, 2, config.hidden_size))
                (planned,) = current_controller().layers
                planned.seen()
                planned.use("allgather")
                layer(torch.randn(8, 2, config.hidden_size))
                layer.eval()(torch.randn(6 + dist.get_rank(), 2, config.hidden_size))
                layer.train()(torch.randn(7 if dist.get_rank() == 1 else 6, 2, config.hidden_size))
            except ConfigurationError as error:
                said.append(str(error))
            finally:
                megatron_moe_opt.register()
    return tuple(said)


def test_passes_that_allgather_cannot_run_and_levels_that_do_not_fit_are_refused(ranks, profile):
    for of_pass, of_levels in ranks.run(pass_of_unlike_tokens, file=profile):
        assert "allgather, which takes as many tokens from each rank: all passes had 16 when it was pl" in of_pass
        assert of_levels.startswith("--moe-opt-levels 2,3")


def test_a_flex_that_one_rank_cannot_start_is_tried_on_none(ranks, profile):
    answers = ranks.run(train_with_a_flex_of_its_own, file=profile, fastest="allgather", fails_on=2)
    for ours, stock in zip(answers, stocks(ranks, TWO_BESIDE["steps"]), strict=True):
        assert ours["settled"] and "flex:deepep" not in ours["tried"] and ours["released"] == ["flex:deepep"]
        assert (
            "not flex:deepep: what it communicates with cannot be made on rank 2 (AssertionError: no NVLink): no "
            in ("\n".join(ours["said"]))
        )
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


def test_it_sees_and_tries_passes_whose_stages_megatron_calls(ranks, profile):
    """1F1B overlap: nobody calls the forward method of the layers, nor of routers that are wrapped once they are built;
    what pipelines through experts is left out.
    """
    config = {"sizes": {"ep": 4}, "bf16": True, "overlap_moe_expert_parallel_comm": True, "microbatches": 2}
    config |= {"steps": 10, "most_steps": 8, "at_first": 3}
    stock = ranks.run(train, options=None, **config)
    auto = ranks.run(
        train, options=Options(profile=profile), seconds=AllAlike(), moe_token_dispatcher_type="auto", wraps=True,
        **config,
    )  # fmt: skip
    for ours, theirs in zip(auto, stock, strict=True):
        assert ours["settled"] and {"alltoall", "monta"} <= {name.partition(":")[0] for name in ours["tried"]}
        assert not any(name.startswith("mpmoe") for name in ours["tried"])
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=5e-3)


def test_a_pipeline_stage_without_moe_layers_waits_with_the_others(ranks, tmp_path):
    file = write_profile(tmp_path / "cluster.json", World((0, 0), ep=2), (2,))
    answers = ranks.run(
        train, options=Options(profile=file), sizes={"ep": 2, "pp": 2}, seconds=AllAlike(),
        moe_token_dispatcher_type="auto", moe_layer_freq=[0, 1], microbatches=2, learnt=2, **TWICE,
    )  # fmt: skip
    assert [answer["layers"] for answer in answers] == [0, 0, 1, 1]
    assert all(answer["settled"] for answer in answers)
    assert len({tuple(answer["tried"]) for answer in answers}) == 1
    assert answers[2]["runs"] == answers[3]["runs"] in answers[2]["tried"]
    assert sum("runs once, to plan anew" in line for line in answers[0]["said"]) == 1
    assert all(answer["said"] == answers[0]["said"] for answer in answers)


def test_tp_without_sequence_parallelism_begins_with_what_trains_there(ranks, tmp_path):
    """Stock refuses, and is not tried. So it does when it is planned anew."""
    file = write_profile(tmp_path / "cluster.json", World((0, 0, 0, 0), tp=2, ep=2, expert_tp=2), (2,))
    sizes, config = {"tp": 2, "ep": 2, "etp": 2}, {"sequence_parallel": False} | TWICE
    auto = ranks.run(
        train, options=Options(profile=file), sizes=sizes, seconds=AllAlike(), learnt=2,
        moe_token_dispatcher_type="auto", **config,
    )  # fmt: skip
    assert any("monta:O1 runs once, to plan anew" in line for line in auto[0]["said"])
    monta = ranks.run(train, options=Options(), sizes=sizes, moe_token_dispatcher_type="monta", **config)
    assert auto[0]["settled"] and "alltoall" not in auto[0]["tried"] and len(auto[0]["tried"]) > 1
    assert auto[0]["losses"] == pytest.approx(monta[0]["losses"], rel=1e-5)


S2_SIZES, S2_CANDIDATES = {"tp": 2, "ep": 2, "etp": 2}, ("parm:S2", "monta:O1", "parm:S1")


def test_layers_change_to_rows_split_after_the_gate_and_back(ranks, tmp_path):
    """Router, auxiliary loss and shared experts see all tokens under S2, and parts of them under the others."""
    steps = 1 + 2 * len(S2_CANDIDATES) + 3  # monta's, S2's, S1's, and S2's again, which stays
    found = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in S2_CANDIDATES)
    Plan({1: "monta:O1", 2: "monta:O1"}, found, "a cluster", ep=2, etp=2, experts=8).save(tmp_path / "plan.json")
    config = {
        "sequence_parallel": False, "moe_shared_expert_intermediate_size": 96, "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss", "moe_shared_expert_gate": True,
    }  # fmt: skip
    seconds = dict.fromkeys(S2_CANDIDATES, 1.0) | {"parm:S2": 0.5}
    auto = ranks.run(
        train, steps=steps, options=Options(plan=tmp_path / "plan.json"), sizes=S2_SIZES, seconds=seconds,
        moe_token_dispatcher_type="auto", **config,
    )  # fmt: skip
    monta = ranks.run(
        train, steps=steps, options=Options(), sizes=S2_SIZES, moe_token_dispatcher_type="monta", **config
    )
    for ours, theirs in zip(auto, monta, strict=True):
        assert ours["runs"] == "parm:S2" and ours["tried"] == sorted(S2_CANDIDATES)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


def train_unlike_layers(file: Path) -> dict[str, Any]:
    """The second layer passes for one of other sizes; each layer has its own fastest variant."""
    from megatron_moe_opt.integration.auto.controller import Controller
    from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer

    workload, runs = PlannedLayer.workload, []

    def of_number(layer: PlannedLayer) -> LayerWorkload:
        return dataclasses.replace(workload(layer), ffn=96 * layer.layer.layer_number)

    def seconds(controller: Controller, _: float) -> float:
        runs[:] = [layer.current for layer in controller.layers]
        return sum(1.0 if runs[number].startswith(wanted) else 2.0 for number, wanted in enumerate(("monta", "mpmoe")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedLayer, "workload", of_number)
        patch.setattr(Controller, "_largest", seconds)
        found = train(STEPS, Options(profile=file), {"ep": 4}, moe_token_dispatcher_type="auto")
    return found | {"runs": [built for (built,) in found["built"]]}


def test_layers_of_unlike_sizes_run_each_its_own(ranks, profile):
    answers = ranks.run(train_unlike_layers, file=profile)
    for ours, stock in zip(answers, stocks(ranks, STEPS), strict=True):
        assert ours["settled"]
        assert [one.partition(":")[0] for one in ours["runs"]] == ["monta", "mpmoe"]
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


class Turning(dict[str, float]):
    """The times of steps, until what was chosen takes three times as long: in the second window, and ranks have asked
    each other once before the first of all.
    """

    def __init__(self, choice: str, **seconds: float) -> None:
        super().__init__(seconds)
        self.choice, self.asked = choice, 0

    def __getitem__(self, variant: str) -> float:
        self.asked += 1
        return super().__getitem__(variant) * (3.0 if variant == self.choice and self.asked > TRIED + 2 else 1.0)


TURNED = ("alltoall", "mpmoe:2", "monta:O1")
TRIED = 2 * (len(TURNED) + 1 + 2)
"""Steps, one turn each, and one more of stock and what is faster; then a window in which all is as it was, and one in
which not.
"""


def train_while_times_turn(file: Path) -> dict[str, Any]:
    from megatron_moe_opt.planning.choosing import drift

    seconds = {"alltoall": 20.0, "allgather": 30.0, "mpmoe:2": 5.0, "monta:O1": 8.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "WINDOW", 3)
        patch.setattr(drift, "MOST_COST", 1e3)
        steps = 2 * (1 + TRIED) + 2 + 2 * 3 + 1  # what had been chosen has a second turn, too
        return train(
            steps, Options(plan=file), {"ep": 4}, Turning("mpmoe:2", **seconds), moe_token_dispatcher_type="auto"
        )


def test_it_plans_anew_when_steps_take_longer_than_when_it_was_chosen(ranks, tmp_path):
    """It goes by the plan.json again: what that plans runs first. Stock is tried too, of which nothing was kept."""
    found = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in TURNED)
    Plan(dict.fromkeys((1, 2), "mpmoe:2"), found, "a cluster", ep=4, etp=1, experts=8).save(tmp_path / "plan.json")
    answers = ranks.run(train_while_times_turn, file=tmp_path / "plan.json")
    for ours, stock in zip(answers, stocks(ranks, len(answers[0]["losses"])), strict=True):
        assert ours["settled"] and ours["planned"] == "mpmoe:2" and ours["runs"] == "monta:O1"
        assert ours["tried"] == sorted((*TURNED, "allgather")) and ours["built"] == [["monta:O1"]] * 2
        assert any("mpmoe:2 had been chosen; a step takes 15000.0 ms, 3.00 of what" in line for line in ours["said"])
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


def train_while_routers_learn(file: Path) -> dict[str, Any]:
    """Trains so that samples have come to differ at the second look. The cluster is taken to be as the file says."""
    from megatron_moe_opt.integration.auto import own_profile

    measured = []

    def measure(*_: Any) -> own_profile.OwnProfile:
        measured.append(own_profile.OwnProfile(Cluster.load(file), str(file)))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_profile, "own_profile", measure)
        found = train(
            ANEW, Options(), {"ep": 4}, FasterWithMoves(), most_steps=10, at_first=4, savings=(0.0, 0.3), learnt=6,
            moe_token_dispatcher_type="auto", **SEQ_AUX,
        )  # fmt: skip
    assert len(measured) == 1
    return found


ANEW, SEQ_AUX = 2 * (1 + 10 + 2 * 3), {"moe_router_load_balancing_type": "seq_aux_loss"}


def test_it_looks_and_plans_anew_once_when_routers_have_learnt_without_measuring_again(ranks, profile):
    """So that what was not worth a trial comes in."""
    stock = ranks.run(train, options=None, sizes={"ep": 4}, steps=ANEW, **SEQ_AUX)
    answers = ranks.run(train_while_routers_learn, file=profile)
    for ours, theirs in zip(answers, stock, strict=True):
        assert ours["settled"] and ours["runs"].startswith("netmoe") and ours["moved"] > 4
        assert "alltoall" in ours["tried"] and ours["built"] == [[ours["runs"]]] * 2
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    said = answers[0]["said"]
    assert [line for line in said if line.startswith("alltoall had been chosen")] == [
        "alltoall had been chosen; routers have learnt for 6 steps since: alltoall runs once, to plan anew"
    ]
    (changed,) = (line for line in said if line.startswith("since the last plan: "))
    assert "bytes between nodes that placing samples saves 30.0% (0.0% then)" in changed
    assert all(ours["said"] == said for ours in answers)


def train_on_fewer_bytes(file: Path) -> dict[str, Any]:
    """A GPU of one rank has no gigabyte to give, though it looked as if it had."""
    import torch.distributed as dist

    from megatron_moe_opt.integration.auto import memory_room

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_room, "COMMUNICATOR_BYTES", 2**30)
        patch.setattr(memory_room, "room", lambda passes, layers, *_: memory_room.Room(2**40, 2**20, passes, layers))
        patch.setattr(memory_room, "could_take", lambda size: size < 2**30 or dist.get_rank() != 2)
        return train(
            options=Options(profile=file), sizes={"ep": 4}, seconds=AllAlike(),
            moe_token_dispatcher_type="auto", **ONE_SWEEP,
        )  # fmt: skip


def test_what_one_rank_has_no_memory_for_is_tried_on_none(ranks, profile):
    answers = ranks.run(train_on_fewer_bytes, file=profile)
    for ours, stock in zip(answers, stocks(ranks, ONE_SWEEP["steps"]), strict=True):
        families = {name.partition(":")[0] for name in ours["tried"]}
        assert ours["settled"] and {"alltoall", "allgather", "monta"} <= families and "expert-migration" not in families
        assert any("1 of 4 ranks could not allocate the 1.3 GB" in line for line in ours["said"])
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)


CANDIDATES = ("alltoall", "monta:O1", *(f"mpmoe:{count}" for count in range(2, 8)))


def plan(file: Path, layers: dict[int, str], ep: int = 4) -> Path:
    candidates = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in CANDIDATES)
    Plan(layers, candidates, "a cluster", ep=ep, etp=1, experts=8).save(file)
    return file


def test_a_plan_runs_from_the_first_step_and_is_tried(ranks, tmp_path):
    options = Options(plan=plan(tmp_path / "plan.json", {1: "mpmoe:2", 2: "mpmoe:2"}))
    seconds = {name: 1.0 if name in ("alltoall", "monta:O1") else 1.0 - 0.1 * int(name[-1]) for name in CANDIDATES}
    seconds["allgather"] = 1.0
    answers = ranks.run(
        train, steps=30, options=options, sizes={"ep": 4}, seconds=seconds, most_steps=30,
        moe_token_dispatcher_type="auto",
    )  # fmt: skip
    for answer in answers:
        assert answer["planned"] == "mpmoe:2"
        assert answer["tried"] == sorted(seconds)  # 6 of them at first; then 6 and 7 partitions, next to the fastest
        assert answer["runs"] == "mpmoe:7" and answer["built"] == [["mpmoe:7"]] * 2
        # Of 2 a turn; 4, 5 and 6 partitions and stock run a second time, then 6 and 7.
        assert answer["steps"] == 14 + 8 + 4


@pytest.mark.parametrize(
    ("second", "config"),
    [("mpmoe:2", {}), ("monta:O2x2", {"overlap_moe_expert_parallel_comm": True, "bf16": True, "wraps": True})],
    ids=["called", "overlapped"],
)
def test_a_plan_that_differs_by_layer_runs_as_it_is(ranks, tmp_path, second, config):
    options = Options(plan=plan(tmp_path / "plan.json", {1: "monta:O1", 2: second}))
    run = {"steps": 2, "sizes": {"ep": 4}, "moe_token_dispatcher_type": "auto"} | config
    for answer in ranks.run(train, options=options, **run):
        assert answer["settled"] and answer["tried"] == []
        assert [built[-1] for built in answer["built"]] == ["monta:O1", second]


ODD_CANDIDATES = ("alltoall", "monta:O1", "mpmoe:2", "mpmoe:2:S1", "expert-migration:4")


def train_with_odd_experts(file: Path, oddities: Sequence[str]) -> tuple[list[float], dict[str, Any]]:
    """Returns the losses under stock, and what `auto` does by a plan, of a model with odd experts on rank 1 alone."""
    from tests.ranks import gpt as models

    build = models.gpt

    def draw(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        torch.rand(1)

    def gpt(**config: Any) -> models.Gpt:
        model = build(**config)
        layer = [one for one in model.model.modules() if hasattr(one, "token_dispatcher")][-1]
        experts = layer.experts
        if dist.get_rank() != 1:
            return model
        if "routing" in oddities:
            take_turns(layer, (3, 1))
        if "gate" in oddities:
            gate = torch.ones(64, requires_grad=True)
            experts.register_forward_hook(lambda _, inputs, outputs: (outputs[0] * gate, outputs[1]))
        if "draws" in oddities:
            experts.register_forward_pre_hook(draw)
        if "frozen" in oddities:
            experts.requires_grad_(False)
        return model

    run = {"steps": 1 + 2 * 5 + 1, "sizes": {"ep": 4}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "gpt", gpt)
        stock = train(options=None, **run)
        auto = train(
            options=Options(plan=file), seconds=AllAlike(), most_steps=2 * 5, moe_token_dispatcher_type="auto", **run
        )
    return stock["losses"], auto


@pytest.mark.parametrize(
    ("oddities", "left_out"),
    [
        (("gate",), {"mpmoe:2 and 1 more": "a trained tensor of shape [64] takes part in the experts"}),
        (
            ("draws",),
            {
                "mpmoe:2 and 1 more": "experts draw random numbers (dropout), and get rows in other calls",
                "expert-migration:4": "experts draw random numbers (dropout), and get rows in other calls",
            },
        ),
        (
            ("frozen",),
            {"expert-migration:4": "experts travel, and those of some layer are frozen on some of the ranks"},
        ),
        (
            ("routing",),
            {"expert-migration:4": "a token that hops takes top-k experts along, and a hook on router (tests.ranks."},
        ),
    ],
    ids=["gate", "draws", "frozen", "routing"],
)
def test_what_experts_of_one_rank_cannot_run_under_no_rank_tries(ranks, tmp_path, oddities, left_out):
    """In a pass it would end the run, and some ranks would wait for that one."""
    found = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in ODD_CANDIDATES)
    Plan(dict.fromkeys((1, 2), "alltoall"), found, "a cluster", ep=4, etp=1, experts=8).save(tmp_path / "plan.json")
    answers = ranks.run(train_with_odd_experts, file=tmp_path / "plan.json", oddities=oddities)
    first = answers[0][1]
    for stock, ours in answers:
        assert ours["settled"] and (ours["tried"], ours["said"]) == (first["tried"], first["said"])
        assert ours["losses"] == pytest.approx(stock, rel=1e-5)
    for variants, why in left_out.items():
        assert any(line.startswith(f"not {variants}: {why}") for line in first["said"])
    kept = {name for name in ODD_CANDIDATES if not any(name.startswith(one.split()[0]) for one in left_out)}
    assert set(first["tried"]) == {"allgather", *kept}


def train_by_own_file(folder: Path, groups_come_later: bool) -> dict[str, Any]:
    """One step by a plan.json that every rank looks for in a place of its own, as on file systems that are not shared.

    Args:
        groups_come_later: the configuration is built before there are process groups, as Megatron-LM 0.19 does.
    """
    import torch.distributed as dist

    from megatron_moe_opt.integration.auto.controller import Controller

    init = Controller.__init__

    def without_groups(controller: Controller, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: False)
            init(controller, *arguments)

    options = Options(plan=folder / str(dist.get_rank()) / "plan.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        if groups_come_later:
            patch.setattr(Controller, "__init__", without_groups)
        return train(1, options, {"ep": 4}, moe_token_dispatcher_type="auto")


@pytest.mark.parametrize("groups_come_later", [False, True])
def test_the_first_rank_reads_the_plan_for_all(ranks, tmp_path, groups_come_later):
    (tmp_path / "0").mkdir()  # the other files are missing
    plan(tmp_path / "0" / "plan.json", {1: "mpmoe:2", 2: "mpmoe:2"})
    for answer in ranks.run(train_by_own_file, folder=tmp_path, groups_come_later=groups_come_later):
        assert answer["planned"] == "mpmoe:2" and [built[-1] for built in answer["built"]] == ["mpmoe:2"] * 2


def test_a_plan_that_the_first_rank_cannot_read_is_refused_on_all(ranks, tmp_path):
    for rank in (1, 2, 3):
        (tmp_path / str(rank)).mkdir()
        plan(tmp_path / str(rank) / "plan.json", {1: "mpmoe:2", 2: "mpmoe:2"})
    with pytest.raises(RankFailure) as caught:
        ranks.run(train_by_own_file, folder=tmp_path, groups_come_later=False)
    assert len(caught.value.errors) == 4
    file = tmp_path / "0" / "plan.json"
    for _, kind, text in caught.value.errors:
        assert kind == "ConfigurationError" and f"{file} cannot be read" in text


@pytest.mark.parametrize(
    ("layers", "ep", "message"),
    [
        ({1: "mpmoe:2", 2: "mpmoe:2"}, 2, "--expert-model-parallel-size 4 is not what --moe-opt-plan"),
        ({1: "mpmoe:2", 3: "monta:O1"}, 4, "whose MoE layers are 1, 3, and this one's are 1, 2"),
    ],
    ids=["other sizes", "a layer is missing"],
)
def test_a_plan_for_another_model_is_refused(ranks, tmp_path, layers, ep, message):
    options = Options(plan=plan(tmp_path / "plan.json", layers, ep))
    with pytest.raises(RankFailure) as caught:
        ranks.run(train, steps=1, options=options, sizes={"ep": 4}, moe_token_dispatcher_type="auto")
    assert all(kind == "ConfigurationError" and message in text for _, kind, text in caught.value.errors)


def test_a_profile_that_cannot_be_planned_with_ends_all_ranks(ranks, tmp_path):
    """It has no expert; only rank 0 plans, after the first step."""
    file = tmp_path / "cluster.json"
    Cluster(World((0, 0, 0, 0), ep=4), {(Kind.ALL_TO_ALL, "ep"): ((1, 1e-3),)}).save(file)
    with pytest.raises(RankFailure) as caught:
        ranks.run(train, steps=1, options=Options(profile=file), sizes={"ep": 4}, moe_token_dispatcher_type="auto")
    assert [(rank, kind) for rank, kind, _ in caught.value.errors] == [
        (rank, "ConfigurationError") for rank in range(4)
    ]
    assert all("no expert" in text for _, _, text in caught.value.errors)


def train_on_uneven_nodes(nodes: Sequence[int], **arguments: Any) -> dict[str, Any]:
    from megatron_moe_opt.integration.auto import look

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(nodes[dist.get_rank()]))
        said = []
        patch.setattr(look, "say", lambda _, line: said.append(line))
        return train(**arguments) | {"unlike": said}


def test_groups_that_lie_unlike_on_nodes_are_planned_alike(eight_ranks, tmp_path):
    """Those of the same experts: their gradients are summed over both, in the order in which layers give them."""
    nodes = (0, 0, 0, 0, 1, 1, 2, 2)
    file = write_profile(tmp_path / "cluster.json", World(nodes, ep=4), (2, 2))
    arguments = {"options": Options(profile=file), "seconds": AllAlike(), "at_first": 2, "most_steps": 6}
    found = eight_ranks.run(
        train_on_uneven_nodes, nodes=nodes, steps=9, sizes={"ep": 4}, moe_token_dispatcher_type="auto", **arguments
    )
    assert all(one["unlike"] == found[0]["unlike"] for one in found)
    assert "groups of 4 ranks lie on nodes as 2x2 or 4" in found[0]["unlike"][0] and len(found[0]["unlike"]) == 1
    assert all((one["tried"], one["runs"]) == (found[0]["tried"], found[0]["runs"]) for one in found)
    assert found[0]["settled"] and not any("hops" in one or "migration" in one for one in found[0]["tried"])
    stock = eight_ranks.run(train, steps=9, options=None, sizes={"ep": 4})
    for one, expected in zip(found, stock, strict=True):
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-5)
