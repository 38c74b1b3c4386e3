"""Regret from two halves of the rounds: how much of it is luck."""

from __future__ import annotations

import random
import statistics

import pytest

from tools.bench.split_half import noise_floor, regret_of_halves


def test_one_half_chooses_and_the_other_judges():
    """Rounds 1 and 3 have 2 for `a` and 4 for `b`; rounds 2 and 4 have 6 for `a` and 5 for `b`."""
    rounds = {"a": [1.0, 6.0, 3.0, 6.0], "b": [4.0, 4.0, 4.0, 6.0]}
    assert noise_floor(rounds) == pytest.approx(((6 / 5 - 1) + (4 / 2 - 1)) / 2)
    assert regret_of_halves(rounds, "a") == pytest.approx(((6 / 6 - 1) + (2 / 4 - 1)) / 2)
    assert regret_of_halves(rounds, "b") == pytest.approx(((5 / 6 - 1) + (4 / 4 - 1)) / 2)


def test_one_round_has_no_halves():
    assert noise_floor({"a": [1.0]}) is None and regret_of_halves({"a": [1.0]}, "a") is None


def test_without_noise_there_is_no_floor_and_regret_is_regret():
    rounds = {"a": [1.0] * 5, "b": [1.2] * 5}
    assert noise_floor(rounds) == 0 and regret_of_halves(rounds, "b") == pytest.approx(0.2)


def test_equal_candidates_have_no_regret_but_by_luck():
    """5 % of noise, ten equal candidates: against the least median any of them seems slower; against halves none."""
    generator = random.Random(1)
    plain, halves, floors = [], [], []
    for _ in range(300):
        rounds = {index: [generator.gauss(1, 0.05) for _ in range(7)] for index in range(10)}
        medians = [statistics.median(seconds) for seconds in rounds.values()]
        plain.append(medians[0] / min(medians) - 1)
        halves.append(regret_of_halves(rounds, 0))
        floors.append(noise_floor(rounds))
    assert statistics.mean(plain) > 0.03 and statistics.mean(floors) > 0.03
    assert abs(statistics.mean(halves)) < 0.005
