"""The `moe-opt` command. Also `python -m megatron_moe_opt.cli.main`, which torchrun's `-m` takes."""

from __future__ import annotations

import os
import sys

import typer

from megatron_moe_opt.cli.bench.commands import app as bench_app
from megatron_moe_opt.cli.doctor import doctor
from megatron_moe_opt.cli.plan.commands import plan
from megatron_moe_opt.cli.profile.commands import profile
from megatron_moe_opt.cli.report.commands import timeline
from megatron_moe_opt.cli.routing.commands import generate_routing, plan_experts, replay_routing
from megatron_moe_opt.errors import ConfigurationError, ExtensionError, sentence

app = typer.Typer(
    name="moe-opt",
    help="Measure and check Mixture-of-Experts training with megatron-moe-opt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command()(doctor)
app.command()(generate_routing)
app.command()(plan)
app.command()(plan_experts)
app.command()(profile)
app.command()(replay_routing)
app.command()(timeline)


def main(commands: typer.Typer = app, name: str = "moe-opt") -> None:
    """Runs a command line: `moe-opt`'s, or that of a tool (tools/) that reports what cannot work in the same way.

    A setting that cannot work, or an extension that is missing or stale, ends it with one sentence and exit code 2:
    commands import PyTorch and the extension when they run, so that the others need neither.
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


if __name__ == "__main__":
    main()
