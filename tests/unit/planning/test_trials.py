"""What is tried before a plan is kept, in which order, and what stays."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.choosing.trials import (
    MOST_AT_FIRST,
    MOST_STEPS,
    NEAR,
    TURN,
    Trials,
    lines,
    next_along,
    shortlist,
)
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, Prediction


def predictions(**seconds: float) -> list[Prediction]:
    named = {name.replace("_", ":"): value for name, value in seconds.items()}
    return [Prediction(name, value, 0, 0, 0, 0) for name, value in sorted(named.items(), key=lambda item: item[1])]


def test_the_plan_stock_and_the_best_of_every_system_are_tried():
    found = predictions(mpmoe_2=1.0, mpmoe_3=1.01, mpmoe_4=1.02, mpmoe_5=1.03, monta_O1=1.3, parm_S1=2.0, alltoall=3.0)
    assert shortlist(found, "mpmoe:2") == ("mpmoe:2", ALLTOALL, "monta:O1", "parm:S1", "mpmoe:3", "mpmoe:4")
    assert shortlist(found, ALLTOALL)[0] == ALLTOALL


def test_experts_that_travel_are_tried_beside_tokens_that_do_but_if_hopeless():
    """They are on no line with anything in another system, and seven partitions tell little that six do not."""
    seconds = {"mpmoe:6": 1.0, "mpmoe:7": 1.01, "mpmoe:8": 1.02, ALLTOALL: 1.1, "monta:O2x2": 1.2}
    seconds |= {"expert-migration:1x1": 1.21, "expert-migration:1x2": 1.22, "expert-migration:1x4": 1.23}
    seconds |= {"expert-migration:2x1": NEAR + 0.01}
    tried = shortlist([Prediction(*one, 0, 0, 0, 0) for one in seconds.items()], "mpmoe:6")
    assert tried == (
        "mpmoe:6", ALLTOALL, "monta:O2x2", "expert-migration:1x1", "expert-migration:1x2", "mpmoe:7"
    )  # fmt: skip


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_no_more_than_so_many_and_none_twice(seconds):
    found = predictions(**{f"monta_O2x{index}": value for index, value in enumerate(seconds)}, alltoall=1.0)
    tried = shortlist(found, found[0].variant)
    assert len(tried) == len(set(tried)) <= MOST_AT_FIRST and ALLTOALL in tried and tried[0] == found[0].variant


def test_lines_are_what_differs_in_one_number():
    others = [f"mpmoe:{count}" for count in (8, 2, 4)] + ["mpmoe:3:S1", "mpmoe:2:S1", "monta:O2x2"]
    partitions, chunks = lines("mpmoe:4", [*others, "mpmoe:4:c2"])
    assert list(partitions.items()) == [(n, f"mpmoe:{n}") for n in (2, 4, 8)]
    assert chunks == {1: "mpmoe:4", 2: "mpmoe:4:c2"}
    partitions, strategies = lines("mpmoe:2:S1", others)
    assert partitions == {2: "mpmoe:2:S1", 3: "mpmoe:3:S1"} and strategies == {1: "mpmoe:2:S1"}
    monta = [f"monta:{level}x{chunks}" for level in ("O2", "O3") for chunks in (2, 4, 8, 16)]
    hops = ["expert-migration:1x1", "expert-migration:1x1:c2", "expert-migration:2x1", "netmoe:hops", "netmoe:hopsx4"]
    *_, line = lines("expert-migration:1x1:c2", hops)
    assert line == {1: "expert-migration:1x1", 2: "expert-migration:1x1:c2"}
    assert list(lines("netmoe:hopsx4", hops)) == [{1: "netmoe:hops", 4: "netmoe:hopsx4"}]
    levels, chunks = lines("monta:O2x4", monta)
    assert list(levels.values()) == ["monta:O2x4", "monta:O3x4"]
    assert list(chunks.values()) == [f"monta:O2x{count}" for count in (2, 4, 8, 16)]
    _, chunks = lines("monta:O2x4", [*monta, "monta:O1"])
    assert chunks[1] == "monta:O1"  # in one chunk levels are the same
    assert not any(lines(ALLTOALL, [*others, ALLTOALL]))


def test_algorithm_1_goes_up_to_where_time_turns_and_then_down():
    line, times = {n: f"mpmoe:{n}" for n in range(1, 9)}, {"mpmoe:4": [1.0] * 3}
    asked = []
    while (variant := next_along(line, "mpmoe:4", times)) is not None:
        asked.append(variant)
        times[variant] = [{5: 1.2, 3: 1.1}[int(variant[-1])]] * 3
    assert asked == ["mpmoe:5", "mpmoe:3"]
    assert next_along(line, "mpmoe:4", times | {"mpmoe:5": [0.995] * 3}) == "mpmoe:6"  # as fast is no turning point
    assert next_along({4: "mpmoe:4"}, "mpmoe:4", times) is None


def run(trials: Trials, seconds: Callable[[str, int], float]) -> list[str]:
    """The variants of all steps; `seconds` of a variant and the number of the step."""
    order = []
    while trials.current is not None:
        order.append(trials.current)
        trials.record(seconds(order[-1], len(order) - 1))
    return order


def turns(order: list[str]) -> list[str]:
    assert len(order) % TURN == 0
    return order[::TURN]


def test_sweeps_go_there_and_back_and_the_slow_drop_out():
    """One far behind after one turn, one that is near after two."""
    true = {"monta:O1": 1.0, "parm:S1": 2.0, "mpmoe:9": 1.1}
    trials = Trials([Prediction(name, 1, 0, 0, 0, 0) for name in true], "monta:O1")
    assert turns(run(trials, lambda name, _: true[name])) == ["monta:O1", "parm:S1", "mpmoe:9", "mpmoe:9", "monta:O1"]
    assert trials.choice == "monta:O1" and trials.medians() == true


def test_the_first_step_of_a_variant_does_not_count():
    true, before = {"monta:O1": 3.0, "parm:S1": 2.9, ALLTOALL: 3.1}, [None]
    trials = Trials([Prediction(name, 1, 0, 0, 0, 0) for name in true], "monta:O1")

    def seconds(variant: str, _: int) -> float:
        first, before[0] = variant != before[0], variant
        return 100.0 if first else true[variant]

    order = run(trials, seconds)
    assert trials.medians() == true
    switches = 1 + sum(one != other for one, other in itertools.pairwise(order))
    took = 100 * switches + sum(true[one] for one, other in itertools.pairwise(order) if one == other)
    assert trials.longer_than(1.0) == pytest.approx(took - len(order)) and trials.steps == len(order)


def test_what_is_next_to_the_leader_joins_until_nothing_better_does():
    """Predictions are right about the system and wrong about its partitions; those far off are not tried."""
    found = predictions(mpmoe_2=1.0, alltoall=1.01, monta_O1=1.02, parm_S1=1.03, netmoe=1.04, monta_O2x2=1.05)
    found += predictions(mpmoe_3=1.06, mpmoe_4=1.07, mpmoe_5=1.08, mpmoe_6=1.09, mpmoe_7=2.0)
    true = {one.variant: 2.0 for one in found} | {f"mpmoe:{n}": 1.0 + 0.1 * (6 - n) for n in range(2, 7)}
    trials = Trials(found, "mpmoe:2")
    assert "mpmoe:3" not in trials.variants
    order = turns(run(trials, lambda name, _: true[name]))
    assert trials.choice == "mpmoe:6" and "mpmoe:7" not in order
    assert [order.count(name) for name in (ALLTOALL, "monta:O1", "parm:S1")] == [2, 1, 1]


def test_a_steady_drift_favours_none():
    trials = Trials(predictions(monta_O1=1, mpmoe_2=1, alltoall=1), "monta:O1")
    run(trials, lambda _, step: 1.0 + 0.001 * step)
    medians = trials.medians()
    assert max(medians.values()) - min(medians.values()) < 0.001


def test_a_disturbance_as_long_as_a_turn_puts_out_none_that_is_near():
    true = {"mpmoe:2": 1.0, "monta:O1": 1.1}
    trials = Trials([Prediction(name, 1, 0, 0, 0, 0) for name in true], "mpmoe:2")
    run(trials, lambda name, step: true[name] * (1.2 if step < TURN else 1.0))
    assert trials.choice == "mpmoe:2"


def test_a_disturbance_of_a_whole_turn_puts_out_neither_stock_nor_what_was_kept():
    """By 1.4, after which others with one turn are out. Stock is the fastest here, or what earlier trials have kept."""
    for fastest, kept in ((ALLTOALL, None), ("parm:S1", "parm:S1")):
        true = {name: 1.0 if name == fastest else 1.05 for name in ("monta:O1", ALLTOALL, "mpmoe:2", "parm:S1")}
        found = [Prediction(name, 1, 0, 0, 0, 0) for name in true]
        begins = Trials(found, "monta:O1", kept=kept).variants.index(fastest) * TURN
        for length in (TURN, 2 * TURN):
            trials = Trials(found, "monta:O1", kept=kept)
            disturbed = range(begins, begins + length)
            run(trials, lambda name, step, true=true, disturbed=disturbed: true[name] * (1 + 0.4 * (step in disturbed)))
            assert trials.choice == fastest


def test_what_steps_cannot_tell_from_stock_is_not_kept():
    """Five variants take as long as stock, with noise of 5 %: one of them nearly always seems to be faster."""
    generator, left = random.Random(1), 0
    names = [ALLTOALL, "monta:O1", "mpmoe:2", "parm:S1", "expert-migration:1", "netmoe"]
    for _ in range(50):
        trials = Trials([Prediction(name, 1, 0, 0, 0, 0) for name in names], "monta:O1")
        run(trials, lambda *_: generator.gauss(1, 0.05))
        left += trials.choice != ALLTOALL
    assert left <= 8


def test_a_single_candidate_stays():
    trials = Trials(predictions(monta_O1=1), "monta:O1")
    assert len(run(trials, lambda *_: 1.0)) == TURN and trials.choice == "monta:O1"


def test_stock_stays_unless_something_is_faster():
    for seconds, stays in ((0.995, ALLTOALL), (0.98, "monta:O1")):
        trials = Trials(predictions(monta_O1=1.0, alltoall=1.1), "monta:O1")
        run(trials, lambda name, _, seconds=seconds: 1.0 if name == ALLTOALL else seconds)
        assert trials.choice == stays


SYSTEMS = [ALLTOALL, "monta:O1", *(f"mpmoe:{n}" for n in range(2, 9)), *(f"monta:O2x{n}" for n in (2, 4, 8)), "parm:S1"]


@given(
    st.dictionaries(st.sampled_from(SYSTEMS), st.floats(0.5, 2), min_size=1),
    st.floats(0, 0.2),
    st.randoms(use_true_random=False),
)
def test_trials_end_in_so_many_steps_and_alike_for_all_who_see_the_same_times(true, noise, random):
    found = sorted((Prediction(name, random.uniform(0.5, 2), 0, 0, 0, 0) for name in true), key=lambda one: one.seconds)
    trials, others = (Trials(found, found[0].variant) for _ in range(2))
    while trials.current is not None:
        assert trials.current == others.current in trials.variants
        seconds = true[trials.current] * random.lognormvariate(0, noise)
        trials.record(seconds)
        others.record(seconds)
    assert trials.steps <= MOST_STEPS and others.current is None
    assert trials.choice == others.choice
    medians = trials.medians()
    assert ALLTOALL not in true or trials.choice == ALLTOALL or medians[trials.choice] <= medians[ALLTOALL] * 0.99


def test_noise_of_five_percent_costs_little():
    """Six systems up to 10 % apart, 100 times: the choice is rarely over 3 % slower than the best, never over 6 %."""
    generator = random.Random(1)
    regrets, steps, lost = [], [], []
    for _ in range(100):
        true = {name: generator.uniform(1.0, 1.1) for name in ("monta:O1", "mpmoe:2", "parm:S1", "expert-migration:1")}
        true |= {"netmoe": 1.5, ALLTOALL: 1.5}
        trials = Trials([Prediction(name, 1, 0, 0, 0, 0) for name in true], "monta:O1")
        run(trials, lambda name, _, true=true: true[name] * generator.lognormvariate(0, 0.05))
        chosen = true[trials.choice]
        regrets.append(chosen / min(true.values()) - 1)
        steps.append(trials.steps)
        lost.append(trials.longer_than(chosen) / chosen)
    assert statistics.mean(regrets) < 0.01 and sum(regret > 0.03 for regret in regrets) <= 5 and max(regrets) < 0.06
    assert max(steps) <= MOST_STEPS and statistics.mean(lost) < 15  # steps of what stays


@pytest.mark.parametrize("strategies", [("",), ("", ":S1", ":S2", ":S3", ":S4")], ids=len)
def test_partitions_are_found_that_were_not_predicted_to_be_best(strategies: tuple[str, ...]):
    """Noise of 3 %, and now and then a disturbance, on layers of several sizes; predictions are off by up to 20 %. Of
    strategies some are up to 5 % faster than none at all, most are slower."""
    generator, regrets, lost = random.Random(1), [], []
    for tokens in (200, 500, 1000, 2000) * 25:
        factor = {strategy: generator.uniform(0.95, 1.4) if strategy else 1 for strategy in strategies}
        true = {
            f"mpmoe:{n}{strategy}": (1 + tokens / 1000 * (1 + 1 / n) + 0.05 * n) * factor[strategy]
            for n in range(2, 9)
            for strategy in strategies
        }
        found = [Prediction(name, time * generator.uniform(0.8, 1.2), 0, 0, 0, 0) for name, time in true.items()]
        found.sort(key=lambda one: one.seconds)
        trials = Trials(found, found[0].variant)

        def noisy(name: str, _: int, true: dict[str, float] = true) -> float:
            return true[name] * generator.gauss(1, 0.03) * (1.5 if generator.random() < 0.05 else 1)

        run(trials, noisy)
        regrets.append(true[trials.choice] / min(true.values()) - 1)
        lost.append(trials.longer_than(true[trials.choice]) / true[trials.choice])
    assert sum(regret <= 0.05 for regret in regrets) >= 0.95 * len(regrets)
    assert statistics.mean(lost) < 10 and max(lost) < 0.03 * 1000  # of a thousand steps


def test_what_cannot_run_is_dropped_before_its_first_step():
    """Whether it is the first of a sweep or the last, or would have joined; nothing is left where nothing can run."""
    found = predictions(mpmoe_2=1.0, mpmoe_3=1.05, mpmoe_4=1.06, alltoall=1.1, parm_S1=1.2, monta_O1=1.3)
    true = {one.variant: one.seconds for one in found}
    for refused in ({"mpmoe:2"}, {"mpmoe:3"}, {"monta:O1", "parm:S1"}, set(true) - {ALLTOALL}, set(true)):
        trials, ran = Trials(found, "mpmoe:2"), set()
        while trials.current is not None:
            if trials.current in refused:
                trials.drop()
            else:
                ran.add(trials.current)
                trials.record(true[trials.current])
        assert ran and not ran & refused or refused == set(true)
        assert trials.choice == min(ran, key=true.__getitem__, default=None) and set(trials.medians()) == ran


def test_what_earlier_trials_have_kept_is_tried_again():
    found = predictions(mpmoe_2=1.0, alltoall=1.1, **{f"monta_O2x{n}": 1.2 + n for n in range(8)})
    assert "monta:O2x7" not in shortlist(found, "mpmoe:2")
    assert Trials(found, "mpmoe:2", kept="monta:O2x7").variants[:3] == ("mpmoe:2", "monta:O2x7", ALLTOALL)


@pytest.mark.parametrize(("seconds", "stays"), [(0.5, "allgather"), (1.5, "monta:O1")])
def test_what_nobody_predicts_is_tried_beside_and_may_stay(seconds, stays):
    true = {"monta:O1": 1.0, ALLTOALL: 2.0, "allgather": seconds}
    trials = Trials(predictions(monta_O1=1.0, alltoall=2.0), "monta:O1", beside=("allgather",))
    while trials.current is not None:
        trials.record(true[trials.current])
    assert trials.choice == stays and trials.medians() == true
