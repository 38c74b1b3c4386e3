"""`tools.papers.timed`: its list, its table, and points of it, made small, on 4 ranks of two nodes."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import gcd
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import PARM_B
from tests.ranks.commands import group_of_the_pool
from tests.ranks.devices import rank_device
from tools.bench import netbox_runs
from tools.bench.netbox_runs import file_of, time_points
from tools.papers import timed


def test_the_list_has_48_layers_of_table_iv_and_the_first_eight_have_all_groups():
    listed = timed.points()
    names = [one.name for one in listed]
    of_parm = [one for one in listed if one.name.startswith("parm")]
    assert len(set(names)) == len(names) and len({asdict(one)["name"].split(": ")[1] for one in of_parm}) == 48
    assert gcd(timed._SPREAD, 48) == 1
    assert {(one.layer.tp, one.layer.expert_tp) for one in of_parm[:8]} == set(timed.parm.GROUPS)
    assert len({file_of(Path(), one) for one in listed}) == len(listed)
    for one in listed:
        one.layer.check(
            ("alltoall", "monta", "parm", "mpmoe", "expert-migration", "netmoe", "deepspeed"), 2 * one.links.ranks
        )


def test_points_of_one_profile_run_together(tmp_path, monkeypatch):
    """Six of Parm's; what has run before is left out, and what leaves no file has failed."""
    runs: list[list[str]] = []

    def run(module, out, points, unmet):
        runs.append([one.name.split(":")[0] for one in points])

    monkeypatch.setattr(netbox_runs, "_run", run)
    monkeypatch.setattr("sys.argv", ["timed", "--out", str(tmp_path), "--only", "parm"])
    first = next(one for one in timed.points() if one.name.startswith("parm 00"))
    found = timed.Timed({name: [1.0] for name in ("deepspeed", "parm:S1", "parm:S2")}, {})
    found.chosen = {"by Algorithm 1": "parm:S1", "by our model": "parm:S1"}
    file_of(tmp_path, first).write_text(json.dumps(asdict(found)))
    assert timed.main() == 1
    assert sorted(map(len, runs)) == [5, *[6] * 7] and not any("parm 00" in run for run in runs)
    assert len({name for run in runs for name in run}) == 47


def test_a_row_says_what_was_measured_predicted_and_published(tmp_path):
    point = next(one for one in timed.points() if one.name.startswith("parm 00"))
    found = timed.Timed(
        {"deepspeed": [4.0, 6.0, 5.0], "parm:S1": [2.0, 2.0, 2.0], "parm:S2": [1.0, 1.0, 1.0]},
        {"deepspeed": 3.0, "parm:S1": 1.0, "parm:S2": 0.5},
        {"by Algorithm 1": "parm:S1", "by our model": "parm:S2"},
    )
    file_of(tmp_path, point).write_text(json.dumps(asdict(found)))
    lines = list(timed.table(tmp_path))[2:]
    assert [line.split(" | ")[1:5] for line in lines] == [
        ["deepspeed / parm:S1", "2.50", "3.00", "+20%"],
        ["deepspeed / parm:S2", "5.00", "6.00", "+20%"],
        ["deepspeed / by Algorithm 1: parm:S1", "2.50", "3.00", "+20%"],
        ["deepspeed / by our model: parm:S2", "5.00", "6.00", "+20%"],
    ]
    assert lines[0].endswith("| 2.62 (Table IV, mean) |")


def described(sizes, device):
    """Replaces a profile: describes two nodes of two GPUs."""
    return describe(replace(PARM_B, node=2), sizes.layout(4), sizes.hidden, sizes.ffn_hidden, sizes.dtype)


@contextmanager
def on_two_nodes(measured):
    """Ranks of the pool are those of a benchmark's points, whose profile `measured` makes. Yields what patches more."""
    from megatron_moe_opt.cli import ranks as command_ranks
    from megatron_moe_opt.cli.profile import run as profile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_ranks, "megatron_process_group", group_of_the_pool)
        patch.setattr(profile, "measured", measured)
        patch.setitem(os.environ, "GROUP_RANK", str(dist.get_rank() // 2))
        yield patch


def _time(name, out):
    point = next(one for one in timed.points() if one.name.startswith(name))
    sizes = {"tokens": 16, "hidden": 32, "ffn_hidden": 16, "steps": 1, "warmup": 0}
    if point.layer.expert_tp > 1:
        sizes |= {"tp": 2, "ep": 2, "expert_tp": 2, "experts": 2}
    point = replace(point, links=timed.DATA_CENTRES, layer=replace(point.layer, **sizes))
    with on_two_nodes(described) as patch:
        patch.setattr(timed, "SAMPLE_LAYERS", 2)
        time_points([point], out, timed.time_one)
    return point


def _fastermoe_and_stock():
    from megatron_moe_opt import register
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test

    register()
    settings = LayerSettings(("alltoall",), 24, 32, 16, 8, 3, ep=4, routing="zipf")
    with parallel_layer(1, 4, 1, seed=1):
        stock = layer_under_test(settings, "alltoall", rank_device())
        layer = timed.fastermoe_layer(settings, rank_device(), ranks=2)
        layer.layer.load_state_dict(stock.layer.state_dict())
        (output, gradients), (expected, of_stock) = layer.results(), stock.results()
        return [
            (one.cpu(), other.cpu()) for one, other in zip([output, *gradients], [expected, *of_stock], strict=True)
        ]


def test_fastermoe_s_schedule_trains_what_stock_does(ranks):
    for results in ranks.run(_fastermoe_and_stock):
        for found, expected in results:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


END_TO_END = "netmoe: routing as MoE-GPT-S on two nodes, end to end"


@pytest.mark.parametrize(
    "name", ["monta", "parm 00", END_TO_END, "mpmoe over fastermoe", "hybridep", "hybridep table 5: 192"]
)
def test_a_point_is_timed_and_predicted(ranks, name, tmp_path):
    point = ranks.run(_time, name=name, out=tmp_path)[0]
    content = json.loads(file_of(tmp_path, point).read_text())
    assert content.pop("point") == point.name
    found = timed.Timed(**content)
    for ratio in point.ratios:
        for variant in (ratio.slow, ratio.fast):
            variant = found.chosen.get(variant, variant)
            assert all(seconds > 0 for seconds in found.seconds[variant])
            assert variant in found.predicted
    assert len(list(timed.rows(point, content))) == len(point.ratios)
