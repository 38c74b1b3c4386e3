"""Where in a JSON text a value stands, and refusals that say so."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_moe_opt.errors import ConfigurationError

Keys = tuple[str | int, ...]

MAX_BYTES = 2**26
MAX_DEPTH = 20

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


@dataclass(frozen=True)
class JsonPlace:
    """A value in a JSON file. Every method refuses what is not as asked for with file, line and path of the value."""

    file: Path
    text: str
    value: Any
    keys: Keys = ()

    @classmethod
    def root(cls, file: Path) -> JsonPlace:
        """Returns the whole content of a file as one place.

        Raises:
            ConfigurationError: the file cannot be read, or is not JSON.
        """
        try:
            with open(file, "rb") as opened:  # in part: a device or a pipe may never end
                content = opened.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise ConfigurationError(f"{file} has more than {MAX_BYTES} bytes: give a file of moe-opt")
            text = content.decode()
            value = json.loads(text)
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be read: {error.strerror}; give the path of a file") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{file} is not text (byte {error.start}): give a JSON file") from error
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{file}, line {error.lineno}: not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise ConfigurationError(f"{file}: not JSON: {error}") from error
        problem = _not_ours(value)
        if problem:
            raise ConfigurationError(f"{file}: {problem}: give a file of moe-opt")
        return cls(file, text, value)

    def check_format(self, name: str, version: int, command: str, make: str) -> None:
        """Says first of all what a file is that is not ours, or not of this version.

        Args:
            name: in the field `format`; `version` is in the field of that name.
            command: that writes such files.
            make: what the user does with it.
        """
        found = self.value if isinstance(self.value, dict) else {}
        if found.get("format") != name:
            self.refuse(f"not a file of {command}: {make} with {command}")
        if found.get("version") != version:
            self.refuse(
                f"version {_shown(found.get('version'))} cannot be read (this megatron-moe-opt reads {version}): "
                f"{make} again with {command}"
            )

    def refuse(self, problem: str) -> NoReturn:
        """Raises ConfigurationError: place and problem."""
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{_cut(key)}" for key in self.keys).lstrip(".")
        raise ConfigurationError(f"{self.file}, line {_line(self.text, self.keys)}{name and f', {name}'}: {problem}")

    def fields(self, *names: str, optional: Sequence[str] = ()) -> dict[str, JsonPlace]:
        """Returns the fields of an object that has exactly these, and maybe the optional ones: null where missing."""
        found = self.object(*names)
        for name in found.keys() - {*names, *optional}:
            found[name].refuse("unknown field")
        return {name: self._inside(name, None) for name in optional} | found

    def given(self, read: Callable[[JsonPlace], Any], otherwise: Any = None) -> Any:
        """Returns what `read` makes of this place; `otherwise`, where the value is null."""
        return otherwise if self.value is None else read(self)

    def object(self, *names: str) -> dict[str, JsonPlace]:
        """Returns the fields of an object, each as a place; it has these, and maybe others."""
        if not isinstance(self.value, dict):
            self.refuse(f"{_shown(self.value)} is not an object")
        for name in names:
            if name not in self.value:
                self.refuse(f"{name} is missing")
        return {key: self._inside(key, value) for key, value in self.value.items()}

    def by_number(self) -> dict[int, JsonPlace]:
        """Returns the fields of an object whose names are the numbers of layers."""
        found = self.object()
        for name, place in found.items():
            if not re.fullmatch(r"[1-9][0-9]{0,8}", name):
                place.refuse(f"{_shown(name)} is not the number of a layer, from 1 on")
        return {int(name): place for name, place in found.items()}

    def items(self, length: int | None = None) -> list[JsonPlace]:
        """Returns the elements of a list, of any length or of the one given."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            self.refuse(f"{_shown(self.value)} is not a list" + (f" of {length}" if length is not None else ""))
        return [self._inside(index, value) for index, value in enumerate(self.value)]

    def word(self, *choices: str) -> str:
        """Returns a string; one of `choices` if there are any."""
        if not isinstance(self.value, str) or (choices and self.value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "a string"
            self.refuse(f"{_shown(self.value)} is not {wanted}")
        return self.value

    def count(self, least: int = 0) -> int:
        """Returns an integer of at most 64 bits."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < least:
            self.refuse(f"{_shown(self.value)} is not an integer of at least {least}")
        if self.value >= 2**63:
            self.refuse(f"{_shown(self.value)} is more than 64 bits hold")
        return self.value

    def positive(self, most: float = math.inf) -> float:
        """Returns a finite number above 0."""
        number = self._number()
        if not 0 < number < math.inf or number > most:
            limit = "finite" if most == math.inf else f"at most {most:g}"
            self.refuse(f"{_shown(self.value)} is not above 0 and {limit}")
        return number

    def finite(self) -> float:
        """Returns a finite number."""
        number = self._number()
        if not math.isfinite(number):
            self.refuse(f"{_shown(self.value)} is not finite")
        return number

    def not_negative(self) -> float:
        """Returns a finite number, 0 or more."""
        number = self._number()
        if not 0 <= number < math.inf:
            self.refuse(f"{_shown(self.value)} is not finite and at least 0")
        return number

    def _number(self) -> float:
        if not isinstance(self.value, (int, float)) or isinstance(self.value, bool):
            self.refuse(f"{_shown(self.value)} is not a number")
        try:
            return float(self.value)
        except OverflowError:
            self.refuse(f"{_shown(self.value)} is not finite")

    def _inside(self, key: str | int, value: object) -> JsonPlace:
        return JsonPlace(self.file, self.text, value, (*self.keys, key))


def _shown(value: object) -> str:
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


def _not_ours(content: object) -> str | None:
    """Returns in words what no file of ours has, wherever it stands, which a value's refusal
    could not say; None: nothing.
    """
    inside = [(content, 1)]
    while inside:
        value, depth = inside.pop()
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} brackets inside one another"
        if isinstance(value, dict):
            inside += [(one, depth) for one in value]
            inside += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list):
            inside += [(one, depth + 1) for one in value]
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return f"{_shown(value)} has half a character"
    return None


def _line(text: str, keys: Keys) -> int:
    """Returns the line on which the value at `keys` begins, in a text that is known to be JSON."""
    return next(line for place, line in _values(text) if place == keys)


def _values(text: str) -> Iterator[tuple[Keys, int]]:
    """Yields path and line of every value, in the order of the text."""
    keys: list[str | int] = []
    line, scanned, after_colon = 1, 0, False
    for token in _TOKEN.finditer(text):
        line += text.count("\n", scanned, token.start())
        scanned = token.start()
        match token[0]:
            case "}" | "]":
                keys.pop()
            case ",":
                if isinstance(keys[-1], int):
                    keys[-1] += 1
            case ":":
                after_colon = True
            case value if value[0] == '"' and keys and isinstance(keys[-1], str) and not after_colon:
                keys[-1] = json.loads(value)  # the name of a field
            case value:
                yield tuple(keys), line
                if value in "{[":
                    keys.append("" if value == "{" else 0)
                after_colon = False
