"""The placement part of `python -m tools.bench.kernels`, at sizes that take no time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.bench import placement


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(placement, "TWO_STAGES", [(32, 2), (64, 4)])
    monkeypatch.setattr(placement, "ONE_STAGE", [(64, 8)])
    monkeypatch.setattr(placement, "COUNTS", [(4, 8, 2, 16)])
    monkeypatch.setattr(placement, "integer_program", lambda: None)


def test_rows(small, capsys):
    rows = placement.measure_placement(torch.device("cpu"), repeats=2, seed=1)
    assert [row.op for row in rows] == [
        *["place samples, two stages"] * 2,
        "place samples, one stage",
        "count from a map",
    ]
    assert all(row.ours.median > 0 for row in rows)
    assert [row.speedup is None for row in rows] == [False, False, True, False]
    placement.print_placement(rows)
    assert "I 64, J 16, N 4" in capsys.readouterr().out


def test_without_scipy(small, monkeypatch):
    monkeypatch.setattr(placement, "linear_sum_assignment", lambda: None)
    (row,) = placement.measure_two_stages(np.random.default_rng(0), 32, 2, repeats=2)
    assert row.stock is None and row.speedup is None


def test_with_pulp():
    """Its optimum is ours, or the benchmark ends; where it is installed."""
    pytest.importorskip("pulp")
    scipys, pulps = placement.measure_two_stages(np.random.default_rng(0), 32, 2, repeats=2)
    assert (scipys.counterpart, pulps.counterpart) == ("scipy", "PuLP") and pulps.speedup > 1


def test_a_wrong_placement_ends_the_benchmark(small, monkeypatch):
    monkeypatch.setattr("megatron_moe_opt.kernels.place_samples", lambda num, *_: np.arange(len(num)) // 2)
    with pytest.raises(RuntimeError, match=r"a placement costs \d+, another \d+"):
        placement.measure_two_stages(np.random.default_rng(0), 32, 2, repeats=2)
