"""What points of tools/bench/forty_points.py have found, judged, and as tables."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.mpmoe import PARTITIONS, token_shares
from tools.bench.netbox_runs import found_at
from tools.markdown_rows import head, row

if TYPE_CHECKING:
    from tools.bench.forty_points import Point, Shape

LONG = 0.1
"""Seconds of a step from which on the overlap limit is asked for."""


@dataclass
class PartitionsFound:
    """What a point has found of partitions. Seconds are of a step, on the slowest rank."""

    rounds: dict[str, list[float]]
    """Seconds of every round, by variant."""
    in_partitions: dict[str, float]
    """Seconds that `mpmoe` by hops was predicted to take, by the variant of so many partitions."""
    partitions: str
    """Which of these the profile alone chooses."""
    point: str = field(default="", kw_only=True)
    """The point's name, in a file."""


@dataclass
class Found(PartitionsFound):
    """What a point has found of all systems, too."""

    kept: str
    """The variant that `auto` kept after its trials."""
    planned: str
    predicted: float
    """Seconds that the planned variant was predicted to take."""
    wire: float
    """Seconds that the busiest node's bytes take between nodes at their bandwidth, where a token crosses once."""
    inside: float
    """The same of its bytes inside the node."""
    experts: float
    """Seconds that the experts of the slowest rank take, measured where nothing else runs meanwhile."""
    alone: float
    """Seconds of a step of the fastest variant between steps of its own, whose buffers are warm."""
    processors: float
    """Seconds in which the busiest cores would do what their ranks do in such a step, were they never idle."""


J = TypeVar("J", bound="PartitionsJudged")


@dataclass(frozen=True)
class PartitionsJudged:
    """What a point's rounds say of partitions."""

    found: PartitionsFound

    @property
    def seconds(self) -> dict[str, float]:
        """The median of each variant's rounds."""
        return {name: statistics.median(rounds) for name, rounds in self.found.rounds.items()}

    def regret_of(self, chosen: str, others: Iterable[str]) -> float:
        """Returns how much longer than the fastest of others a variant takes, in parts."""
        return self.seconds[chosen] / min(self.seconds[name] for name in others) - 1

    @property
    def regret_of_partitions(self) -> float:
        """Returns the regret of the number of partitions that the profile alone chooses."""
        return self.regret_of(self.found.partitions, self.found.in_partitions)

    @property
    def errors_of_partitions(self) -> list[float]:
        """How far predictions are off, in parts, of each number of partitions."""
        return [abs(seconds / self.seconds[name] - 1) for name, seconds in self.found.in_partitions.items()]


