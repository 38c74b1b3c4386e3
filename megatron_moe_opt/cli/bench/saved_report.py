"""All that a run of `moe-opt bench` has measured, as a JSON file, and read from it again.

The file has the fields of LayerReport, and of what it is made of, by their names; beside them the medians and the
verdicts that the table shows, which are not read.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_moe_opt.cli.bench.measured_layer import FACTS, LayerReport
from megatron_moe_opt.option_values import MOST
from megatron_moe_opt.output_file import write_text_whole
from megatron_moe_opt.planning.json_places import JsonPlace

FORMAT, VERSION = "moe-opt bench", 1
COMMAND = "moe-opt bench -o"
_ABOVE_0 = {"seconds", "ratios"}
"""Fields of measured and predicted times and their quotients: a page divides by them."""
_NOT_EMPTY = {"results", "seconds", "ratios", "of_expert", "of_rank"}
"""Lists of which a page shows the largest, or the mean."""
_hints = functools.cache(get_type_hints)


def write_report(path: Path, report: LayerReport) -> None:
    """Writes the file. Raises ConfigurationError where it cannot be written."""
    content = {"format": FORMAT, "version": VERSION} | asdict(report)
    for entry, result in zip(content["results"], report.results, strict=True):
        entry |= {"median_seconds": result.median, "median_ratio": result.ratio, "verdict": result.verdict}
    write_text_whole(path, json.dumps(content, indent=2, default=_word) + "\n")


def read_report(path: Path) -> LayerReport:
    """Reads the file. Raises ConfigurationError, with file, line and field, where it is none of `moe-opt bench`'s."""
    place = JsonPlace.root(path)
    place.check_format(FORMAT, VERSION, COMMAND, "measure")
    report = _value(LayerReport, place)
    place.object()["environment"].object(*FACTS)
    return report


def _word(value: Any) -> str:
    """Returns what JSON has for what it has no form for."""
    return value.value if isinstance(value, Enum) else str(value)


def _value(kind: Any, place: JsonPlace) -> Any:
    """Returns the value of a type that the fields of a LayerReport have; refuses what is none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return place.value
    if NoneType in arguments:
        (given,) = (one for one in arguments if one is not NoneType)
        return None if place.value is None else _value(given, place)
    if is_dataclass(kind):
        hints = _hints(kind)
        found = place.object(*hints)
        return kind(**{name: _value(hint, found[name]) for name, hint in hints.items()})
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            found = tuple(_value(arguments[0], one) for one in place.items())
            if place.keys[-1] in _NOT_EMPTY and not any(found):
                place.refuse("nothing was measured")
            return found
        return tuple(_value(one, item) for one, item in zip(arguments, place.items(len(arguments)), strict=True))
    if origin is not None:  # a mapping
        return {name: _value(arguments[1], one) for name, one in place.object().items()}
    if issubclass(kind, Enum):
        return kind(place.word(*(one.value for one in kind)))
    if kind is Path:
        return Path(place.word())
    if kind is float:
        return place.positive() if _ABOVE_0.intersection(place.keys) else place.finite()
    if kind is int:
        return place.count(-MOST if place.keys[-1] == "seed" else 0)  # nothing else may be below 0
    if type(place.value) is not kind:
        place.refuse(f"{json.dumps(place.value)[:40]} is not of type {kind.__name__}")
    return place.value
