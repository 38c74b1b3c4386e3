"""A plan put to the test: the planned variant, stock and the runners-up each run some training steps.

Predictions of different systems rest on different models, and a model that is off by 10 % chooses by chance between
systems that are 5 % apart. What a step takes is known for certain only once it has run, and then with noise. So trials
are sweeps of short turns. After each, what cannot be the fastest any more drops out: most steps go to variants that are
hard to tell apart, and nearly as fast as what stays. Every other sweep goes in the opposite order, so that what drifts
meanwhile favours none. In the leader's system a variant may be faster that was not predicted so: along each of its
numbers, such as partitions, MPMoE's Algorithm 1 says which one joins.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from megatron_moe_opt.planning.choosing.contenders import contenders
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction
from megatron_moe_opt.variants import kind_of, numbered

MOST_AT_FIRST = 6
"""The number of variants that run in the first sweep."""
TURN = 4
"""The steps of a variant in a sweep. The first after another variant's does not count: buffers are new, and what was
sent ahead may be on its way.
"""
MOST_STEPS = 150
"""The most training steps that all trials take together."""
ONE_TURN_WITHIN = 1.25
"""The multiple of the leader's median that keeps a variant after one turn, for a disturbance may last as long."""
STOCK_WITHIN = 0.01
"""Stock stays where nothing is faster by more than this part of its time."""
ENOUGH = 2 * TURN
"""The steps of a variant from which on a single disturbed one does not widen where its median may lie."""
NEAR = 1.5
"""A variant is tried only if it is predicted to take at most this many times as long as the leader; at the start, as
the fastest prediction.
"""

_NUMBER = re.compile(r"\d+")


def shortlist(predictions: Sequence[Prediction], planned: str, kept: str | None = None) -> tuple[str, ...]:
    """Returns what to try first: the planned variant, what earlier trials have kept, stock, the best of every other
    system and kind, then the next fastest.

    What differs from the leader in a number joins by itself, where it is worth it. Whether experts travel is no number.

    Args:
        predictions: the fastest first.
        kept: one of them; None: there were no trials, or what they have kept is tried beside, or not any more.
    """
    near = [one for one in predictions if one.seconds <= NEAR * predictions[0].seconds]
    of_systems = {one.family: one.variant for one in reversed(predictions)}.values()
    of_kinds = {kind_of(one.variant): one.variant for one in reversed(near)}.values()
    by_time = [one.variant for one in predictions]
    stock = [variant for variant in by_time if variant == ALLTOALL]
    best_ones = (sorted(ones, key=by_time.index) for ones in (of_systems, of_kinds))
    first = [planned] if kept is None else [planned, kept]
    tried = dict.fromkeys([*first, *stock, *chain.from_iterable(best_ones), *by_time])
    return tuple(tried)[:MOST_AT_FIRST]


def lines(variant: str, among: Iterable[str]) -> Iterator[dict[int, str]]:
    """Yields, for each number of a variant, it and those that differ from it in that number alone, ascending.

    Of mpmoe:3 mpmoe:2, mpmoe:3, ...; of monta:O2x4 monta:O2x4 and monta:O3x4, then monta:O2x2, monta:O2x4, ...
    """
    form, numbers = _form(variant)
    alike = [(its, other) for other in among for its_form, its in [_form(other)] if its_form == form]
    for place in range(len(numbers)):
        rest = numbers[:place], numbers[place + 1 :]
        line = {its[place]: other for its, other in alike if (its[:place], its[place + 1 :]) == rest}
        yield dict(sorted(line.items()))


def next_along(line: Mapping[int, str], leader: str, times: Mapping[str, Sequence[float]]) -> str | None:
    """Returns what of a line to try next, until it is known where time turns on it; None: it is.

    Along a number time is taken to fall and then to rise (MPMoE, Algorithm 1, for the one number of tokens that
    training has). So it goes upwards from the leader until time has risen, and downwards too, unless it has only
    fallen. What may be as fast as the fastest so far has not risen.

    Args:
        line: a variant for each number, by which they ascend, the leader among them.
        times: of each variant that was tried. What of these is no contender is believed to be slower.
    """
    variants = [*line.values()]
    first, seen = variants.index(leader), {}
    for direction in (variants[first:], variants[first::-1]):
        for variant in direction:
            if variant not in times:
                return variant
            seen[variant] = times[variant]
            if variant not in contenders(seen):
                break
        if leader not in contenders(seen):
            break  # it has fallen on this side, so it rises on the other
    return None


def _form(variant: str) -> tuple[str, tuple[int, ...]]:
    """Returns a variant without its numbers, and its numbers."""
    whole = numbered(variant)
    return _NUMBER.sub("#", whole), tuple(map(int, _NUMBER.findall(whole)))


