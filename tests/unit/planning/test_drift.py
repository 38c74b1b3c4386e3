"""When a choice is made anew: where steps take another time for long, seldom however often that is so, and once when
routers have learnt.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatron_moe_opt.planning.choosing.drift import DRIFT, LEARNT, MOST_COST, WINDOW, Drift, first_look


def windows_until_over(
    seconds: Callable[[int], float], cost: float = 0.0, most: int = 60, look: int = 100_000
) -> int | None:
    """How many windows pass before the choice is made anew; None: it is not."""
    drift = Drift(cost, look)
    for step in range(most * WINDOW):
        median = drift.record(seconds(step))
        if median is not None and drift.why_over(median) is not None:
            return (step + 1) // WINDOW
    return None


@pytest.mark.parametrize("factor", [1 + DRIFT + 0.05, 1 / (1 + DRIFT + 0.05)])
def test_what_takes_another_time_for_a_window_is_chosen_anew(factor):
    assert windows_until_over(lambda step: 1.0 if step < 5 * WINDOW else factor) == 6
    assert windows_until_over(lambda step: 1.0 if step < 5 * WINDOW - 60 else factor) == 5  # most of a window


def test_noise_and_disturbed_steps_are_no_drift():
    """Times vary by 10 %, and every third step takes five times as long."""
    noise = random.Random(1)
    assert windows_until_over(lambda step: noise.gauss(1.0, 0.1) * (5 if step % 3 == 2 else 1)) is None
    assert windows_until_over(lambda step: 0.0) is None  # a clock that shows nothing


def test_steps_of_another_model_hide_nothing():
    """Nobody knows whose they are. Two of them follow each of ours, and a window has none of ours at all."""

    def seconds(step: int) -> float:
        return 0.0 if step % 3 or step // WINDOW == 3 else 1.0 if step < 5 * WINDOW else 1 + DRIFT + 0.05

    assert windows_until_over(seconds) == 6


def test_however_often_times_change_trials_cost_little():
    """They change in every other window, by as much as trials and their cost do."""
    spent = trained = 0.0
    for cost in (3.0, 0.5, 8.0, 2.0):
        windows = windows_until_over(lambda step: 1.0 + (step // WINDOW % 2), cost, most=1000)
        trained += sum(WINDOW * (1.0 + number % 2) for number in range(windows))
        spent += cost
    assert 0 < spent <= MOST_COST * trained


def test_a_choice_is_made_anew_when_routers_have_learnt_and_it_has_become_cheap():
    learnt = LEARNT // WINDOW
    assert windows_until_over(lambda step: 1.0, look=LEARNT) == learnt
    assert windows_until_over(lambda step: 1.0, look=60 * WINDOW + 1) is None
    assert windows_until_over(lambda step: 1.0, cost=2 * MOST_COST * LEARNT, look=LEARNT) == 2 * learnt


def test_looks_become_ten_times_as_rare():
    assert [first_look(trained) for trained in (0, LEARNT - 1, LEARNT, 10 * LEARNT)] == [
        LEARNT, LEARNT, 10 * LEARNT, 100 * LEARNT
    ]  # fmt: skip
    drift = Drift(0.0, LEARNT)
    for _ in range(LEARNT // WINDOW - 1):
        drift.why_over(1.0)
    assert drift.next_look == LEARNT  # another reason has had it chosen anew before
    assert drift.why_over(1.0) is not None and drift.next_look == 10 * LEARNT
