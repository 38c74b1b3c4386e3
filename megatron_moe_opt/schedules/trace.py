"""Timelines as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

Trace event format: one process a timeline, one thread a lane, one complete event ("X") an op. A timeline of several
parts has a thread for them too, above the lanes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.schedules.timeline import Part, Span, Timeline

_PARTS = "part"


def write_trace(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Writes what `trace_of` returns. Raises ConfigurationError where the file cannot be written."""
    write_text_whole(path, trace_of(timelines))


def trace_of(timelines: Mapping[str, Timeline]) -> str:
    """Returns timelines under their names, such as {"predicted": ..., "measured": ...}, as JSON."""
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items(), start=1)
        for event in _events(process, name, timeline)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1) + "\n"


def _events(process: int, name: str, timeline: Timeline) -> list[dict[str, Any]]:
    names = [_PARTS] * bool(timeline.parts) + [lane.value for lane in timeline.schedule.lanes]
    threads = {thread: number for number, thread in enumerate(names, start=1)}
    return [
        _named(process, 0, "process", timeline.titled(name)),
        *(_named(process, number, "thread", thread) for thread, number in threads.items()),
        *(_part(process, threads[_PARTS], part) for part in timeline.parts),
        *(_op(process, threads[span.op.lane.value], span) for span in timeline.spans),
    ]


def _named(process: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _part(process: int, thread: int, part: Part) -> dict[str, Any]:
    return _complete(process, thread, part.name, _PARTS, part.start, part.end, {})


def _op(process: int, thread: int, span: Span) -> dict[str, Any]:
    op = span.op
    args = {"kind": op.kind.value, "chunk": op.chunk, "part": op.part, "bytes": op.size, "group": op.group}
    return _complete(process, thread, str(op), op.kind.value, span.start, span.end, args)


def _complete(
    process: int, thread: int, name: str, category: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start * 1e6,  # microseconds
        "dur": (end - start) * 1e6,
        "args": args,
    }
