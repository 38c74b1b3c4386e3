"""What the planner is asked for the layer of `moe-opt bench`, and which answer belongs to which dispatcher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe_opt.cli.bench.balance import RoutingBalance
from megatron_moe_opt.cli.bench.predicted import predict_layer, workload_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import H100_IB400
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.layouts import Layout
from megatron_moe_opt.variants import whole_variant

NODES = (0, 0, 0, 0, 1, 1, 1, 1)
CURVES = {
    (kind, group): ((1 << 16, seconds), (1 << 20, 10 * seconds))
    for kind, group, seconds in (
        (Kind.ALL_TO_ALL, "ep", 3e-3),
        (Kind.ALL_TO_ALL, "ep x expert-tp", 4e-3),
        (Kind.ALL_GATHER, "expert-tp", 1e-3),
        (Kind.REDUCE_SCATTER, "expert-tp", 1e-3),
        (Kind.COPY, None, 1e-4),
    )
}
CLUSTER = Cluster(World(NODES, tp=4, ep=2, expert_tp=4), CURVES, expert_gemm=ExpertGemm(64, 32, "fp32", ((16, 1e-3),)))
EVEN = RoutingBalance((24,) * 8, (96,) * 8)
SETTINGS = LayerSettings(
    dispatchers=("monta", "monta:O2x8", "monta:auto", "monta:O2x3", "deepspeed", "expert-migration"),
    tokens=48,
    hidden=64,
    ffn_hidden=128,
    experts=8,
    topk=2,
    tp=4,
    ep=2,
    expert_tp=4,
    dtype="bf16",
    routing="uniform",
    capacity_factor=None,
    pad_to_capacity=False,
    steps=1,
    warmup=0,
    seed=1,
    profile=Path("cluster.json"),
)


@pytest.mark.parametrize(
    ("dispatcher", "name"),
    [
        ("alltoall", "alltoall"),
        ("monta", "monta:O1"),
        ("monta:O1x1", "monta:O1"),
        ("monta:O3", "monta:O3x4"),
        ("monta:O2x16", "monta:O2x16"),
        ("monta:auto", None),
        ("auto", None),
        ("parm", "parm:S1"),
        ("parm:S2", "parm:S2"),
        ("mpmoe", "mpmoe:4"),
        ("mpmoe:2", "mpmoe:2"),
        ("mpmoe:8:S3", "mpmoe:8:S3"),
        ("mpmoe:auto", None),
        ("expert-migration", "expert-migration:1x1"),
        ("expert-migration:2x1", "expert-migration:2x1"),
        ("expert-migration:2x1:r50", "expert-migration:2x1:r50"),
        ("expert-migration:1x1:c1", "expert-migration:1x1"),
        ("expert-migration:1x2:c4:r50:bf16", "expert-migration:1x2:c4:r50:bf16"),
        ("deepspeed", "deepspeed"),
    ],
)
def test_names(dispatcher, name):
    assert whole_variant(dispatcher, levels=2) == name


def test_times_and_reasons():
    made = predict_layer(SETTINGS, EVEN, NODES, CLUSTER)
    found, _ = candidates(workload_of(SETTINGS, EVEN, (2,)), CLUSTER)
    seconds = {one.variant: one.seconds for one in found}
    assert made.seconds == {
        "alltoall": seconds["alltoall"],
        "monta": seconds["monta:O1"],
        "monta:O2x8": seconds["monta:O2x8"],
        "monta:O2x3": made.seconds["monta:O2x3"],  # in no table, and between those of 2 and of 4 chunks there
    }
    assert seconds["monta:O2x2"] < made.seconds["monta:O2x3"] < seconds["monta:O2x4"]
    assert made.missing == {
        "monta:auto": "it chooses by itself: name what it chose, to have that predicted",
        "deepspeed": "the planner has no such candidate",
        "expert-migration": "expert tensor parallelism 4 cuts experts, which do not travel in parts",
    }


def test_a_variant_that_names_a_ratio_is_predicted_for_it():
    known = describe(H100_IB400, Layout(16, ep=16), 2048, 4096)
    names = ("expert-migration:2x1", "expert-migration:2x1:r50", "expert-migration:2x1:r50:fp8")
    settings = replace(SETTINGS, dispatchers=names, hidden=2048, ffn_hidden=4096, experts=16, tp=1, ep=16, expert_tp=1)
    made = predict_layer(settings, RoutingBalance((96,) * 16, (96,) * 16), (0,) * 8 + (1,) * 8, known)
    whole, compressed = (made.seconds[name] for name in names[:2])
    assert compressed < whole and names[2] in made.missing  # formats are predicted where they are asked for
    for setting in ("2x1:50", "2x1:r0.5", "r50", "2x1:c0", "2x1:r50:c2"):
        with pytest.raises(
            ConfigurationError, match="if any, such as expert-migration:1x1:c2 or expert-migration:2x1:r50"
        ):
            whole_variant(f"expert-migration:{setting}", levels=2)


def test_what_cannot_be_predicted_says_why():
    blind = replace(CLUSTER, expert_gemm=None)
    reason = "the profile has no expert: measure this cluster again with moe-opt profile"
    assert predict_layer(SETTINGS, EVEN, NODES, blind).missing == dict.fromkeys(SETTINGS.dispatchers, reason)
    for other, reason in (({"dispatch_only": True}, "whole layers"), ({"shared_ffn_hidden": 8}, "without shared")):
        found = predict_layer(replace(SETTINGS, **other), EVEN, NODES, CLUSTER)
        assert not found.seconds and all(reason in said for said in found.missing.values())


def test_the_busiest_rank_counts():
    skewed = RoutingBalance((24,) * 8, (192,) * 4 + (0,) * 4)
    even, uneven = (predict_layer(SETTINGS, made, NODES, CLUSTER).seconds["alltoall"] for made in (EVEN, skewed))
    assert uneven > 1.2 * even


@pytest.mark.parametrize(
    ("changes", "imbalance", "capacity", "tp"),
    [
        ({}, 2, None, 1),
        ({"capacity_factor": 1.5}, 1.5, None, 1),
        ({"capacity_factor": 3.0}, 2, None, 1),
        ({"capacity_factor": 1.5, "pad_to_capacity": True}, 1, 1.5, 1),
        ({"replicated": True}, 2, None, 4),
    ],
)
def test_workload(changes, imbalance, capacity, tp):
    made = workload_of(replace(SETTINGS, **changes), RoutingBalance((1,) * 8, (2, 0)), (2, 4))
    assert (made.imbalance, made.capacity_factor, made.tp) == (imbalance, capacity, tp)
    assert (made.tokens, made.hidden, made.ffn, made.element_bytes) == (48, 64, 32, 2)
    assert made.workers == (2, 4)
