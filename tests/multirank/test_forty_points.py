"""`tools.bench.forty_points`: its list, its tables, and one point of it, made small, on 4 ranks of two nodes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from megatron_moe_opt.planning.costs.bus_bandwidth import EVERY_RANK, INSIDE
from megatron_moe_opt.schedules.schedule import Kind
from tests.multirank.test_timed_papers import described, on_two_nodes
from tools.bench import forty_points
from tools.bench.forty_points import IN_PARTITIONS, POINTS, SHAPES
from tools.bench.judged_points import Found, Judged
from tools.bench.netbox_runs import file_of, found_at, time_points


def test_forty_points_of_five_shapes():
    """There are at least two with cut experts, and two of which tokens have four experts or more, as is asked."""
    assert len({one.name for one in POINTS}) == len(POINTS) == 40 and len(SHAPES) == 5
    assert sum(one.layer.expert_tp > 1 for one in SHAPES) >= 2 and sum(one.layer.topk >= 4 for one in SHAPES) >= 2
    for shape in SHAPES:
        assert shape.layer.ep * shape.layer.expert_tp == shape.links.nodes * shape.links.ranks


FOUND = Found(
    rounds={
        "alltoall": [0.4, 0.4, 0.5],
        "mpmoe:2": [0.3, 0.2, 0.3],
        "mpmoe:2:hops": [0.2, 0.2, 0.2],
        "mpmoe:3:hops": [0.19, 0.19, 0.3],
    },
    kept="mpmoe:2:hops",
    planned="mpmoe:3:hops",
    predicted=0.209,
    wire=0.1,
    inside=0.05,
    experts=0.16,
    alone=0.18,
    processors=0.17,
    in_partitions={"mpmoe:2:hops": 0.22, "mpmoe:3:hops": 0.209},
    partitions="mpmoe:3:hops",
)


def test_a_point_is_judged_by_the_medians_of_its_rounds(tmp_path):
    one = Judged(FOUND)
    assert one.single == "mpmoe:2" and one.fastest == "mpmoe:3:hops" and one.limit == 0.16 and one.is_balanced
    assert one.over("alltoall") == (pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.5))
    assert one.regret_of_plan == one.regret_of_partitions == 0
    assert one.regret == pytest.approx(0.2 / 0.19 - 1) and one.error == pytest.approx(0.1)
    point = POINTS[0]
    file_of(tmp_path, point).write_text(json.dumps(asdict(FOUND) | {"point": point.name}))
    lines = list(forty_points.table(tmp_path))
    assert any(
        line.startswith(f"| uniform, {point.tokens} | 400 | `mpmoe:2`: 300 | `mpmoe:2:hops`: 200 | 2.00 (2.00-2.50) |")
        and line.endswith("| 100 | 50 | 160 | 1.19 | 180, 170: 1.06 |")
        for line in lines
    )
    assert "| the same at top-k of 4 and more, experts 0.5 to 2 of the wire | 1.500 (1.50 to 1.50) | 1.3 |" in lines
    assert "| the number of partitions by the profile alone: regret at most 5% | 1 of 1 | 90 % |" in lines
    assert f"| uniform, {point.tokens} | 200 (220) | 190 (209) | 3 | 0.0% |" in lines
    assert "| fastest at most 1.3 times the limit, where a step takes 100 ms | 1 of 1 | all |" in lines


def _measured(sizes, device):
    """Replaces a profile: a described cluster with rates of links, which known clusters have none of."""
    cluster = described(sizes, device)
    rates = {(Kind.SEND_RECEIVE, link): ((2**20, 1e-3),) for link in (EVERY_RANK, INSIDE)}
    return replace(cluster, curves={**cluster.curves, **rates})


FEW = IN_PARTITIONS[:2]


def _time(out):
    from megatron_moe_opt.planning.choosing import trials

    point = next(one for one in POINTS if one.shape.layer.expert_tp == 2)
    layer = replace(point.shape.layer, hidden=32, ffn_hidden=32, steps=2, warmup=0)
    point = replace(point, shape=replace(point.shape, layer=layer), tokens=16)
    with on_two_nodes(_measured) as patch:
        patch.setattr(trials, "MOST_STEPS", 16)
        patch.setattr(forty_points, "IN_PARTITIONS", FEW)
        time_points([point], out, forty_points.time_one)
    return point


def test_a_point_is_planned_tried_and_timed(ranks, tmp_path):
    point = ranks.run(_time, out=tmp_path)[0]
    found = Found(**found_at(tmp_path, point))
    assert found.kept in found.rounds and found.planned in found.rounds and found.predicted > 0
    assert any("hops" in name for name in found.rounds) and all(len(one) == 2 for one in found.rounds.values())
    assert found.wire > 0 and found.inside > 0 and found.experts > 0
    assert found.alone > 0 and found.processors > 0
    assert found.in_partitions.keys() == set(FEW) <= found.rounds.keys() and found.partitions in FEW
