"""Points of a benchmark that run on imitated nodes. Each leaves a file, so that a run that was ended goes on where it
stopped.

Points of the same links and profile are one run of netbox (root): the links are profiled, then each point is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_moe_opt.cli.profile.run import ProfileSettings
from megatron_moe_opt.output_file import write_text_whole
from tools import ROOT


@dataclass(frozen=True)
class Links:
    """Imitated nodes, as netbox makes them."""

    inter: str
    intra: str
    ranks: int
    """Ranks of a node."""
    nodes: int = 2
    peak: float | None = None
    """How many times its rate a link between nodes reaches at most; None: see netbox."""


class Point(Protocol):
    """One thing to time."""

    name: str
    links: Links
    limit: int
    """Seconds that the point may take besides its profile."""

    def profile_settings(self) -> ProfileSettings:
        """Returns what is profiled for it, which serves all points of the same."""


P = TypeVar("P", bound=Point)


def file_of(out: Path, point: Point) -> Path:
    """Returns where a point leaves what it found."""
    return out / (re.sub(r"[^a-z0-9.]+", "-", point.name.lower()) + ".json")


def found_at(out: Path, point: Point) -> dict[str, Any] | None:
    """Returns what a point has found; None: it has not run."""
    file = file_of(out, point)
    return json.loads(file.read_text()) if file.exists() else None


def time_points(points: Sequence[P], out: Path, time_one: Callable[[P, Any, Any], Any]) -> None:
    """Measures profiles, and times the points of one profile on the ranks of this run. A collective call over the
    world.

    Args:
        time_one: (point, Cluster, device) -> a dataclass of what it found, the same on every rank.
    """
    import torch.distributed as dist

    from megatron_moe_opt import register
    from megatron_moe_opt.cli.profile.run import measured
    from megatron_moe_opt.cli.ranks import begin, megatron_process_group

    begin()
    register()
    with megatron_process_group() as device:
        cluster = measured(points[0].profile_settings(), device)
        for point in points:
            found = time_one(point, cluster, device)
            if dist.get_rank() == 0:
                content = asdict(found) | {"point": point.name}
                write_text_whole(file_of(out, point), json.dumps(content, indent=1) + "\n")
            dist.barrier()


def _run(module: str, out: Path, points: Sequence[Point], unmet: str) -> None:
    """Runs points of one profile on netbox. Those that ended well have left their files."""
    links, limit = points[0].links, 300 + sum(point.limit for point in points)
    shape = ["--nodes", str(links.nodes), "--ranks-per-node", str(links.ranks), "--inter", links.inter]
    shape += [] if links.peak is None else ["--peak", str(links.peak)]
    netbox = [sys.executable, "tools/netbox.py", "run", *shape, "--intra", links.intra, "--unmet", unmet]
    named = [word for point in points for word in ("--point", point.name)]
    command = [*netbox, "--timeout", str(limit), "--", "-m", module, "--out", str(out.resolve()), *named]
    subprocess.run(command, cwd=ROOT, check=False)


def run(
    module: str,
    about: str,
    points: Sequence[P],
    time_one: Callable[[P, Any, Any], Any],
    rows: Callable[[P, dict[str, Any]], Iterable[str]],
    table: Callable[[Path], Iterator[str]],
) -> int:
    """Runs the points that are missing and prints the table; on netbox's ranks, those that are named. The main function
    of a benchmark, whose exit status it returns.

    Args:
        module: which netbox's ranks run.
        about: what the benchmark is, in a line.
        rows: of a point that has just ended: what is printed of what it found.
        table: of a folder, all that is there.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder of a file a point")
    parser.add_argument("--only", default="", help="points whose names match one of these, separated by commas")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and run nothing")
    parser.add_argument("--unmet", choices=("refuse", "warn"), default="refuse", help="see netbox; warn: no times")
    parser.add_argument("--point", action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.point:
        time_points([one for one in points if one.name in arguments.point], out, time_one)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in arguments.only.split(",") if one]
    by_profile: dict[Any, list[P]] = {}
    for point in [] if arguments.table else points:
        if found_at(out, point) is None and (not wanted or any(re.search(one, point.name) for one in wanted)):
            by_profile.setdefault((point.links, point.profile_settings()), []).append(point)
    for alike in by_profile.values():
        _run(module, out, alike, arguments.unmet)
        for point in alike:
            if (found := found_at(out, point)) is not None:
                print(*rows(point, found), sep="\n", flush=True)
    print(*table(out), sep="\n")
    failed = [point.name for alike in by_profile.values() for point in alike if found_at(out, point) is None]
    if failed:
        print(f"did not end well: {'; '.join(failed)}", file=sys.stderr)
    return bool(failed)
