"""Which of MoNTA's levels, and how many chunks: the least of what the pipeline takes (MoNTA, Algorithms 1 to 3).

An equal-chunk pipeline takes one pass of a chunk through all lanes, and N - 1 times its longest lane:

    T = sum(stages) + (N - 1) * max(stages)

with the stages of a chunk (eq. 8 to 10; I bytes of all t expert-TP peers, e ranks in the EP group)

    lane    O1, O2             O3              AA  = I / (N t) * (e - 1) / e / (B1 r1)
    inter   AA                 AA              AG  = I / N * (t - 1) / t / (B2 r2)
    intra   AG + D2D           AG              D2D = I / N / (B3 r3)
    copy    -                  D2D

That is Algorithms 1 (O2) and 2 (O3), with line 19 read as T_min = T and N kept, and with the copy as the longest stage
too, which Algorithm 2's printed formula leaves out. O1 is N = 1 (eq. 11, which leaves D2D out).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

from megatron_moe_opt.planning.choosing.equal_times import EQUAL_WITHIN, fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import Costs
from megatron_moe_opt.planning.predicting.simulator import Order, Slowdown, play
from megatron_moe_opt.schedules import monta
from megatron_moe_opt.schedules.monta import LEVELS, even_chunks
from megatron_moe_opt.schedules.pipeline import ChunkBytes
from megatron_moe_opt.schedules.schedule import Lane, Schedule

CHUNKS = (1, 2, 4, 8, 16)
PASSES = ("forward dispatch", "forward combine", "backward of combine", "backward of dispatch")
"""The names of `training_passes`."""
_MOST_ROWS = 2**40
AS_IN_TRAINING = {
    "equal_within": EQUAL_WITHIN,
    "one_chunk": 0.95,  # ranks that are out of step overlap stages by themselves, and the simulator plays them in step
}
"""Arguments of `choose`."""


@dataclass(frozen=True)
class Choice:
    """A level, its number of chunks, and what the passes it was chosen for take together."""

    level: str
    chunks: int
    seconds: float


@dataclass(frozen=True)
class Pass:
    """Rows once to their experts ("dispatch") or back ("combine")."""

    direction: str
    exchanged: int
    """Bytes of this rank's own rows: I / t in the paper's terms."""

    def schedule(self, level: str, chunks: Sequence[ChunkBytes], ep_size: int, etp_size: int) -> Schedule:
        """The schedule that runs it."""
        return _BUILDERS[self.direction](level, chunks, ep_size, etp_size)


_BUILDERS = {"dispatch": monta.dispatch, "combine": monta.combine}


def training_passes(rows: int, row_bytes: int, packed_row_bytes: int) -> tuple[Pass, ...]:
    """Dispatch and combine, forward and backward, of one layer and micro-batch, in the order of PASSES.

    Args:
        rows: (token, expert) pairs that this rank exchanges.
        row_bytes: of a row of combine: hidden size times bytes of an element.
        packed_row_bytes: of a row of dispatch, which carries its probability. Its gradient does too.
    """
    return (
        Pass("dispatch", rows * packed_row_bytes),
        Pass("combine", rows * row_bytes),
        Pass("dispatch", rows * row_bytes),  # backward of combine
        Pass("combine", rows * packed_row_bytes),  # backward of dispatch
    )


def stage_seconds(
    one: Pass, level: str, chunks: int, ep_size: int, etp_size: int, costs: Costs
) -> list[tuple[Lane, float]]:
    """Lane and seconds of each op of one of `chunks` equal chunks (eq. 8 to 10)."""
    schedule = one.schedule(level, even_chunks(one.exchanged, etp_size, chunks)[:1], ep_size, etp_size)
    return [(op.lane, costs(op)) for op in schedule.ops]


def pipeline_seconds(stages: Iterable[tuple[Lane, float]], chunks: int) -> float:
    """Time of equal chunks that go through these stages, where lanes do not disturb each other."""
    lanes: dict[Lane, float] = {}
    for lane, seconds in stages:
        lanes[lane] = lanes.get(lane, 0.0) + seconds
    return sum(lanes.values()) + (chunks - 1) * max(lanes.values())


def choose(
    passes: Sequence[Pass],
    ep_size: int,
    etp_size: int,
    costs: Costs,
    slowdown: Slowdown | None = None,
    levels: Sequence[str] = LEVELS,
    chunks: Sequence[int] = CHUNKS,
    minimum_chunk: int = 1,
    equal_within: float = 1e-9,
    one_chunk: float = 1.0,
) -> Choice:
    """The level and chunk count under which the passes together take least (Algorithm 3).

    Of equal times, fewer chunks win, then the faster, then the lower level. The same inputs give the same choice on
    every rank.

    Args:
        passes: at least one, such as `training_passes`.
        slowdown: how lanes disturb each other (see `simulate`). Candidates are then played; the undisturbed pipeline
            is a lower bound of each, so that those it rules out need not be.
        levels: to choose from.
        chunks: chunk counts to choose from; O1 has one chunk whatever they are.
        minimum_chunk: own bytes of the largest pass that a chunk must have, unless it is the only one (the paper's
            I_minimal).
        equal_within: times that exceed the least by up to this part of it count as equal to it.
        one_chunk: the part of its predicted time at which a single chunk is compared with several.

    Raises:
        ConfigurationError: a curve is missing.
        ValueError: an unknown level, or a chunk count or `minimum_chunk` below 1.
    """
    counts = _counts(max(one.exchanged for one in passes), levels, chunks, minimum_chunk)
    candidates = [_Candidate(level, count, passes, ep_size, etp_size, costs) for count, level in counts]
    best = math.inf
    results: list[tuple[float, int, Choice]] = []
    for candidate in sorted(candidates, key=lambda candidate: sum(candidate.bounds)):
        part = one_chunk if candidate.count == 1 else 1.0
        seconds = candidate.seconds(slowdown, best * (1 + equal_within) / part)
        best = min(best, seconds * part)
        results.append((seconds * part, candidate.count, Choice(candidate.level, candidate.count, seconds)))
    return fewest_of_equal(sorted(results, key=lambda result: result[2].level), equal_within)


class _Candidate:
    """A level and chunk count, and how long its passes take."""

    def __init__(
        self, level: str, count: int, passes: Sequence[Pass], ep_size: int, etp_size: int, costs: Costs
    ) -> None:
        self.level, self.count = level, count
        self.orders = [_order(one.direction, level, count, ep_size > 1, etp_size > 1) for one in passes]
        self.stages = [stage_seconds(one, level, count, ep_size, etp_size, costs) for one in passes]
        self.bounds = [pipeline_seconds(stages, count) for stages in self.stages]

    def seconds(self, slowdown: Slowdown | None, limit: float) -> float:
        """Of all passes; where that is above `limit`, a time between the two."""
        total = sum(self.bounds)
        if slowdown:
            for (order, stage_of), stages, bound in zip(self.orders, self.stages, self.bounds, strict=True):
                if total > limit:
                    break
                times = play(order, [stages[stage][1] for stage in stage_of], slowdown)
                total += max(end for _, end in times) - bound
        return total


C = TypeVar("C")


class ChoiceByRows(Generic[C]):
    """A choice for every range of row counts, made once: when a count leaves the range, that of its range applies.

    Ranges are the same for every rank and run; the choice of a range is that of its geometric middle. Row counts
    must be agreed by the ranks of a layer before they are looked up.
    """

    def __init__(self, choose_for: Callable[[int], C], ratio: float = 2**0.5) -> None:
        """`choose_for` gives the choice for a row count; `ratio` is the upper over the lower end of a range."""
        if not ratio > 1:
            raise ValueError(f"ratio {ratio} of a range of row counts is not above 1")
        self._choose_for = choose_for
        self._begins = [0, 1]
        while self._begins[-1] < _MOST_ROWS:
            self._begins.append(max(self._begins[-1] + 1, round(self._begins[-1] * ratio)))
        self._choices: dict[int, C] = {}

    def range_of(self, rows: int) -> range:
        """The row counts that share the choice of `rows`.

        Raises:
            ValueError: a row count that is negative or beyond the last range.
        """
        if not 0 <= rows < self._begins[-1]:
            raise ValueError(f"{rows} rows are not between 0 and {self._begins[-1] - 1}")
        index = bisect_right(self._begins, rows)
        return range(self._begins[index - 1], self._begins[index])

    def __getitem__(self, rows: int) -> C:
        """The choice for `rows`. Raises ValueError as `range_of` does."""
        span = self.range_of(rows)
        if span.start not in self._choices:
            self._choices[span.start] = self._choose_for(math.isqrt(span.start * span[-1]))
        return self._choices[span.start]


def choices(
    cluster: Cluster,
    ep_size: int,
    etp_size: int,
    row_bytes: int,
    packed_row_bytes: int,
    levels: Sequence[str] = LEVELS,
    chunks: Sequence[int] = CHUNKS,
) -> ChoiceByRows[Choice]:
    """The choice for every number of rows that a rank exchanges, on a measured cluster; see `training_passes`."""
    costs = cluster.costs()

    def choose_for(rows: int) -> Choice:
        passes = training_passes(rows, row_bytes, packed_row_bytes)
        return choose(passes, ep_size, etp_size, costs, cluster.slowdown, levels, chunks, **AS_IN_TRAINING)

    return ChoiceByRows(choose_for)


def _counts(exchanged: int, levels: Sequence[str], chunks: Sequence[int], minimum_chunk: int) -> list[tuple[int, str]]:
    """The chunk counts and levels to choose from."""
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"level {level} is not one of {', '.join(LEVELS)}")
    if min(*chunks, minimum_chunk) < 1:
        raise ValueError(f"chunk counts {tuple(chunks)} and minimum_chunk {minimum_chunk} must be at least 1")
    most = max(1, exchanged // minimum_chunk)
    counts = [count for count in chunks if count <= most] or [1]
    return [(count, level) for level in levels for count in (counts if level != "O1" else [1])]


@lru_cache(maxsize=1024)
def _order(direction: str, level: str, count: int, ep: bool, etp: bool) -> tuple[Order, tuple[int, ...]]:
    """Of a pipeline's ops; and the stage of its chunk that each op is."""
    schedule = Pass(direction, 0).schedule(level, [ChunkBytes()] * count, 1 + ep, 1 + etp)
    stages = [iter(range(len(schedule.ops))) for _ in range(count)]  # of each chunk, those to come
    return Order.of(schedule), tuple(next(stages[op.chunk]) for op in schedule.ops)