class Trials:
    """Says what runs in the next step, and in the end what stays. The same on every rank that is told the same."""

    def __init__(
        self,
        predictions: Sequence[Prediction],
        planned: str,
        share: int = 1,
        beside: Sequence[str] = (),
        kept: str | None = None,
    ) -> None:
        """Begins the trials with the shortlist.

        Args:
            predictions: of all that may be tried, the fastest first, the planned variant among them.
            share: how many trials share the MOST_STEPS.
            beside: what nobody predicts, and is tried nevertheless.
            kept: see shortlist.
        """
        self._most_steps = MOST_STEPS // share
        self.variants = (*shortlist(predictions, planned, kept), *beside)
        """The variants that run: at first the shortlist, then contenders and what has joined them."""
        self.times: dict[str, list[float]] = {}
        """Seconds of the steps that count, of each variant that was tried."""
        self._predicted = {one.variant: one.seconds for one in predictions}
        self._given_two_turns = (ALLTOALL, kept)
        """What a disturbance of a whole turn is not to put out: what everything is compared with, and what ran."""
        self._order: list[str] = []
        self._seconds: list[float] = []
        """The seconds of the steps of `_order` that have run."""
        self._sweeps = 0
        self._begin_sweep()

    @property
    def current(self) -> str | None:
        """Returns the variant of the next step; None: the trials are over."""
        return self._order[self.steps] if self.steps < len(self._order) else None

    @property
    def steps(self) -> int:
        """How many steps the trials have timed so far."""
        return len(self._seconds)

    def record(self, seconds: float) -> None:
        """Takes the time of the step that has just run, the same on all ranks."""
        if self.steps and self._order[self.steps - 1] == self.current:
            self.times[self.current].append(seconds)
        self._seconds.append(seconds)
        if self.current is None:
            self._end_sweep()

    def drop(self) -> None:
        """Tries the variant of the next step no more, as it cannot run. It has not run yet."""
        variant = self.current
        self.variants = tuple(one for one in self.variants if one != variant)
        self._order[self.steps :] = [one for one in self._order[self.steps :] if one != variant]
        del self.times[variant]
        self._predicted.pop(variant, None)
        if self.current is None and self.variants:
            self._end_sweep()

    def longer_than(self, seconds: float) -> float:
        """Returns the seconds that all steps took more than as many of `seconds` each."""
        return sum(self._seconds) - self.steps * seconds

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of a step of each variant that was tried."""
        return {variant: statistics.median(times) for variant, times in self.times.items()}

    @property
    def choice(self) -> str | None:
        """Returns the variant that stays: the fastest of those that still take turns; or stock, where the fastest is
        not faster by more than STOCK_WITHIN of stock's time, or so many steps could not tell it from stock: of several
        that are as fast as stock the luckiest looks faster. None: all have been dropped.
        """
        if not self.variants:
            return None
        medians = self.medians()
        fastest, *others = contenders({variant: self.times[variant] for variant in self.variants})
        stock = medians.get(ALLTOALL)
        is_as_fast = stock is not None and medians[fastest] > stock * (1 - STOCK_WITHIN)
        is_unknown = ALLTOALL in others and len(self.times[fastest]) >= ENOUGH
        return ALLTOALL if is_as_fast or is_unknown else fastest

    def _begin_sweep(self) -> None:
        for variant in self.variants:
            self.times.setdefault(variant, [])
        turns = self.variants[:: 1 if self._sweeps % 2 == 0 else -1]
        self._order += [variant for variant in turns for _ in range(TURN)]
        self._sweeps += 1

    def _end_sweep(self) -> None:
        """Goes on with the contenders and what joins them, if there is something to tell apart and steps are left."""
        leader, *others = contenders({variant: self.times[variant] for variant in self.variants})
        self.variants = tuple(one for one in self.variants if one in (leader, *others) or self._is_new(one, leader))
        turns = (self._most_steps - self.steps) // TURN
        # What joins has two turns to come, or none: by the times of one it could take the place of what is well known.
        joining = self._joining(leader)[: max(0, turns // 2 - len(self.variants))]
        if 1 < len(self.variants) + len(joining) <= turns:
            self.variants += joining
            self._begin_sweep()

    def _is_new(self, variant: str, leader: str) -> bool:
        """Whether a variant has had one turn only, and is not far behind or is to have two in any case."""
        near = statistics.median(self.times[leader]) * ONE_TURN_WITHIN
        is_near = variant in self._given_two_turns or statistics.median(self.times[variant]) <= near
        return is_near and len(self.times[variant]) < TURN

    def _joining(self, leader: str) -> tuple[str, ...]:
        """Returns what Algorithm 1 tries next along each of the leader's numbers, in order of predicted time."""
        near = self._predicted.get(leader, 0) * NEAR  # nothing is along numbers of what nobody predicts
        worth = [one for one, seconds in self._predicted.items() if one in self.times or seconds <= near]
        new = (next_along(line, leader, self.times) for line in lines(leader, worth))
        return tuple(sorted((one for one in new if one is not None), key=self._predicted.__getitem__))
