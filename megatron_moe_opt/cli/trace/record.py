"""`moe-opt trace record`: a training script, run by the launcher, while its routers are listened to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_moe_opt import launch
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.observe.routing_recorder import RoutingRecorder
from megatron_moe_opt.output_file import check_output_file


def record_routing(script: Sequence[str], output: Path, steps: str) -> None:
    """Runs the script to its end; the trace is written behind the last of the steps.

    Args:
        steps: the first and the last, such as 301-400.

    Raises:
        ConfigurationError: no such steps, or a file that cannot be written.
    """
    first, dash, last = steps.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigurationError(f"--steps {steps}: write the first and the last step, from 1 on, such as 301-400")
    check_output_file("--output", output)
    launch.main(list(script), RoutingRecorder(output, range(int(first), int(last) + 1)))
