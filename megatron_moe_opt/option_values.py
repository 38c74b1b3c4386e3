"""What the values of options may be: one definition for the command line and for Python."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from megatron_moe_opt.row_format import Wire, WireFormat

ALL, AUTO = "all", "auto"
MOST = 2**31 - 1
"""The largest number of anything that is counted, bytes aside."""


@dataclass(frozen=True)
class Values:
    """The values that an option takes, and how they are read."""

    take: Callable[[Any], Any]
    """The value as it is kept. Raises ValueError or TypeError for what is none."""
    read: Callable[[str], Any]
    """What a text on the command line stands for, to be taken. Raises ValueError."""
    refusal: str
    """The end of the sentence that refuses a wrong value: what the value `is`."""
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    def parse(self, text: str) -> Any:
        """Returns the value that a text on the command line stands for. Raises argparse.ArgumentTypeError."""
        try:
            return self.take(self.read(text))
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(f"'{text}' is {self.refusal}") from error


def _whole(least: int, most: int = MOST) -> Callable[[Any], int]:
    def take(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return value

    return take


def _read_whole(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text):
        raise ValueError
    return int(text)


def _read_list(text: str) -> tuple[int, ...]:
    return tuple(map(_read_whole, text.split(",")))


def _take_list(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not value:
        raise ValueError
    return tuple(map(_whole(1), value))


def _take_several(value: Any) -> int | tuple[int, ...]:
    numbers = sorted(set(_take_list(value if isinstance(value, (tuple, list)) else (value,))))
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _take_ratio(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1 < value < inf:
        raise ValueError
    return float(value)


def _take_file(value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError
    return Path(value)


def _take_wire(value: Any) -> Wire:
    if not isinstance(value, (str, Wire)):
        raise TypeError
    return Wire.of(value) if isinstance(value, str) else value


def _take_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def or_auto(values: Values, word: str = AUTO) -> Values:
    """Returns these values with one more: the word, `auto` unless another is given."""

    def take(value: Any) -> Any:
        return word if isinstance(value, str) and value == word else values.take(value)

    return Values(
        take,
        lambda text: word if text == word else values.read(text),
        values.refusal,
        f"{values.metavar}|{word}",
    )


def one_of(*choices: str) -> Values:
    """Returns the values of an option that takes one of these words and refuses any other."""

    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError
        return value

    return Values(take, str, f"not one of {', '.join(choices)}", choices=choices)


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _read_bytes(text: str) -> int:
    parts = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNITS)})", text)
    if parts is None or not 0 < float(parts[1]) < 2**63:
        raise ValueError
    return int(float(parts[1]) * _UNITS[parts[2]])


BYTES = Values(_whole(1, 2**63 - 1), _read_bytes, "not a number of bytes above 0, such as 512MiB or 1.5GiB", "BYTES")
CHUNKS = or_auto(Values(_whole(1), _read_whole, "neither a number of chunks from 1 on nor auto", "N"))
FILE = Values(_take_file, str, "not the name of a file", "FILE")
FROM_0 = Values(_whole(0), _read_whole, "not a number from 0 on", "N")
FROM_0_OR_ALL = or_auto(Values(_whole(0), _read_whole, "neither a number from 0 on nor all", "N"), ALL)
LIST = Values(_take_list, _read_list, "not a list of numbers from 1 on, separated by commas", "N,...")
PARTITIONS = or_auto(
    Values(
        _take_several,
        _read_list,
        "neither a number of partitions from 1 on, nor several such as 2,4,8, nor auto",
        "N|N,N,...",
    )
)
RATIO = Values(_take_ratio, float, "not a ratio above 1", "R")
SECONDS = Values(_whole(1), _read_whole, "not a number of seconds from 1 on", "S")
SWITCH = Values(_take_switch, str, "neither True nor False")
WIRE = Values(
    _take_wire,
    str,
    f"no format of rows on the wire: write {', '.join(one.value for one in WireFormat)}, or one for each direction, "
    "such as dispatch=fp8,combine=bf16",
    "FORMAT",
)
