"""A model or a cluster in one word: a name, and numbers in the place of its own, as in mixtral-8x7b,layers=16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_moe_opt.errors import ConfigurationError

NO_YES = {"no": False, "yes": True}


@dataclass(frozen=True)
class Named:
    """The name and the sizes that a value of such an option gives."""

    name: str | None
    """The name that the value begins with; None: it begins with a number."""
    given: Mapping[str, int | float | bool]


def read_named(flag: str, text: str, known: Iterable[str], largest: Mapping[str, int | float | bool]) -> Named:
    """Reads a name and sizes from the value of an option.

    Args:
        known: names to choose from, should there be none.
        largest: the largest value of what may be given by name: an int or a float, of which 0 is the least, or a bool.

    Raises:
        ConfigurationError: something else is given, or twice, or no name where one belongs.
    """
    name, *words = text.split(",")
    if not name:
        raise ConfigurationError(f"{flag} '{text}' begins with no name: choose one of {', '.join(known)}")
    if "=" in name:
        name, words = None, text.split(",")
    given: dict[str, int | float | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in given:
            raise ConfigurationError(f"{flag} {text}: {key} is given twice: give it once")
        if key not in largest or not equals:
            names = ", ".join(largest)
            raise ConfigurationError(
                f"{flag} {text}: {word or 'an empty part'} has no meaning there: write {names}, as in "
                f"{next(iter(largest))}=8"
            )
        given[key] = _read(f"{flag} {text}: {key}", value, largest[key])
    return Named(name, given)


def _read(what: str, value: str, largest: int | float | bool) -> int | float | bool:
    if isinstance(largest, bool):
        if value not in NO_YES:
            raise ConfigurationError(f"{what} is yes or no")
        return NO_YES[value]
    try:
        number = type(largest)(value)
    except ValueError:
        number = -1
    if not 0 <= number <= largest:
        whole = "whole " * isinstance(largest, int)
        raise ConfigurationError(f"{what} {value} is not a {whole}number from 0 to {largest:,.0f}")
    return number
