"""tools/bench/auto_and_stock.py: sixteen points, what a run says of one, and the bar."""

from __future__ import annotations

import json

import pytest

from tools.bench import auto_and_stock
from tools.bench.auto_and_stock import LAYOUTS, POINTS, read, table


def report(alltoall: float, allgather: float, auto: float) -> str:
    times = {"alltoall": alltoall, "allgather": allgather, "auto": auto}
    return json.dumps({"results": [{"dispatcher": name, "median_seconds": time} for name, time in times.items()]})


LOG = "moe-opt: auto: monta:O1 stays\nmoe-opt: auto: mpmoe:1:hops stays, as planned: 0.7 of stock's step\n"


def test_sixteen_points_of_four_layouts():
    assert len({point.name for point in POINTS}) == len(POINTS) == 16 and len(LAYOUTS) == 4


def test_auto_is_held_against_the_better_of_stock():
    one = read(POINTS[0], report(0.2, 0.1, 0.105), LOG)
    assert one.ratio == pytest.approx(1.05) and one.kept == "mpmoe:1:hops"
    page = table([one, read(POINTS[1], report(0.1, 0.2, 0.09), LOG)])
    assert "| 200.0 | 100.0 | 105.0 | `mpmoe:1:hops` | 1.050 |" in page
    assert page.endswith("At most 1.03 times the better of stock in 1 of 2 points; 1.050 in the worst.")


def test_a_point_is_run_once_and_one_of_each_layout_comes_first(tmp_path, monkeypatch, capsys):
    ran = []

    def on_netbox(layout, command, log, timeout):
        words = command.split()
        ran.append((layout.name, words[0]))
        log.write_text(LOG)
        with open(words[words.index("--output") + 1], "w") as file:
            file.write(report(0.2, 0.1, 0.1))
        return layout.name != "S2"

    monkeypatch.setattr(auto_and_stock, "on_netbox", on_netbox)
    monkeypatch.setattr("sys.argv", ["x", "--folder", str(tmp_path), "--points", "3"])
    assert auto_and_stock.main() == 1  # S2 failed
    assert ran == [("S1", "profile"), ("S1", "bench"), ("S2", "profile"), ("S3", "profile"), ("S3", "bench")]
    assert "in 2 of 2 points" in capsys.readouterr().out
    ran.clear()
    assert auto_and_stock.main() == 1 and ran == [("S2", "bench")]
