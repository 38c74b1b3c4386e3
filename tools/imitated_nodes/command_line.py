"""The command line of netbox: what may be asked for, and what the machine must have."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .errors import NetboxError
from .measured import measure, verdict
from .network import STOPPING_SIGNALS, clean, cluster
from .ranks import run_job
from .shape import Shape

MIN_RATE = 10_000_000  # bits/s; below it the bucket's burst is no longer small against a second of traffic
MAX_NODES = 64
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


class Stopped(BaseException):
    """A signal asks the run to end (BaseException: no `except Exception` may swallow it)."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


def main(argv: list[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        arguments, command = parse_arguments(argv)
        _check_machine()
        if arguments.action == "clean":
            print(f"netbox: removed {clean()} leftover namespaces")
            return 0
        for signum in STOPPING_SIGNALS:
            signal.signal(signum, _stop)
        shape = Shape(arguments.nodes, arguments.ranks_per_node, arguments.inter, arguments.intra, arguments.peak)
        with cluster(shape) as nodes:
            print(f"netbox: {verdict(shape, *measure(shape, nodes), arguments.unmet)}", file=sys.stderr, flush=True)
            return run_job(shape, nodes, command, arguments.timeout)
    except NetboxError as error:
        print(f"netbox: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"netbox: stopped by {signal.Signals(stopped.signum).name}", file=sys.stderr)
        return 128 + stopped.signum


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options and the command behind `--`. Raises NetboxError with one sentence for bad input."""
    split = argv.index("--") if "--" in argv else len(argv)
    options, command = argv[:split], argv[split + 1 :]
    parser = _Parser(prog="netbox.py", description="A small cluster out of one Linux machine.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|clean")
    actions.add_parser("clean", help="remove what killed runs left behind")
    run = actions.add_parser("run", help="run a script on the cluster", usage="%(prog)s [options] -- script.py args")
    run.add_argument("--nodes", type=_count(1, MAX_NODES), default=2, help="network namespaces (default 2)")
    run.add_argument("--ranks-per-node", type=_count(1, 1024), required=True, help="processes a node")
    run.add_argument("--inter", type=parse_rate, required=True, help="each node's link, each direction: 200mbit")
    run.add_argument("--intra", type=parse_rate, required=True, help="all traffic inside one node: 1600mbit")
    peak = "how many times its rate a link reaches at most after a pause (default: what a bucket holds passes at once)"
    run.add_argument("--peak", type=_factor, help=peak)
    unmet = "what to do if the machine does not carry the shape: end with exit code 2 (default), or say so and run"
    run.add_argument("--unmet", choices=("refuse", "warn"), default="refuse", help=unmet)
    run.add_argument("--timeout", type=_count(1, 10**6), help="seconds after which the job is ended (exit code 124)")
    arguments = parser.parse_args(options)
    if arguments.action == "run":
        if not command:
            raise NetboxError("no script to run; name it behind --, like: netbox.py run ... -- script.py args")
        if not command[0].startswith("-") and not Path(command[0]).is_file():
            raise NetboxError(f"the script '{command[0]}' does not exist")
    return arguments, command


def parse_rate(text: str) -> int:
    """Returns the bits/s of a rate in tc's notation (`200mbit`, `1.6gbit`); units are powers of 1000.

    Raises argparse.ArgumentTypeError for anything else and for rates below 10mbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate; write it like 200mbit or 1.6gbit")
    bits = round(float(match[1]) * _UNITS[match[2]])
    if bits < MIN_RATE:
        raise argparse.ArgumentTypeError(f"'{text}' is too slow to be shaped well; use 10mbit or more")
    return bits


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NetboxError(f"{message} (see `netbox.py run --help`)")


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {least} to {most}")
        return int(text)

    return parse


def _factor(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or not 1 < float(text) <= 100:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 1 and to 100")
    return float(text)


def _check_machine() -> None:
    if not sys.platform.startswith("linux"):
        raise NetboxError(f"netbox needs Linux (network namespaces); this is {sys.platform}")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            raise NetboxError(f"the command `{tool}` is missing; install the Debian package {package}")
    if os.geteuid() != 0:
        raise NetboxError("netbox must run as root to make network namespaces; start it with sudo")


def _stop(signum: int, _frame: object) -> NoReturn:
    raise Stopped(signum)
