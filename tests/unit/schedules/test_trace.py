"""Trace files and pictures of timelines."""

from __future__ import annotations

import json

import pytest

from megatron_moe_opt.cli.console import report_console
from megatron_moe_opt.cli.report.timeline_files import check_timeline_files, write_timelines
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.monta import ChunkBytes, outline
from megatron_moe_opt.schedules.picture import write_picture
from megatron_moe_opt.schedules.schedule import Kind, Schedule
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.schedules.trace import write_trace

SECONDS = {Kind.ALL_TO_ALL: 4e-3, Kind.ALL_GATHER: 2e-3, Kind.COPY: 1e-3}


@pytest.fixture
def timelines():
    schedule = outline("dispatch", "O3", 2, 2, 4).sized([ChunkBytes(10, 40), ChunkBytes(20, 80)])
    return {
        "predicted": simulate(schedule, lambda op: SECONDS[op.kind]),
        "measured": simulate(schedule, lambda op: 2 * SECONDS[op.kind]),
    }


@pytest.fixture
def events(timelines, tmp_path):
    write_trace(tmp_path / "trace.json", timelines)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def test_one_complete_event_an_op(events, timelines):
    complete = [event for event in events if event["ph"] == "X"]
    spans = [span for timeline in timelines.values() for span in timeline.spans]
    assert len(complete) == len(spans) == 12
    for event, span in zip(complete, spans, strict=True):
        assert event["name"] == f"{span.op.kind.value} of chunk {span.op.chunk}"
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
        op = span.op
        of_op = {"kind": op.kind.value, "chunk": op.chunk, "part": op.part, "bytes": op.size, "group": op.group}
        assert event["args"] == of_op
    gather = next(event for event in complete if event["name"] == "all_gather of chunk 0")
    assert gather["ts"] == pytest.approx(4000) and gather["dur"] == pytest.approx(2000)


def test_processes_are_timelines_and_threads_are_lanes(events):
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    for process, name in ((1, "predicted"), (2, "measured")):
        assert names["process_name", process, 0] == f"{name}: monta O3 dispatch, 2 chunk(s)"
        assert [names["thread_name", process, thread] for thread in (1, 2, 3)] == ["inter", "intra", "copy"]
    assert len(names) == 8
    lane_of = {"all_to_all": "inter", "all_gather": "intra", "copy": "copy"}
    for event in events:
        if event["ph"] == "X":
            assert names["thread_name", event["pid"], event["tid"]] == lane_of[event["cat"]]


def test_events_have_the_fields_of_the_trace_event_format(events):
    """They are those of the format's description: phases, types, and no overlap of complete events in a thread."""
    ends = {}
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "X":
            assert event["ts"] >= ends.get((event["pid"], event["tid"]), 0) - 1e-6 and event["dur"] >= 0
            ends[event["pid"], event["tid"]] = event["ts"] + event["dur"]


def _pixels(path):
    from matplotlib.image import imread

    return imread(path)


def test_picture_has_the_colour_of_every_chunk(timelines, tmp_path):
    from matplotlib import colormaps

    write_picture(tmp_path / "picture.png", timelines)
    pixels = _pixels(tmp_path / "picture.png")[:, :, :3]
    assert pixels.shape[1] == 1800
    for chunk in (0, 1):
        colour = colormaps["tab20"].colors[chunk]
        assert (abs(pixels - colour).max(axis=2) < 0.01).sum() > 1000
    absent = colormaps["tab20"].colors[2]
    assert (abs(pixels - absent).max(axis=2) < 0.01).sum() == 0


def test_predicted_is_above_measured_on_the_same_axis(timelines, tmp_path):
    """Measured takes twice as long: the upper half's colours end in the middle, the lower half's reach the right."""
    write_picture(tmp_path / "picture.png", timelines)
    pixels = _pixels(tmp_path / "picture.png")[:, :, :3]
    coloured = abs(pixels.max(axis=2) - pixels.min(axis=2)) > 0.2
    height = len(coloured) // 2
    reach = [half.any(axis=0).nonzero()[0].max() for half in (coloured[:height], coloured[height:])]
    begin = coloured.any(axis=0).nonzero()[0].min()
    assert reach[0] - begin == pytest.approx((reach[1] - begin) / 2, rel=0.05)


def test_a_schedule_without_ops_can_be_drawn(tmp_path):
    nothing = {"nothing": Timeline(Schedule("nothing", ()), ())}
    write_picture(tmp_path / "picture.png", nothing)
    write_trace(tmp_path / "trace.json", nothing)
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1


def test_pictures_need_a_timeline(tmp_path):
    with pytest.raises(ConfigurationError, match="no timeline to draw"):
        write_picture(tmp_path / "picture.png", {})


@pytest.mark.parametrize(
    ("name", "begins"), [("X.PNG", b"\x89PNG"), ("X.Svg", b"<?xml"), ("X.PDF", b"%PDF"), ("X.JSON", b"{")]
)
def test_formats_are_known_by_suffixes_in_any_case(timelines, tmp_path, name, begins):
    check_timeline_files("--output", [tmp_path / name], [])
    write_timelines(timelines, [tmp_path / name], report_console())
    assert (tmp_path / name).read_bytes().startswith(begins)
