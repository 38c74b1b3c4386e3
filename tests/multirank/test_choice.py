"""The choice of level and chunks from a profile: by the dispatcher, and judged by `python -m tools.bench.choice`."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.devices import rank_device
from tests.ranks.pool import RankFailure, RankPool
from tools.bench.split_half import noise_floor

MB = 10**6


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """EP 2 x expert-TP 2 on a cluster on which small messages cost their latency: 1 ms, and 1 GB/s beyond it."""
    curve = ((1, 1e-3), (100 * MB, 0.101))
    keys = [(Kind.ALL_TO_ALL, "ep"), (Kind.ALL_GATHER, "expert-tp"), (Kind.REDUCE_SCATTER, "expert-tp")]
    curves = dict.fromkeys(keys, curve) | {(Kind.COPY, None): ((1, 1e-6), (100 * MB, 1e-3))}
    Cluster(World((0, 0, 1, 1), tp=2, ep=2, expert_tp=2), curves).save(tmp_path / "cluster.json")
    return tmp_path / "cluster.json"


def follow_token_counts(profile: Path, other_ranks_profile: Path) -> list[tuple[str, int]]:
    """What a layer uses in each of several passes with few tokens, many, many, few. `profile` is rank 0's."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    used = []
    megatron_moe_opt.register(Options(profile=profile if dist.get_rank() == 0 else other_ranks_profile))
    try:
        with parallel(tp=2, ep=2, etp=2):
            layer = build_layer(moe_config(moe_token_dispatcher_type="monta"))
            pipelining = layer.token_dispatcher.dispatcher.pipelining
            for tokens in (4, 640, 640, 4):
                # Ranks have different numbers of tokens, and choose alike all the same.
                used.append(pipelining.current)
                hidden = torch.randn(tokens + dist.get_rank() // 2, 1, 64, requires_grad=True)
                layer(hidden)[0].sum().backward()
            used.append(pipelining.current)
    finally:
        megatron_moe_opt.register(Options())
    return used


@pytest.mark.parametrize("others_have", ["the file", "none"])
def test_ranks_choose_alike_and_again_when_the_token_count_changes(ranks, profile, tmp_path, others_have):
    """All ranks choose by the file of the first rank of the layer's groups."""
    profile.write_text(profile.read_text().replace("0.101", "10.1"))  # so slow that 640 tokens are many
    elsewhere = profile if others_have == "the file" else tmp_path / "elsewhere.json"
    first, *others = ranks.run(follow_token_counts, profile=profile, other_ranks_profile=elsewhere)
    assert all(other == first for other in others)
    start, small, large, again, small_again = first
    assert start == ("O1", 1)
    assert small == ("O1", 1)  # latency only: cutting it would multiply it
    assert large[0] in ("O2", "O3") and large[1] > 1
    assert again == large and small_again == small


def build(profile: Path, **sizes: int) -> None:
    """A layer in groups of these sizes."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    megatron_moe_opt.register(Options(profile=profile))
    try:
        with parallel(**sizes):
            build_layer(moe_config(moe_token_dispatcher_type="monta"))
    finally:
        megatron_moe_opt.register(Options())


def refusals(ranks: RankPool, profile: Path, **sizes: int) -> list[str]:
    """The ConfigurationErrors of all ranks."""
    with pytest.raises(RankFailure) as caught:
        ranks.run(build, profile=profile, **sizes)
    assert [(rank, kind) for rank, kind, _ in caught.value.errors] == [
        (rank, "ConfigurationError") for rank in range(4)
    ]
    return [message for _, _, message in caught.value.errors]


def test_a_profile_of_other_groups_is_refused(ranks, profile):
    for message in refusals(ranks, profile, ep=4):
        assert "--expert-model-parallel-size 4 is not what" in message


def test_a_bad_profile_is_refused_on_all_ranks(ranks, profile):
    """One rank reads it, and tells the others what is wrong with it."""
    profile.write_text(profile.read_text().replace("0.101", "fast"))
    messages = refusals(ranks, profile, tp=2, ep=2, etp=2)
    assert len(set(messages)) == 1 and "not JSON" in messages[0]


def judge(profile: Path) -> list[Any]:
    from tests.ranks.megatron import parallel
    from tools.bench.choice import measure
    from tools.bench.judged_systems import MontaChooser

    settings = LayerSettings(
        dispatchers=(), tokens=1, hidden=32, ffn_hidden=2, experts=4, topk=2, tp=2, ep=2, expert_tp=2, dtype="fp32",
        routing="uniform", capacity_factor=None, pad_to_capacity=False, steps=2, warmup=0, seed=1, profile=profile,
    )  # fmt: skip
    chooser = MontaChooser([2])
    settings = dataclasses.replace(settings, dispatchers=chooser.candidates, dispatch_only=True)
    with parallel(tp=2, ep=2, etp=2):
        return measure(settings, Cluster.load(profile), [16, 64], chooser, rank_device())


def test_bench_choice_judges_by_the_fastest(ranks, profile):
    for points in ranks.run(judge, profile=profile):
        assert [point.tokens for point in points] == [16, 64]
        for point in points:
            candidates = {name: seconds for name, seconds in point.seconds.items() if name != "alltoall"}
            assert candidates.keys() == {"monta:O1", "monta:O2x2", "monta:O3x2"}
            assert candidates[point.best] == min(candidates.values())
            assert point.regret == candidates[point.chosen] / min(candidates.values()) - 1 >= 0
            assert point.chosen == "monta:O1"  # a few KB on a cluster where a message takes a millisecond
            assert point.predicted == pytest.approx(8 * 1e-3, rel=0.05)  # 2 collectives in each of 4 passes
            assert point.pipelines > 0 and json.dumps(point.seconds)
            assert point.rounds.keys() == point.seconds.keys() and {len(of) for of in point.rounds.values()} == {2}
            assert point.seconds == {name: statistics.median(of) for name, of in point.rounds.items()}
            assert point.noise_floor == noise_floor({name: point.rounds[name] for name in candidates}) >= 0


def judge_partitions(profile: Path, budget: int | None) -> list[Any]:
    from tests.ranks.megatron import parallel
    from tools.bench.choice import measure
    from tools.bench.judged_systems import MpmoeChooser

    chooser = MpmoeChooser([1, 3], "auto", budget)
    settings = LayerSettings(
        dispatchers=chooser.candidates, tokens=1, hidden=32, ffn_hidden=16, experts=4, topk=2, tp=1, ep=4, expert_tp=1,
        dtype="fp32", routing="uniform", capacity_factor=None, pad_to_capacity=False, steps=1, warmup=0, seed=1,
        profile=profile,
    )  # fmt: skip
    with parallel(ep=4):
        return measure(settings, Cluster.load(profile), [64], chooser, rank_device())


def test_bench_choice_judges_partitions_and_memory_reuse(ranks, tmp_path):
    """It judges without a budget, and with one that only three partitions in shared buffers fit."""
    file = tmp_path / "cluster.json"
    kinds = [(Kind.ALL_TO_ALL, "ep"), *((kind, None) for kind in (Kind.COPY, Kind.OFFLOAD, Kind.PREFETCH))]
    gemm = ExpertGemm(32, 16, "fp32", ((16, 1e-3),))
    Cluster(World((0, 0, 1, 1), ep=4), dict.fromkeys(kinds, ((1, 1e-3),)), expert_gemm=gemm).save(file)
    for budget in (None, 85_000):
        for points in ranks.run(judge_partitions, profile=file, budget=budget):
            assert [point.by for point in points] == ["model"]
            for point in points:
                names = {f"mpmoe:{n}:{how}" for n in (1, 3) for how in ("none", "S1", "S2", "S3", "S4")}
                assert point.seconds.keys() == {"alltoall"} | names
                assert point.pipelines > 0 and point.regret >= 0
                for name in (point.chosen, point.best):
                    _, n, strategy = name.split(":")
                    assert budget is None or (n == "3" and strategy != "none")
            (model,) = points
            assert budget is not None or model.chosen.endswith(":none")  # its costs have no noise
            assert model.overhead > 0 and model.predicted > 0
