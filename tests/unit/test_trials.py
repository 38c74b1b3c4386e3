"""What is tried before a plan is kept, in which order, and what stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.planner import ALLTOALL, Prediction
from megatron_moe_opt.planning.trials import MOST_TRIED, STEPS, SWEEPS, Trials, decide, shortlist


def predictions(**seconds: float) -> list[Prediction]:
    named = {name.replace("_", ":"): value for name, value in seconds.items()}
    return [Prediction(name, value, 0, 0, 0, 0) for name, value in sorted(named.items(), key=lambda item: item[1])]


def test_the_plan_stock_and_the_best_of_every_system_are_tried():
    found = predictions(mpmoe_2=1.0, mpmoe_3=1.01, mpmoe_4=1.02, mpmoe_5=1.03, monta_O1=1.3, parm_S1=2.0, alltoall=3.0)
    assert shortlist(found, "mpmoe:2") == ("mpmoe:2", ALLTOALL, "monta:O1", "parm:S1", "mpmoe:3", "mpmoe:4")
    assert shortlist(found, ALLTOALL)[0] == ALLTOALL


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_no_more_than_so_many_and_none_twice(seconds):
    found = predictions(**{f"monta_O2x{index}": value for index, value in enumerate(seconds)}, alltoall=1.0)
    tried = shortlist(found, found[0].variant)
    assert len(tried) == len(set(tried)) <= MOST_TRIED and ALLTOALL in tried and tried[0] == found[0].variant


def run(trials: Trials, seconds) -> list[str]:
    order = []
    while trials.current is not None:
        order.append(trials.current)
        trials.record(seconds(trials.current, len(order) - 1))
    return order


def test_sweeps_go_there_and_back():
    trials = Trials(["a", "b"])
    assert run(trials, lambda *_: 1.0) == ["a"] * STEPS + ["b"] * 2 * STEPS + ["a"] * STEPS
    assert SWEEPS == 2


def test_the_first_step_of_a_variant_does_not_count():
    trials, before = Trials(["a", "b", "c"]), [None]

    def seconds(variant: str, _: int) -> float:
        first, before[0] = variant != before[0], variant
        return 100.0 if first else {"a": 3.0, "b": 2.0, "c": 1.0}[variant]

    steps = run(trials, seconds)
    assert trials.medians() == {"a": 3.0, "b": 2.0, "c": 1.0}
    assert trials.longer_than(1.0) == pytest.approx(sum([300.0, 200.0]) + (len(steps) - 5) * 2.0 - len(steps), abs=3)


def test_a_steady_drift_favours_none():
    trials = Trials(["a", "b", "c"])
    run(trials, lambda _, step: 1.0 + 0.01 * step)
    medians = trials.medians()
    assert max(medians.values()) - min(medians.values()) < 0.01


def test_stock_stays_unless_something_is_faster():
    assert decide({ALLTOALL: 1.0, "monta:O1": 0.995}) == ALLTOALL
    assert decide({ALLTOALL: 1.0, "monta:O1": 0.98}) == "monta:O1"
    assert decide({"monta:O1": 1.0, "monta:O2x2": 0.999}) == "monta:O2x2"
