"""Is `auto` ever slower than the better of Megatron's own `alltoall` and `allgather`? Sixteen points on netbox.

    python -m tools.bench.auto_and_stock [--folder runs/bench-stock] [--points 16] [--table FILE]

Each point is one layer on shaped links, timed in turns under the three: four layouts, two sizes and two routings. Two
layouts have links so fast, or so many experts a token, that stock may well win. A profile of each layout is measured
first. Needs root (tools/netbox.py) and an idle machine; a point takes about a minute. What has run is kept in --folder
and not run again: the command goes on where it was stopped. The exit status is 1 where a point failed, or where `auto`
took more than BAR times the better of stock.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import ROOT
from tools.markdown_rows import row

BAR = 1.03
STOCK = ("alltoall", "allgather")


@dataclass(frozen=True)
class Layout:
    """A small cluster and the sizes of a layer on it."""

    name: str
    box: str
    """The cluster as tools/netbox.py takes it."""
    groups: str
    """Parallel sizes, for the profile too."""
    size: str
    experts: str
    tokens: tuple[int, int]


LAYOUTS = (
    Layout(
        "S1",
        "--nodes 2 --ranks-per-node 1 --inter 400mbit --intra 3200mbit", "--ep 2", "--hidden 256 --ffn-hidden 512",
        "--experts 8 --topk 4", (192, 768),
    ),
    Layout(
        "S2",
        "--nodes 4 --ranks-per-node 1 --inter 600mbit --intra 4800mbit", "--ep 4", "--hidden 384 --ffn-hidden 768",
        "--experts 8 --topk 2", (96, 384),
    ),
    Layout(
        "S3",
        "--nodes 2 --ranks-per-node 2 --inter 300mbit --intra 2400mbit", "--ep 4", "--hidden 256 --ffn-hidden 256",
        "--experts 16 --topk 8", (48, 192),
    ),
    Layout(
        "S4", "--nodes 2 --ranks-per-node 2 --inter 1000mbit --intra 8000mbit", "--tp 2 --ep 2 --expert-tp 2",
        "--hidden 256 --ffn-hidden 1024", "--experts 8 --topk 1", (192, 768),
    ),
)  # fmt: skip
ROUTINGS = ("uniform", "zipf")


@dataclass(frozen=True)
class Point:
    """One layer to time."""

    layout: Layout
    tokens: int
    routing: str

    @property
    def name(self) -> str:
        """Returns the name of the point's files."""
        return f"{self.layout.name}-{self.tokens}-{self.routing}"


POINTS = tuple(Point(one, tokens, routing) for one in LAYOUTS for tokens in one.tokens for routing in ROUTINGS)


@dataclass(frozen=True)
class Timed:
    """What came out of a point: median seconds, and what auto kept."""

    point: Point
    seconds: dict[str, float]
    kept: str

    @property
    def ratio(self) -> float:
        """The time under auto over the better of stock's."""
        return self.seconds["auto"] / min(self.seconds[name] for name in STOCK)


def on_netbox(layout: Layout, command: str, log: Path, timeout: int) -> bool:
    """Runs `moe-opt COMMAND` on every rank of the layout's cluster. Returns whether it ended well."""
    launcher = [sys.executable, "tools/netbox.py", "run", *layout.box.split(), "--"]
    words = [*launcher, "-m", "megatron_moe_opt.cli.main", *shlex.split(command)]
    with open(log, "w") as output:
        try:
            return (
                subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=timeout).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False


def measure(point: Point, folder: Path) -> Timed | None:
    """Returns a point's times, of this run or of one before; None where it failed, which its log explains."""
    layout, log, file = point.layout, folder / f"{point.name}.log", folder / f"{point.name}.json"
    cluster = folder / f"{layout.name}.cluster.json"
    if not cluster.exists():
        what = f"profile --dtype fp32 --seconds 45 {layout.size} {layout.groups} --output {cluster}"
        if not on_netbox(layout, what, folder / f"{layout.name}.profile.log", timeout=240):
            return None
    if not file.exists():
        sizes = f"{layout.size} {layout.groups} {layout.experts} --tokens {point.tokens} --routing {point.routing}"
        dispatchers = ",".join((*STOCK, "auto"))
        what = f"bench --dtype fp32 {sizes} --dispatchers {dispatchers} --profile {cluster} --steps 7 --warmup 1"
        if not on_netbox(layout, f"{what} --output {file}", log, timeout=400):
            return None
    return read(point, file.read_text(), log.read_text())


def read(point: Point, report: str, log: str) -> Timed:
    """Returns what a report and the log of its run say."""
    seconds = {one["dispatcher"]: one["median_seconds"] for one in json.loads(report)["results"]}
    kept = re.findall(r"moe-opt: auto: (\S+) stays", log)
    return Timed(point, seconds, kept[-1] if kept else "?")


def table(timed: Sequence[Timed]) -> str:
    """Returns a row for each point, and the bar in a sentence."""
    lines = [
        "| links, groups, layer | tokens, routing | `alltoall` ms | `allgather` | `auto` | kept | over the better |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for one in timed:
        layout = one.point.layout
        what = f"{layout.box}, {layout.groups}, {layout.size} {layout.experts}".replace("--", "")
        times = (f"{one.seconds[name] * 1e3:.1f}" for name in (*STOCK, "auto"))
        lines.append(row(what, f"{one.point.tokens}, {one.point.routing}", *times, f"`{one.kept}`", f"{one.ratio:.3f}"))
    if timed:
        within = sum(one.ratio <= BAR for one in timed)
        worst = max(one.ratio for one in timed)
        lines += [
            "",
            f"At most {BAR:g} times the better of stock in {within} of {len(timed)} points; {worst:.3f} in the worst.",
        ]
    return "\n".join(lines)


def main() -> int:
    """Returns 1 where a point failed or missed the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-stock"))
    parser.add_argument(
        "--points", type=int, default=len(POINTS), help="how many, of all layouts in turn (default: all)"
    )
    parser.add_argument("--table", type=Path, help="where to write the table, besides the standard output")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    step = len(POINTS) // len(LAYOUTS)
    in_turn = [POINTS[first + number] for number in range(step) for first in range(0, len(POINTS), step)]
    timed, failed = [], []
    for point in in_turn[: asked.points]:
        outcome = measure(point, folder)
        if outcome is None:
            failed.append(point.name)
            print(f"{point.name}: failed: see {folder}", flush=True)
            continue
        timed.append(outcome)
        print(f"{point.name}: {outcome.kept}, {outcome.ratio:.3f} of the better of stock", flush=True)
    page = table(sorted(timed, key=lambda one: POINTS.index(one.point)))
    print(f"\n{page}")
    if asked.table is not None:
        asked.table.write_text(page + "\n")
    return 1 if failed or any(one.ratio > BAR for one in timed) else 0


if __name__ == "__main__":
    sys.exit(main())
