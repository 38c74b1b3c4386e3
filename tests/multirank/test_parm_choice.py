"""Parm's schedule, chosen from a profile by all ranks alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.pool import RankFailure

LINE = ((1, 1e-3), (10**8, 0.101))  # 1 ms, and 1 GB/s beyond it
SLOW = ((1, 1e-1), (10**8, 10.1))
OTHERS = {(Kind.ALL_TO_ALL, "ep"), (Kind.ALL_GATHER, "expert-tp"), (Kind.REDUCE_SCATTER, "expert-tp")}


def save(file: Path, fast: str) -> Path:
    """A cluster of TP 2, EP 2 and expert-TP 2 on which one schedule is much faster than the others."""
    curves = dict.fromkeys(OTHERS, LINE if fast == "levels" else SLOW)
    curves |= {(Kind.ALL_TO_ALL, JOINT_GROUP): SLOW if fast == "levels" else LINE, (Kind.COPY, None): ((1, 1e-6),)}
    curves[Kind.ALL_GATHER, "tp"] = SLOW if fast == "S2" else LINE
    saa = LINE if fast == "S2" else SLOW
    Cluster(World((0, 0, 1, 1), tp=2, ep=2, expert_tp=2), curves, saa=saa).save(file)
    return file


def chosen(profile: Path, other_ranks_profile: Path, tp: int, sequence_parallel: bool) -> tuple[str, str | None, float]:
    """Schedule and level of a layer that has run, and how far its output is from stock's choice of data."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=tp, ep=2, etp=2):
        megatron_moe_opt.register()
        plain = build_layer(moe_config(moe_token_dispatcher_type="monta", sequence_parallel=sequence_parallel))
        megatron_moe_opt.register(Options(profile=profile if dist.get_rank() == 0 else other_ranks_profile))
        try:
            ours = build_layer(moe_config(moe_token_dispatcher_type="parm", sequence_parallel=sequence_parallel))
            ours.load_state_dict(plain.state_dict())
            generator = torch.Generator().manual_seed(dist.get_rank() // tp)
            hidden = torch.randn(8, 2, 64, generator=generator)
            for _ in range(2):
                output = ours(hidden.clone().requires_grad_())[0]
                output.sum().backward()
        finally:
            megatron_moe_opt.register()
        choice = ours.token_dispatcher.dispatcher.schedule
        difference = (output - plain(hidden)[0]).norm() / output.norm()
        return choice.name, choice.level, difference.item()


@pytest.mark.parametrize("others_have", ["the file", "none"])
@pytest.mark.parametrize(
    ("fast", "sequence_parallel", "expected"),
    [
        ("levels", False, ("S1", "O1")),
        ("fused", False, ("S1", None)),
        ("S2", False, ("S2", None)),
        ("levels", True, ("S1", "O1")),
        ("S2", True, ("S1", None)),
    ],
)
def test_ranks_choose_the_fastest_alike(ranks, tmp_path, fast, sequence_parallel, expected, others_have):
    """All ranks choose by the file of the first rank of the layer's groups."""
    file = save(tmp_path / "cluster.json", fast)
    elsewhere = file if others_have == "the file" else tmp_path / "elsewhere.json"
    arguments = {"profile": file, "other_ranks_profile": elsewhere, "sequence_parallel": sequence_parallel}
    for schedule, level, difference in ranks.run(chosen, tp=2, **arguments):
        assert (schedule, level) == expected
        assert difference < 1e-6


def chosen_under(settings: dict[str, Any], profile: Path) -> tuple[str, str]:
    """The schedule of a layer that has run, and what is said at start."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=2, ep=2, etp=2):
        megatron_moe_opt.register(Options(profile=profile))
        try:
            layer = build_layer(moe_config(moe_token_dispatcher_type="parm", sequence_parallel=False, **settings))
        finally:
            megatron_moe_opt.register()
        layer(torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(dist.get_rank() // 2)))
        dispatcher = layer.token_dispatcher.dispatcher
        return dispatcher.schedule.name, dispatcher.describe()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"moe_router_force_load_balancing": True},
            "--moe-router-force-load-balancing has each rank of a TP group route the tokens that all of them hold in "
            "its own way",
        ),
        ({"moe_expert_capacity_factor": 0.7}, "it drops or balances all tokens of a TP group together"),
    ],
    ids=["drawn", "dropped"],
)
def test_no_choice_falls_on_s2_where_it_is_another_function(ranks, tmp_path, settings, why):
    file = save(tmp_path / "cluster.json", "S2")
    for schedule, said in ranks.run(chosen_under, settings=settings, profile=file):
        assert schedule == "S1"
        assert f", S2 left out: {why}" in said


def refusal(ranks, file: Path, tp: int) -> str:
    with pytest.raises(RankFailure) as caught:
        ranks.run(chosen, profile=file, other_ranks_profile=file, tp=tp, sequence_parallel=False)
    assert {kind for _, kind, _ in caught.value.errors} == {"ConfigurationError"}
    (message,) = {message for _, _, message in caught.value.errors}
    return message


def test_a_profile_that_does_not_fit_is_refused(ranks, tmp_path):
    file = save(tmp_path / "cluster.json", "S2")
    assert "--tensor-model-parallel-size 4 is not what" in refusal(ranks, file, tp=4)
    dataclasses.replace(Cluster.load(file), saa=None).save(file)
    assert "(SAA) was not measured: measure this cluster with moe-opt profile --tp" in refusal(ranks, file, tp=2)
