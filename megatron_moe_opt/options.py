"""The `--moe-opt-*` command-line options of megatron-moe-opt: those of every system, and those that they share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import SWITCH, Values
from megatron_moe_opt.systems import SYSTEMS
from megatron_moe_opt.systems.system import PREFIX, SharedOptions, shown

_OF_SYSTEMS = tuple(dict.fromkeys(system.options for system in SYSTEMS if system.options is not SharedOptions))


@dataclass(frozen=True)
class Options(*reversed(_OF_SYSTEMS), SharedOptions):
    """Settings of the dispatchers; one object for all MoE layers of a process.

    Raises:
        ConfigurationError: a value that its option does not take, or settings that contradict each other.
    """

    def __post_init__(self) -> None:
        for one in fields(self):
            self._take(one.name, one.default, one.metadata["flag"], one.metadata["values"])
        for of_system in _OF_SYSTEMS:
            of_system.check(self)

    def _take(self, name: str, default: Any, flag: str, values: Values) -> None:
        """Sees to it that a field has a value that its option takes, as the command line would give it."""
        value = getattr(self, name)
        if value is None and default is None:
            return
        try:
            taken = values.take(value)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{flag} {value!r} is {values.refusal}") from error
        object.__setattr__(self, name, taken)

    def words(self) -> list[str]:
        """Returns these options as a command line gives them, without those that have their default."""
        given = [(one, getattr(self, one.name)) for one in fields(self) if self.is_given(one.name)]
        return [
            word
            for one, value in given
            for word in ([one.metadata["flag"]] if value is True else [one.metadata["flag"], shown(value)])
        ]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; python -m megatron_moe_opt.launch --help lists the {PREFIX}* options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m megatron_moe_opt.launch", usage="%(prog)s SCRIPT [ARGS...]", add_help=False, allow_abbrev=False
    )
    group = parser.add_argument_group("megatron-moe-opt")
    for one in fields(Options):
        flag, values, about, metavar = (one.metadata[key] for key in ("flag", "values", "help", "metavar"))
        named = {"dest": one.name, "default": one.default, "help": about}
        if values is SWITCH:
            group.add_argument(flag, action="store_true", **named)
        elif values.choices is not None:
            group.add_argument(flag, choices=values.choices, **named)
        else:
            group.add_argument(flag, type=values.parse, metavar=metavar or values.metavar, **named)
    return parser


def options_help() -> str:
    """Returns the help text of our options alone."""
    return _parser().format_help()


def split_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Takes the `--moe-opt-*` options out of `arguments`; what remains belongs to the script.

    Raises ConfigurationError for an unknown option of ours or a wrong value.
    """
    namespace, remaining = _parser().parse_known_args(list(arguments))
    for argument in remaining:
        if argument.startswith(PREFIX):
            raise ConfigurationError(f"{argument} is not an option of megatron-moe-opt; see --help for the list")
    return Options(**vars(namespace)), remaining
