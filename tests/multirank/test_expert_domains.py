"""Levels of a group, and the choice of expert domains from a profile."""

from __future__ import annotations

import contextlib
import io
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.domain_curves import KINDS, profile_name, realisable_groups
from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.devices import rank_device
from tests.ranks.pool import RankFailure

LEVELS = (2, 2)
MB = 10**6


def save(
    file: Path, workers: tuple[int, ...] = LEVELS, seconds: tuple[float, float] = (100.0, 1.0), ep: int = 4
) -> Path:
    """Saves a profile on levels that take so many seconds for 100 MB."""
    curves = {}
    for level, ranks in realisable_groups(workers):
        line = ((1, 1e-5), (100 * MB, seconds[level]))
        curves |= {(kind, profile_name(kind, workers, level, ranks)): line for kind in KINDS}
    curves[Kind.COPY, None] = ((1, 1e-9), (MB, 1e-3))
    expert = ExpertGemm(64, 144, "fp32", ((1, 1e-9), (1000, 1e-6)))  # whose time nothing depends on
    Cluster(World((0, 0, 1, 1), ep=ep), curves, expert_gemm=expert).save(file)
    return file


def chosen(
    profile: Path,
    numbers: tuple[int, ...] = (4, 2000),
    ratio: float | None = None,
    chunks: int | None = None,
    levels: tuple[int, ...] = LEVELS,
) -> list[tuple[tuple[int, ...], int]]:
    """Returns domain sizes of layers whose first pass has so many tokens, and chunks of these; gradients are compressed
    by the ratio.
    """
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    found = []
    options = Options(profile=profile, network_levels=levels, gradient_compression_ratio=ratio, chunks=chunks)
    megatron_moe_opt.register(options)
    try:
        with parallel(ep=prod(levels)):
            for tokens in numbers:
                layer = build_layer(moe_config(moe_token_dispatcher_type="expert-migration"))
                # One rank alone has many: the others must choose alike.
                hidden = torch.randn(tokens if dist.get_rank() == 3 else 2, 1, 64, requires_grad=True)
                layer(hidden)[0].sum().backward()
                dispatcher = layer.token_dispatcher.dispatcher
                found.append((dispatcher.hops.groups.domains.sizes, dispatcher.chunks))
                assert all(parameter.grad is not None for parameter in layer.parameters())
    finally:
        megatron_moe_opt.register()
    return found


def chosen_and_said(**options) -> tuple[list[tuple[tuple[int, ...], int]], str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return chosen(**options), said.getvalue()


def test_domains_are_chosen_by_tokens_and_experts(ranks, tmp_path):
    """2 experts of 74 KB a rank against 272 bytes a token: between the slow level's two workers experts travel."""
    for few, many in ranks.run(chosen, profile=save(tmp_path / "cluster.json")):
        assert few[0] == (1, 1)
        assert many[0][0] == 2


def test_replicas_choose_alike(ranks, tmp_path):
    """The rank with many tokens is in the second of two EP groups."""
    profile = save(tmp_path / "cluster.json", workers=(2,), ep=2)
    for (few, _), (many, _) in ranks.run(chosen, profile=profile, levels=(2,)):
        assert (few, many) == ((1,), (2,))


def test_compressed_gradients_make_experts_travel(ranks, tmp_path):
    profile = save(tmp_path / "cluster.json")
    for ratio, sizes in ((None, (1, 1)), (8.0, (2, 1))):
        answers = ranks.run(chosen_and_said, profile=profile, numbers=(300,), ratio=ratio)
        assert all([domains for domains, _ in found] == [sizes] for found, _ in answers)
        assert ("has not measured the codec, which is counted as copies" in answers[0][1]) == (ratio is not None)


def test_tokens_that_hop_over_links_alike_are_cut_unless_the_number_of_chunks_is_given(ranks, tmp_path):
    profile = save(tmp_path / "cluster.json", seconds=(1.0, 1.0))
    for chunks in (None, 3):
        for ((sizes, number),) in ranks.run(chosen, profile=profile, numbers=(16,), chunks=chunks):
            assert sizes == (1, 1) and (number > 1 if chunks is None else number == chunks)


def test_a_profile_without_the_groups_of_domains_is_refused(ranks, tmp_path):
    with pytest.raises(RankFailure) as caught:
        ranks.run(chosen, profile=save(tmp_path / "cluster.json", workers=(4,)))
    for _, kind, message in caught.value.errors:
        assert kind == "ConfigurationError" and message.count("\n") == 0
        assert "measure levels of 2 x 2 ranks with moe-opt profile, or give --moe-opt-domain-sizes" in message


def measured() -> dict[str, list[int]]:
    """Returns the ranks of the group in which each load of `moe-opt profile` runs, on 2 x 2 ranks."""
    from megatron_moe_opt.integration.measuring.domain_moves import domain_groups_of, domain_moves
    from megatron_moe_opt.integration.measuring.loads import Rows

    with domain_groups_of(dist.group.WORLD, LEVELS) as groups:
        rows = Rows(64, torch.float32, rank_device())
        for experts_travel, kinds in ((True, KINDS), (False, [Kind.ALL_TO_ALL])):
            names = [(move.kind, move.group) for move in domain_moves(rows, groups, LEVELS, experts_travel)]
            assert sorted(map(str, names)) == sorted(
                str((kind, profile_name(kind, LEVELS, *group))) for kind in kinds for group in realisable_groups(LEVELS)
            )
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_profile_measures_every_group_of_domains(ranks):
    for rank, groups in enumerate(ranks.run(measured)):
        outer, inner = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        for kind in KINDS:
            assert groups[profile_name(kind, LEVELS, 0, 2)] == outer
            assert groups[profile_name(kind, LEVELS, 1, 2)] == inner


def measured_once() -> list[bool]:
    """Returns whether the loads whose group is that of all ranks of EP run in the group that is there."""
    from megatron_moe_opt.integration.measuring.domain_moves import domain_groups_of

    with domain_groups_of(dist.group.WORLD, (4,)) as groups:
        found = [groups[profile_name(kind, (4,), 0, 4)] is dist.group.WORLD for kind in KINDS]
        pairs = groups[profile_name(Kind.ALL_TO_ALL, (4,), 0, 2)]
        assert dist.get_process_group_ranks(pairs) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    dist.barrier()  # the group that was there still is
    return found


def test_a_group_that_is_there_is_not_made_again(ranks):
    assert all(found == [True] * len(KINDS) for found in ranks.run(measured_once))


def groups_refused() -> None:
    from megatron_moe_opt.errors import ConfigurationError
    from tests.multirank.test_expert_migration import layers
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        with pytest.raises(ConfigurationError, match="--moe-opt-levels 2,3 makes 6 ranks, not the 4 of --expert-model"):
            layers(1, (1, 1), levels=(2, 3))
        with pytest.raises(ConfigurationError, match="--moe-opt-domain-sizes 2 does not fit levels of 2,2 workers"):
            layers(1, (2,), levels=(2, 2))
        with pytest.raises(ConfigurationError, match="--moe-opt-domain-sizes 3 does not fit levels of 4 workers"):
            layers(1, (3,), levels=(4,))
        with pytest.raises(ConfigurationError, match="--moe-opt-chunks 2 cuts tokens that hop, and none does in .*2,2"):
            layers(1, (2, 2), levels=(2, 2), chunks=2)


def test_levels_and_sizes_that_do_not_fit_are_refused(ranks):
    ranks.run(groups_refused)
