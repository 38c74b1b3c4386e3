"""Timelines as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

Trace event format: one process a timeline, one thread a lane, one complete event ("X") an op.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .timeline import Span, Timeline


def write_trace(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes timelines under their names, such as {"predicted": ..., "measured": ...}, as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items(), start=1)
        for event in _events(process, name, timeline)
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n")


def _events(process: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    threads = {lane: index for index, lane in enumerate(timeline.schedule.lanes, start=1)}
    return [
        _named(process, 0, "process", f"{name}: {timeline.schedule.name}"),
        *(_named(process, thread, "thread", lane.value) for lane, thread in threads.items()),
        *(_complete(process, threads[span.op.lane], span) for span in timeline.spans),
    ]


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(process: int, thread: int, span: Span) -> dict[str, Any]:
    op = span.op
    return {
        "ph": "X",
        "name": str(op),
        "cat": op.kind.value,
        "pid": process,
        "tid": thread,
        "ts": span.start * 1e6,  # microseconds
        "dur": (span.end - span.start) * 1e6,
        "args": {"kind": op.kind.value, "chunk": op.chunk, "bytes": op.size, "group": op.group},
    }
