"""The stream executor without one of its waits, joins or records: each must make a test fail."""

from __future__ import annotations

from collections.abc import Callable

# What the mutant lacks, and the line of stream_executor.cpp that it is made of. None: the line is left out.
_LINES = {
    "the wait of a lane for what the caller queued": ("streams_.wait(stream, *begin_);", None),
    "the join of what its lane left running": ("timed_ ? end(last) : join(stream, last);", "if (timed_) end(last);"),
    "the end of the op before it, where recorded": (
        "timed_ ? end(last) : join(stream, last);",
        "if (!timed_) join(stream, last);",
    ),
    "what an op waits for in other lanes": ("if (ops_[other].lane != op.lane) follow(stream, other);", None),
    "the join between two actions of an op": (
        "if (action > 0) attempt(i, [&] { streams_.join(stream, *op.actions[action - 1]); });",
        None,
    ),
    "the caller's waits for the lanes": ("for (const int op : last) follow(caller_, op);", ";"),
    "the wait for what an op has queued": ("streams_.wait(stream, *issued_[i]);", None),
    "the join of what an op has left running": (
        "streams_.wait(stream, *issued_[i]);\n    join(stream, i);",
        "streams_.wait(stream, *issued_[i]);",
    ),
    "the join before an op's end is recorded": (
        "join(stream, i);\n    end_[i] = streams_.record(stream, true);",
        "end_[i] = streams_.record(stream, true);",
    ),
    "the caller's wait for the recorded ends": ("for (const int op : last) streams_.wait(caller_, *end_[op]);", None),
    "the host's wait for the device, where recorded": ("streams_.synchronize(caller_);", None),
    "a record behind the op: it is made before": (
        "issued_[i] = streams_.record(stream, false);\n    last = i;",
        "last = i;",
    ),
}


def mutants() -> dict[str, Callable[[str], str]]:
    """Makes the text of each mutant, by what it lacks."""
    return {name: _replacing(old, new or "") for name, (old, new) in _LINES.items()}


def _replacing(old: str, new: str) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in stream_executor.cpp"
        text = text.replace(old, new)
        if "issued_[i] =" in old:
            enqueue = "    for (size_t action = 0;"
            text = text.replace(enqueue, f"    issued_[i] = streams_.record(stream, false);\n{enqueue}")
        return text

    return mutate
