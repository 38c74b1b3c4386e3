"""The `moe-opt` command. Also `python -m megatron_moe_opt.cli.main`, which torchrun's `-m` takes."""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated

import typer

import megatron_moe_opt
from megatron_moe_opt.cli.bench.commands import bench
from megatron_moe_opt.cli.doctor import doctor
from megatron_moe_opt.cli.option_types import SectionedCommand
from megatron_moe_opt.cli.plan.commands import plan
from megatron_moe_opt.cli.profile.commands import profile
from megatron_moe_opt.cli.report.commands import report, timeline
from megatron_moe_opt.cli.trace.commands import app as trace_app
from megatron_moe_opt.errors import ConfigurationError, ExtensionError, reason, sentence

app = typer.Typer(
    name="moe-opt",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text, which reads at 80 columns
)
# The lists of commands have room for a line each.
app.command(short_help="One MoE layer under each dispatcher: time, bytes, memory.")(bench)
app.command(short_help="Versions, devices, the extension, and what is missing.")(doctor)
app.command(cls=SectionedCommand, short_help="What each dispatcher would take on a cluster; chooses.")(plan)
app.command(short_help="Measure what moving rows and experts costs here.")(profile)
app.command(short_help="What bench has measured, as a page with charts.")(report)
app.command(short_help="When each op of a step ran, and was predicted to run.")(timeline)
app.add_typer(trace_app, name="trace", short_help="Routing: record it, replay it, place experts by it.")

_BEYOND_MEMORY = re.compile(
    "allocate memory|enough memory|out of memory|size calculation overflowed|multiplication overflow|array is too big|"
    "Maximum allowed dimension|Overflow when unpacking"
)
"""What PyTorch and NumPy say of sizes beyond memory, in errors of many kinds."""


def _show_version(asked: bool) -> None:
    if asked:
        print(f"megatron-moe-opt {megatron_moe_opt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure and check Mixture-of-Experts training with megatron-moe-opt."""


def main(commands: typer.Typer = app, name: str = "moe-opt") -> None:
    """Runs a command line: `moe-opt`'s, or that of a tool (tools/) that reports what cannot work in the same way.

    A setting that cannot work, sizes beyond memory, or an extension that is missing or stale, end it with one sentence
    and exit code 2: commands import PyTorch and the extension when they run, so that the others need neither.
    """
    try:
        commands(prog_name=name)
    except ModuleNotFoundError as error:
        missing = {"torch": "PyTorch", "megatron": "Megatron-Core"}.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        print(
            f"{name}: this command runs layers, and there is no {missing} here: moe-opt doctor says what is missing",
            file=sys.stderr,
        )
        sys.exit(2)
    except (ConfigurationError, ExtensionError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a node: all ranks have the same settings
            print(f"{name}: {sentence(error)}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        lacking = _of_memory(error)
        if lacking is None:
            raise
        # On every rank: one alone may have too little.
        print(
            f"{name}: this takes more memory than there is ({reason(lacking)}): choose smaller sizes", file=sys.stderr
        )
        sys.exit(2)


def _of_memory(error: BaseException | None) -> BaseException | None:
    """Returns the first of an error and its causes that says that memory does not suffice; None where none does."""
    while error is not None and not (isinstance(error, MemoryError) or _BEYOND_MEMORY.search(str(error))):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
