"""Charts as SVG of a page: every mark is there, with its title, and lengths are in proportion."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_moe_opt.cli.report import charts
from megatron_moe_opt.cli.report.charts import Bar
from megatron_moe_opt.schedules.timeline import one_after_another
from tests.unit.report_cases import mpmoe_step

SVG = "{http://www.w3.org/2000/svg}"


def marks(svg):
    """Left, right, top and bottom of everything that has a title, by it."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, path = group.find(f"{SVG}title"), group.find(f"{SVG}path")
        if title is not None:
            numbers = [float(number) for number in re.findall(r"[-\d.]+", path.get("d"))]
            found[title.text] = (min(numbers[::2]), max(numbers[::2]), min(numbers[1::2]), max(numbers[1::2]))
    return found


def test_bars_are_in_proportion():
    data = [Bar("a", 4.0, "4 ms", (3.0, 5.0), 2.0, is_baseline=True), Bar("$b$ <&>", 1.0, "1 ms", (1.0,), None)]
    svg = charts.bars("some-chart", "A <title>", data, "ms", "median")
    drawn = marks(svg)
    (left, right, *_), (other_left, other_right, *_) = drawn["a: 4 ms"], drawn["$b$ <&>: 1 ms"]
    assert left == other_left and right - left == pytest.approx(4 * (other_right - other_left), rel=1e-3)
    assert 'aria-labelledby="some-chart"' in svg and '<title id="some-chart">A &lt;title&gt;</title>' in svg
    assert "".join(ElementTree.fromstring(svg).itertext()).count("$b$ <&>") == 2  # beside the axis and in the title


def test_bars_of_nothing():
    """A step may take no memory at all."""
    drawn = marks(charts.bars("chart", "", [Bar("a", 0.0, "0 MB"), Bar("b", 0.0, "0 MB")], "MB", "growth"))
    assert [right - left for left, right, *_ in drawn.values()] == [0, 0]


def test_parts_of_a_stack_follow_each_other():
    data = {"x": {"all_to_all": 1.0, "send": 3.0, "other": 2.0}, "y": {}}
    drawn = marks(charts.stacks("chart", "", data, "MB"))
    assert list(drawn) == ["x: all_to_all, 1.00 MB", "x: send, 3.00 MB", "x: other, 2.00 MB"]
    first, second, third = drawn.values()
    assert second[0] == pytest.approx(first[1]) and third[0] == pytest.approx(second[1])
    assert second[1] - second[0] == pytest.approx(3 * (first[1] - first[0]), rel=1e-3)


def test_a_timeline_has_every_op_in_its_lane():
    timeline = one_after_another("all", {str(number): one for number, one in enumerate(mpmoe_step(4, "S3").timelines)})
    drawn = marks(charts.timeline("chart", "", timeline, timeline.seconds))
    assert len(drawn) == len(timeline.spans)
    tops = {lane: set() for lane in timeline.schedule.lanes}
    for (title, (left, right, top, _)), span in zip(drawn.items(), timeline.spans, strict=True):
        assert title.startswith(f"{span.op}: ") and left <= right
        tops[span.op.lane].add(top)
    assert all(len(one) == 1 for one in tops.values()) and len(set.union(*tops.values())) == len(tops)


def test_columns_stand_side_by_side_the_tallest_first():
    drawn = marks(charts.columns("chart", "", (3, 9, 0, 6), "expert"))
    assert list(drawn) == ["expert 1: 9 rows", "expert 3: 6 rows", "expert 0: 3 rows", "expert 2: 0 rows"]
    heights = [bottom - top for *_, top, bottom in drawn.values()]
    assert heights == pytest.approx([heights[0], heights[0] * 2 / 3, heights[0] / 3, 0], rel=1e-3)
