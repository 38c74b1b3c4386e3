"""Types and checks of options that several commands have. Imports neither PyTorch nor the extension."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import BYTES, LIST, MOST


class DType(str, Enum):
    """The types of elements that tokens and weights may have."""

    fp32 = "fp32"
    bf16 = "bf16"


class Recompute(str, Enum):
    """What backward makes again: the keys of planning.training.memory.RECOMPUTE."""

    none = "none"
    selective = "selective"
    full = "full"


def finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """Refuses, as the callback of float options, nan and inf, which their ranges let pass, with ConfigurationError."""
    if value is not None and not math.isfinite(value):
        raise ConfigurationError(f"{option.opts[0]} {value} is not a finite number: give one")
    return value


def whole_numbers(option: str, text: str) -> list[int]:
    """Returns the whole numbers from 1 to MOST in a text, separated by commas; refuses, with ConfigurationError,
    anything else.
    """
    try:
        return list(LIST.parse(",".join(part.strip() for part in text.split(","))))
    except ArgumentTypeError as error:
        raise ConfigurationError(
            f"{option} {text}: write numbers from 1 to {MOST}, separated by commas, such as 256,1024"
        ) from error


def byte_budget(text: str) -> int:
    """Parses options that are bytes, written as those of training are: `512MiB`."""
    try:
        return BYTES.parse(text)
    except ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from error


class SectionedCommand(TyperCommand):
    """A command whose --help lists options under headings: each option's `rich_help_panel`, the others first."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:
        """Writes the options below each other, one list a heading."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
