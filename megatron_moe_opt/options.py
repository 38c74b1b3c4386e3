"""Our own command-line options: `--moe-opt-*` arguments beside Megatron's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_moe_opt.errors import ConfigurationError

PREFIX = "--moe-opt-"


@dataclass(frozen=True)
class Options:
    """Settings of the dispatchers; one object for all MoE layers of a process."""

    monta_level: str = "O1"
    """Pipelining level of `monta` (MoNTA, section III): O1 runs A2A, AllGather and the reorder one after another."""


MONTA_LEVELS = ("O1",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see --help for the {PREFIX}* options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron_moe_opt.launch SCRIPT", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("megatron-moe-opt")
    group.add_argument(
        f"{PREFIX}monta-level",
        dest="monta_level",
        choices=MONTA_LEVELS,
        default=Options.monta_level,
        help="pipelining level of the monta dispatcher (default: %(default)s)",
    )
    return parser


def options_help() -> str:
    """The help text of our options alone."""
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
