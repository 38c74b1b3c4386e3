"""A model or a cluster in one word: a name, and numbers in the place of its own, as in mixtral-8x7b,layers=16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_moe_opt.errors import ConfigurationError

NO_YES = {"no": False, "yes": True}


@dataclass(frozen=True)
class Named:
    """The name and the sizes that a value of such an option gives."""

    name: str | None
    """The name that the value begins with; None: it begins with a number."""
    given: Mapping[str, int | float | bool]


def read_named(flag: str, text: str, kinds: Mapping[str, type]) -> Named:
    """Reads a name and sizes from the value of an option.

    Args:
        kinds: what may be given by name: an int or a float, which are 0 or more and finite, or a bool.

    Raises:
        ConfigurationError: something else is given, or twice.
    """
    name, *words = text.split(",")
    if "=" in name:
        name, words = None, text.split(",")
    given: dict[str, int | float | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in given:
            raise ConfigurationError(f"{flag} {text}: {key} is given twice: give it once")
        if key not in kinds or not equals:
            names = ", ".join(kinds)
            raise ConfigurationError(
                f"{flag} {text}: {word or 'an empty part'} has no meaning there: write {names}, as in "
                f"{next(iter(kinds))}=8"
            )
        given[key] = _read(f"{flag} {text}: {key}", value, kinds[key])
    return Named(name, given)


def _read(what: str, value: str, kind: type) -> int | float | bool:
    if kind is bool:
        if value not in NO_YES:
            raise ConfigurationError(f"{what} is yes or no")
        return NO_YES[value]
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"{what} {value} is not {'a whole' if kind is int else 'a finite'} number from 0 on")
    return number