@dataclass(frozen=True)
class Judged(PartitionsJudged):
    """What they say of all systems, too."""

    found: Found

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def single(self) -> str:
        """The fastest of the five systems as papers have them: no tokens that hop but under expert-migration, and there
        one level after the other.
        """
        composed = re.compile("hops|:c[0-9]")
        alone = [name for name in self.seconds if not composed.search(name) and name.partition(":")[0] not in _STOCK]
        return min(alone, key=self.seconds.__getitem__)

    @property
    def limit(self) -> float:
        """Returns the time below which nothing can get where all that overlaps does: the
        largest of links and experts.
        """
        return max(self.found.wire, self.found.inside, self.found.experts)

    def over(self, other: str) -> tuple[float, float, float]:
        """Returns how many times as fast as another variant what `auto` kept is: the ratio of the medians, and the
        least and the largest ratio of a round.
        """
        pairs = zip(self.found.rounds[other], self.found.rounds[self.found.kept], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        return self.seconds[other] / self.seconds[self.found.kept], min(ratios), max(ratios)

    @property
    def over_limit(self) -> float:
        """Returns how many times that the fastest takes."""
        return self.seconds[self.fastest] / self.limit

    @property
    def over_processors(self) -> float:
        """Returns how many times the limit the fastest takes alone, where busy cores count among what limits."""
        return self.found.alone / max(self.limit, self.found.processors)

    @property
    def over_ends(self) -> float:
        """Returns how many times that the fastest takes alone, where nothing is beside the first partition's dispatch
        and the last one's combine: that partition's part of the bytes, besides the cores' time.
        """
        partitions, by_tokens = re.match(r"mpmoe:(\d+)", self.fastest), "hops" in self.fastest
        count = int(partitions[1] if partitions else 1)
        shares = token_shares(count, NONE) if by_tokens else [1] * count
        ends = (self.found.wire + self.found.inside) * shares[0] / sum(shares)
        return self.found.alone / max(self.limit, self.found.processors + ends)

    @property
    def regret(self) -> float:
        return self.regret_of(self.found.kept, self.seconds)

    @property
    def regret_of_plan(self) -> float:
        """Returns the regret of what was planned, without trials."""
        return self.regret_of(self.found.planned, self.seconds)

    @property
    def error(self) -> float:
        return self.found.predicted / self.seconds[self.found.planned] - 1

    @property
    def is_balanced(self) -> bool:
        """Whether experts take half to twice of what the wire does."""
        return 0.5 <= self.found.experts / max(self.found.wire, 1e-12) <= 2


_STOCK = (ALLTOALL, "allgather", "flex")


def cost_of_one_variant(first: Judged, second: Judged) -> float:
    """Returns how much longer two layers of one shape, routed unlike, take with one variant for both than with one for
    each: a part of the latter. Of the variants that were timed at both points.
    """
    both = first.seconds.keys() & second.seconds.keys()
    one = min(first.seconds[name] + second.seconds[name] for name in both)
    each = sum(min(point.seconds[name] for name in both) for point in (first, second))
    return one / each - 1


def judge(content: Mapping[str, Any]) -> Judged:
    """Returns what a point's file says."""
    return Judged(Found(**content))


def judged_by_shape(
    out: Path, points: Iterable[Point], judge: Callable[[Mapping[str, Any]], J]
) -> Iterator[tuple[Shape, list[tuple[Point, J]]]]:
    """Yields each shape of which points have run, and what `judge` says of these points' files."""
    by_shape: dict[Shape, list[tuple[Point, J]]] = {}
    for point in points:
        if (content := found_at(out, point)) is not None:
            by_shape.setdefault(point.shape, []).append((point, judge(content)))
    yield from by_shape.items()


def row_of(point: Point, one: Judged) -> str:
    """Returns the row of a point in the table of all systems."""
    found, ms = one.found, {name: f"{seconds * 1e3:.0f}" for name, seconds in one.seconds.items()}
    over_stock, over_single = one.over(ALLTOALL), one.over(one.single)
    return row(
        f"{point.routing}, {point.tokens}", ms[ALLTOALL], f"`{one.single}`: {ms[one.single]}",
        f"`{found.kept}`: {ms[found.kept]}", "{:.2f} ({:.2f}-{:.2f})".format(*over_stock),
        "{:.2f} ({:.2f}-{:.2f})".format(*over_single), f"{one.regret:.1%}", f"`{one.fastest}`",
        f"`{found.planned}`: {found.predicted * 1e3:.0f}, {ms[found.planned]}",
        *(f"{seconds * 1e3:.0f}" for seconds in (found.wire, found.inside, found.experts)),
        f"{one.over_limit:.2f}", f"{found.alone * 1e3:.0f}, {found.processors * 1e3:.0f}: {one.over_processors:.2f}",
    )  # fmt: skip


def rows(point: Point, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is printed of a point that has just ended."""
    yield row_of(point, judge(content))


def table_of_partitions(of_shape: Iterable[tuple[Point, PartitionsJudged]]) -> Iterator[str]:
    """Yields the table of 1 to 8 partitions, at the points of a shape."""
    counts = [f"{count}: measured (predicted), ms" if count == 1 else str(count) for count in PARTITIONS]
    yield from head("partitions: routing, tokens a rank", *counts, "chosen", "regret")
    for point, one in of_shape:
        yield row_of_partitions(point, one)


def row_of_partitions(point: Point, one: PartitionsJudged) -> str:
    """Returns the row of a point in the table of 1 to 8 partitions."""
    of_all = one.found.in_partitions.items()
    cells = (f"{one.seconds[name] * 1e3:.0f} ({predicted * 1e3:.0f})" for name, predicted in of_all)
    chosen, regret = one.found.partitions.split(":")[1], f"{one.regret_of_partitions:.1%}"
    return row(f"{point.routing}, {point.tokens}", *cells, chosen, regret)


def part(numbers: Sequence[float], most: float) -> str:
    """Returns how many of the numbers are at most so large, in words."""
    return f"{sum(number <= most for number in numbers)} of {len(numbers)}"


def off_by(errors: Iterable[float]) -> str:
    """Returns the median of errors and their 90th percentile, in words."""
    ordered = sorted(errors)
    return f"{statistics.median(ordered):.1%}, {ordered[int(0.9 * (len(ordered) - 1))]:.1%}"


def summary(judged: Sequence[tuple[Point, Judged]]) -> Iterator[str]:
    """Yields what is asked of all points, as a table."""

    def mean(ratios: Sequence[float]) -> str:
        if not ratios:
            return "-"
        return f"{statistics.geometric_mean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"

    over_single = [one.over(one.single)[0] for _, one in judged]
    several = [one.over(one.single)[0] for point, one in judged if point.shape.layer.topk >= 4 and one.is_balanced]
    regrets, errors = [one.regret for _, one in judged], [abs(one.error) for _, one in judged]
    of_plans = [one.regret_of_plan for _, one in judged]
    of_partitions = [one.regret_of_partitions for _, one in judged]
    long = [one for _, one in judged if one.seconds[one.fastest] >= LONG]
    yield from head("", "found", "asked for")
    yield row("`auto` over stock", mean([one.over(ALLTOALL)[0] for _, one in judged]), "never below 1")
    yield row("`auto` over the best single system", mean(over_single), "1.12")
    yield row("the same at top-k of 4 and more, experts 0.5 to 2 of the wire", mean(several), "1.3")
    yield row("regret at most 5 %", part(regrets, 0.05), "90 %")
    yield row("regret at most 10 %", part(regrets, 0.1), "all")
    for most in (0.05, 0.1):
        yield row(f"the plan alone: regret at most {most:.0%}", part(of_plans, most), "")
    for most, asked in ((0.05, "90 %"), (0.1, "")):
        named = f"the number of partitions by the profile alone: regret at most {most:.0%}"
        yield row(named, part(of_partitions, most), asked)
    off = off_by(error for _, one in judged for error in one.errors_of_partitions)
    yield row("predictions of 1 to 8 partitions off by", off, "")
    yield row("predictions off by, at the median and the 90th percentile", off_by(errors), "15 %, 30 %")
    yield row(
        "fastest at most 1.3 times the limit, where a step takes 100 ms",
        part([one.over_limit for one in long], 1.3),
        "all",
    )
    alone = part([one.over_processors for one in long], 1.3)
    yield row("the same alone, where busy cores count among the limits", alone, "")
    behind = part([one.over_ends for one in long], 1.3)
    yield row("and are busy behind the first dispatch and before the last combine", behind, "")
    by_size: dict[tuple[Shape, int], list[Judged]] = {}
    for point, one in judged:
        by_size.setdefault((point.shape, point.tokens), []).append(one)
    unlike = sorted(cost_of_one_variant(*pair) for pair in by_size.values() if len(pair) == 2)
    if unlike:
        off = f"{statistics.median(unlike):.1%}, {max(unlike):.1%}"
        yield row(
            "one variant for two layers of a shape, routed evenly and by Zipf: longer by, median and most", off, ""
        )


def table(out: Path, points: Iterable[Point]) -> Iterator[str]:
    """Yields the tables of those points that are there."""
    judged: list[tuple[Point, Judged]] = []
    for shape, of_shape in judged_by_shape(out, points, judge):
        yield f"\n**{shape}**\n"
        yield from head(
            "routing, tokens a rank", "`alltoall`, ms", "best single system", "kept by `auto`", "times stock",
            "times the best single", "regret", "fastest", "planned: predicted, measured", "wire", "inside",
            "experts", "fastest over the largest", "fastest alone, its cores' time: over the largest of all",
        )  # fmt: skip
        for point, one in of_shape:
            yield row_of(point, one)
        yield ""
        yield from table_of_partitions(of_shape)
        judged += of_shape
    if judged:
        yield ""
        yield from summary(judged)
