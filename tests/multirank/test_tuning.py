"""The choice of partitions and memory reuse, by trials and by the model: what ranks learn, and that they agree."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.tuning import TURNS
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import split_options
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes, row_bytes
from megatron_moe_opt.schedules.mpmoe import STRATEGIES
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.pool import RankFailure

LAYER = LayerWorkload(0, 64, 128, False, 8, 2, 4, 16, 4, 1, fused=True)
TOKENS = (0, 3000, 10, 990)
"""Of each rank: 1000 on the mean."""


def _candidates(counts, strategies, budget, layer):
    from megatron_moe_opt.dispatchers.tuning import Candidates
    from megatron_moe_opt.topology.expert_groups import ExpertGroups

    world = dist.group.WORLD
    return ExpertGroups(world, None, world), Candidates(layer, counts, strategies, budget)


def tune(best_of_ranks, passes, counts, strategies, budget, layers, evaluations, middle):
    """What each of several layers' passes is told to use, on ranks that would choose differently on their own.

    Every pass issues as many collectives as it has partitions: ranks that differ would wait for each other for ever.

    Args:
        best_of_ranks: for each rank, the number of partitions that is fastest there.
        middle: middle size of an expert, by which cases tell their layers apart.
    """
    from megatron_moe_opt.dispatchers.tuning import MeasuredPartitioning

    rank, best = dist.get_rank(), best_of_ranks[dist.get_rank()]
    layer = LayerWorkload(0, 64, middle, False, 8, 2, 4, 16, 4, 1, fused=True)
    groups, candidates = _candidates(counts, strategies, budget, layer)
    partitionings = [MeasuredPartitioning(groups, candidates) for _ in range(layers)]

    def rows():
        number = torch.tensor(TOKENS[rank])
        dist.all_reduce(number)
        return int(number) // dist.get_world_size()

    def seconds(n, strategy):
        return 1e-3 * (1 + abs(n - best)) * (1 + rank) * (1 + list(STRATEGIES).index(strategy))

    used, said = [], io.StringIO()
    with contextlib.redirect_stdout(said):
        for number in range(passes):
            told = [partitioning.choose(rows) for partitioning in partitionings]
            for one in told:
                for _ in range(one.count):
                    dist.all_reduce(torch.zeros(1))
            if number in evaluations:
                continue  # without a backward pass
            for one in reversed(told):
                if one.finished is not None:
                    one.finished(SimpleNamespace(seconds=seconds(one.count, one.strategy)))
            used.append([(one.count, one.strategy, one.finished is not None) for one in told])
    return used, said.getvalue()


CASE = {
    "best_of_ranks": (1, 6, 2, 5),
    "passes": 18 * TURNS,
    "counts": PARTITIONS,
    "strategies": tuple(STRATEGIES),
    "budget": None,
    "layers": 1,
    "evaluations": (),
}


def test_ranks_that_would_choose_differently_choose_what_the_slowest_takes(ranks):
    """Each has a best of its own, and none of these is what is best for the slowest rank."""
    answers = ranks.run(tune, **CASE, middle=1)
    assert all(used == answers[0][0] for used, _ in answers)
    used, said = answers[0]
    times = {
        n: max((1 + rank) * (1 + abs(n - best)) for rank, best in enumerate(CASE["best_of_ranks"])) for n in PARTITIONS
    }
    n = min(times, key=times.get)
    assert n not in CASE["best_of_ranks"]
    assert used[-1] == [(n, "none", False)]
    trials = [one for (one,) in used if one[2]]
    tried = [count for count in range(1, n + 2) for _ in range(1 + TURNS)] + [n, n + 1] * TURNS  # where it turns, again
    reused = [(n, strategy, True) for strategy in STRATEGIES if strategy != "none" for _ in range(1 + TURNS)]  # once
    assert trials == [*((count, "none", True) for count in tried), *reused]
    assert all(not said for _, said in answers[1:])
    assert said.startswith("moe-opt: mpmoe: about 887 rows a rank")  # the middle of the range of 1000
    assert f": {n} partitions, memory reuse none; measured ms a layer, forward and backward: {n}xnone" in said
    assert f"; {len(trials)} passes of trials took " in said and said.endswith("% of 1000 passes\n")


def test_layers_share_what_they_measure(ranks):
    """So many layers have the passes of a trial in one step. Evaluations, without a backward pass, do not count."""
    case = CASE | {"layers": 1 + TURNS, "passes": 18, "evaluations": (2, 3)}
    answers = ranks.run(tune, **case, middle=2)
    assert all(used == answers[0][0] for used, _ in answers)
    used, said = answers[0]
    assert used[:5] == [[(n, "none", True)] * (1 + TURNS) for n in range(1, 6)]  # a trial in a step
    assert {n for n, *_ in used[5]} == {4, 5} and used[-1] == [(4, "none", False)] * (1 + TURNS)
    assert said.count("\n") == 1 and all(not said for _, said in answers[1:])


def test_under_a_budget_the_fastest_reuse_that_fits(ranks):
    rows = 1000
    layer = LayerWorkload(0, 64, 128, False, 8, 2, 4, 16, 4, 1, fused=True)
    budget = activation_bytes(layer, 2 * rows, 4, "S1")  # for far more rows: in fewer partitions these fit
    case = CASE | {"best_of_ranks": (2, 2, 2, 2), "passes": 30 * TURNS, "budget": budget // 2}
    answers = ranks.run(tune, **case, middle=128)
    assert all(used == answers[0][0] for used, _ in answers)
    (last,) = answers[0][0][-1]
    assert last[1] == "S1" and last[0] >= 3
    assert {strategy for ((_, strategy, _),) in answers[0][0]} == {"S1", "S2", "S3", "S4"}


def test_a_budget_that_nothing_fits_into_is_refused_on_all_ranks(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run(tune, **CASE | {"budget": 1000}, middle=3)
    assert [rank for rank, kind, _ in caught.value.errors if kind == "ConfigurationError"] == [0, 1, 2, 3]
    assert len({message for _, _, message in caught.value.errors}) == 1
    assert "--moe-opt-activation-budget 1000 is too little" in caught.value.errors[0][2]


def by_model(profile, others_profile):
    from megatron_moe_opt.dispatchers.tuning import ModelPartitioning

    groups, candidates = _candidates(PARTITIONS, tuple(STRATEGIES), None, LAYER)
    partitioning = ModelPartitioning(groups, profile if dist.get_rank() == 0 else others_profile, candidates)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        told = [partitioning.choose(lambda rows=rows: rows) for rows in (1, 50_000, 50_000, 1)]
    assert all(one.finished is None for one in told)
    return [(one.count, one.strategy) for one in told], said.getvalue()


def test_the_model_s_choice_is_that_of_the_first_rank_s_file(ranks, tmp_path: Path):
    line = ((1, 1e-3), (10**9, 1.001))
    curves = {(Kind.ALL_TO_ALL, "ep"): line, (Kind.COPY, None): ((1, 1e-6), (10**9, 0.01))}
    curves |= {(Kind.OFFLOAD, None): line, (Kind.PREFETCH, None): line}
    gemm = ExpertGemm(64, 128, "fp32", ((16, 1e-5), (1600, 1e-3)))
    Cluster(World((0, 0, 1, 1), ep=4), curves, expert_gemm=gemm).save(tmp_path / "cluster.json")
    answers = ranks.run(by_model, profile=tmp_path / "cluster.json", others_profile=tmp_path / "none.json")
    assert all(told == answers[0][0] for told, _ in answers)
    told, said = answers[0]
    assert told[0] == told[3] == (1, "none")
    assert told[1] == told[2] and told[1][0] > 1 and told[1][1] == "none"
    assert [line.split(":")[1] for line in said.splitlines()] == [" mpmoe", " mpmoe"]  # once for each choice
    assert "predicted ms a layer, forward and backward: 1xnone" in said and not answers[1][1]


def tuned_layer(tokens_of_rank, most):
    """(partitions, strategy) of every pass of a real layer that tunes itself, and how far it ends up from stock.

    Two forward passes come before their backward passes, as in a pipeline of stages; every fifth time there is a
    forward pass without any. Rank 0 sends nothing.
    """
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.options import Options
    from tests.multirank.test_mpmoe import relative_error, route_nothing
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=4):
        megatron_moe_opt.register(Options(partitions=(1, 2, 4), tuner="profile"))
        # Without a capacity stock takes every token of a rank to have its experts, also one whose router chose none.
        settings = {"moe_router_load_balancing_type": "none", "moe_expert_capacity_factor": 8.0}
        config = moe_config(moe_token_dispatcher_type="mpmoe", **settings)
        layer = build_layer(config)
        megatron_moe_opt.register()
        stock = build_layer(moe_config(**settings))
        stock.load_state_dict(layer.state_dict())
        partitioning = layer.token_dispatcher.dispatcher.partitioning
        choose, told = partitioning.choose, []
        partitioning.choose = lambda rows: told.append(choose(rows)) or told[-1]
        if dist.get_rank() == 0:
            route_nothing(layer), route_nothing(stock)
        hidden = torch.randn(tokens_of_rank[dist.get_rank()], 1, 64)
        for number in range(most):
            if partitioning.chosen is not None:
                break
            outputs = [layer(hidden.clone().requires_grad_())[0] for _ in range(2)]
            for output in outputs:
                output.sum().backward()
            if number % 5 == 0:
                layer(hidden)
        return [(one.count, one.strategy) for one in told], relative_error(layer(hidden)[0], stock(hidden)[0])


def test_a_layer_tunes_itself_under_skewed_counts(ranks):
    """Ranks time their passes differently and have 0 to 120 rows: had each decided by its own, they would hang."""
    answers = ranks.run(tuned_layer, tokens_of_rank=(9, 60, 1, 5), most=100)
    told, _ = answers[0]
    assert all(other == told and error < 1e-6 for other, error in answers)
    assert told[:2] == [(1, "none")] * 2 and (2, "none") in told  # both are always tried
    assert len(told) < 200  # it has chosen


WRONG = {
    "--moe-opt-tuner model": "--moe-opt-tuner model has nothing to choose: add --moe-opt-partitions auto or",
    "--moe-opt-tuner model --moe-opt-partitions auto": "--moe-opt-tuner model predicts from measurements: run `moe-opt",
    "--moe-opt-partitions 2,zwei": "'2,zwei' is neither a number of partitions from 1 on, nor several such as 2,4,8",
    "--moe-opt-partitions 0": "'0' is neither a number of partitions",
    "--moe-opt-activation-budget 0": "'0' is not a number of bytes above 0, such as 512MiB or 1.5GiB",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_options_are_refused(arguments):
    with pytest.raises(ConfigurationError) as refusal:
        split_options(arguments.split())
    assert WRONG[arguments] in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "counts", "strategies", "tuner"),
    [
        ("", (4,), ("none",), None),
        ("--moe-opt-partitions 3 --moe-opt-memory-reuse S2", (3,), ("S2",), None),
        ("--moe-opt-partitions auto", PARTITIONS, ("none",), "profile"),
        ("--moe-opt-partitions 8,2,16 --moe-opt-profile f --moe-opt-tuner model", (2, 8, 16), ("none",), "model"),
        ("--moe-opt-partitions auto --moe-opt-profile f", PARTITIONS, ("none",), "profile"),
        ("--moe-opt-memory-reuse auto --moe-opt-activation-budget 1.5MiB", (4,), tuple(STRATEGIES), "profile"),
    ],
)
def test_what_there_is_to_choose_from(arguments, counts, strategies, tuner):
    options, _ = split_options(arguments.split())
    assert (options.partition_counts, options.memory_strategies) == (counts, strategies)
    assert options.tunes_partitions == (tuner is not None)
    assert tuner is None or options.partition_tuner == tuner


def saved_and_expected(gated):
    """Bytes of a row that the experts' operations saved, and that the model takes for it."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.options import Options
    from megatron_moe_opt.runtime.through_experts.expert_call import Experts
    from tests.ranks.megatron import moe_config, parallel

    made = []
    with parallel(ep=2, etp=2), pytest.MonkeyPatch.context() as patch:
        init = Experts.__init__
        patch.setattr(
            Experts, "__init__", lambda self, *args, **kwargs: made.append(self) or init(self, *args, **kwargs)
        )
        megatron_moe_opt.register(Options(partitions=2, memory_reuse="S1"))
        activation = torch.nn.functional.silu if gated else torch.nn.functional.gelu
        config = moe_config(moe_token_dispatcher_type="mpmoe", gated_linear_unit=gated, activation_func=activation)
        layer = build_layer(config)
        megatron_moe_opt.register()
        layer(torch.randn(30, 1, 64, requires_grad=True))[0].sum().backward()
    return made[0].middle_row_bytes, row_bytes(layer_workload(config, SimpleNamespace(ep_size=2, etp_size=2))).middle


@pytest.mark.parametrize("gated", [False, True])
def test_the_model_knows_what_experts_save(ranks, gated):
    for saved, expected in ranks.run(saved_and_expected, gated=gated):
        assert saved == expected > 0
