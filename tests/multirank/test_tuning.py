"""The choice of partitions and memory reuse: that ranks agree on it, and what there is to choose from."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options, split_options
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import row_bytes
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from megatron_moe_opt.schedules.mpmoe import PARTITIONS
from megatron_moe_opt.schedules.schedule import Kind

LAYER = LayerWorkload(0, 64, 128, False, 8, 2, 4, 16, 4, 1, fused=True)


def by_profile(profile, others_profile):
    from megatron_moe_opt.dispatchers.partitioning import MeasuredPartitioning
    from megatron_moe_opt.topology.expert_groups import ExpertGroups

    world, own = dist.group.WORLD, profile if dist.get_rank() == 0 else others_profile
    options = Options(partitions="auto", memory_reuse="auto", profile=own)
    partitioning = MeasuredPartitioning(ExpertGroups(world, None, world), options, LAYER)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        told = [partitioning.choose(lambda rows=rows: [rows] * 4) for rows in (1, 50_000, 50_000, 1)]
    return [(one.count, one.strategy) for one in told], said.getvalue()


def test_the_choice_is_that_of_the_first_rank_s_file(ranks, tmp_path: Path):
    line = ((1, 1e-3), (10**9, 1.001))
    curves = {(Kind.ALL_TO_ALL, "ep"): line, (Kind.COPY, None): ((1, 1e-6), (10**9, 0.01))}
    curves |= {(Kind.OFFLOAD, None): line, (Kind.PREFETCH, None): line}
    gemm = ExpertGemm(64, 128, "fp32", ((16, 1e-5), (1600, 1e-3)))
    Cluster(World((0, 0, 1, 1), ep=4), curves, expert_gemm=gemm).save(tmp_path / "cluster.json")
    answers = ranks.run(by_profile, profile=tmp_path / "cluster.json", others_profile=tmp_path / "none.json")
    assert all(told == answers[0][0] for told, _ in answers)
    told, said = answers[0]
    assert told[0] == told[3] == (1, "none")
    assert told[1] == told[2] and told[1][0] > 1 and told[1][1] == "none"
    assert [line.split(":")[1] for line in said.splitlines()] == [" mpmoe", " mpmoe"]  # once for each choice
    assert "predicted ms a layer, forward and backward: mpmoe:1 " in said and not answers[1][1]


WRONG = {
    "--moe-opt-partitions auto": "--moe-opt-partitions auto chooses from measurements: run `moe-opt profile` and give "
    "its file with --moe-opt-profile; --moe-token-dispatcher-type auto, with that file, also tries what it chooses",
    "--moe-opt-partitions 2,4": "--moe-opt-partitions 2,4 chooses from measurements: run `moe-opt profile`",
    "--moe-opt-memory-reuse auto": "--moe-opt-memory-reuse auto chooses from measurements: run `moe-opt profile`",
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
    ("arguments", "counts", "strategies"),
    [
        ("", (4,), ("none",)),
        ("--moe-opt-partitions 3 --moe-opt-memory-reuse S2", (3,), ("S2",)),
        ("--moe-opt-partitions 8,2,16 --moe-opt-profile f", (2, 8, 16), ("none",)),
        ("--moe-opt-partitions auto --moe-opt-profile f", PARTITIONS, ("none",)),
        ("--moe-opt-memory-reuse auto --moe-opt-profile f", (4,), tuple(STRATEGIES)),
    ],
)
def test_what_there_is_to_choose_from(arguments, counts, strategies):
    options, _ = split_options(arguments.split())
    assert (options.partition_counts, options.memory_strategies) == (counts, strategies)
    assert options.tunes_partitions == (len(counts) * len(strategies) > 1)


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
    return made[0].shown.middle_row_bytes, row_bytes(
        layer_workload(config, SimpleNamespace(ep_size=2, etp_size=2))
    ).middle


@pytest.mark.parametrize("gated", [False, True])
def test_the_model_knows_what_experts_save(ranks, gated):
    for saved, expected in ranks.run(saved_and_expected, gated=gated):
        assert saved == expected > 0
