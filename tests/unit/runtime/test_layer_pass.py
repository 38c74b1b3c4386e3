"""Times between instants of a pass, which passes are observed, and the lines of a report."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.runtime.observed import layer_pass
from megatron_moe_opt.runtime.observed.layer_pass import MOST, STRIDE, Direction, HostClock, Samples, Times


def direction(calls: list[tuple[int, float]], is_backward: bool = False) -> Direction:
    """Returns a pass from 10 to 20 s, between 11 and 18 s outside of permutation and sum."""
    return Direction(is_backward, begin=10.0, exchange_begin=11.0, calls=calls, exchange_end=18.0, end=20.0)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(1, 13.0), (-1, 16.0)], Times(dispatch=3, experts=3, combine=4, exposed=4, layer=10)),
        # Partitions: what lies between two calls is exposed too.
        ([(1, 13.0), (-1, 14.0), (1, 15.0), (-1, 17.0)], Times(3, 3, 3, 4, 10)),
        # Autograd ends the calls of other ranks' experts together.
        ([(1, 12.0), (1, 13.0), (-1, 15.0), (-1, 15.5)], Times(2, 3.5, 4.5, 3.5, 10)),
        ([], Times(8, 0, 2, 7, 10)),
    ],
    ids=["one", "partitions", "nested", "none"],
)
def test_times_of_a_pass(calls, expected):
    assert direction(calls).times(HostClock()) == expected
    backward = direction(calls, is_backward=True).times(HostClock())
    assert backward == Times(expected.combine, expected.experts, expected.dispatch, expected.exposed, expected.layer)


def test_calls_that_overlap_are_one():
    calls = direction([(1, 11.0), (-1, 11.5), (1, 12.0), (1, 13.0), (-1, 15.0), (-1, 15.5)])
    assert calls.merged_calls(lambda instant: instant - 10) == [(1, 1.5), (2, 5.5)]


def test_a_pass_that_did_not_end_has_no_times():
    for missing in ("begin", "exchange_begin", "exchange_end", "end"):
        cut = direction([(1, 13.0), (-1, 16.0)])
        setattr(cut, missing, None)
        assert cut.times(HostClock()) is None


def run(samples: Samples, passes: range) -> None:
    for number in passes:
        if samples.is_next():
            samples.add(number)


def test_every_seventh_pass_is_observed_from_the_fourth_on_also_across_reports():
    samples = Samples()
    run(samples, range(12))
    assert samples.take() == [3, 10]
    run(samples, range(12, 30))
    assert samples.take() == [17, 24]


@given(st.integers(1, 4000), st.integers(0, 30))
def test_many_passes_are_thinned_out_evenly(passes, before):
    samples = Samples()
    run(samples, range(before))
    samples.take()
    run(samples, range(before, before + passes))
    taken = samples.take()
    assert len(taken) < MOST
    steps = {late - early for early, late in zip(taken, taken[1:], strict=False)}
    assert len(steps) <= 1 and all(step % 2 and step % STRIDE == 0 for step in steps)
    if passes > STRIDE:
        assert taken[0] < before + STRIDE
        assert before + passes - taken[-1] <= 3 * max(steps, default=STRIDE)
    run(samples, range(before + passes, before + passes + STRIDE))
    assert len(samples.take()) == 1  # begins anew at the first stride


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 16, 32])
def test_every_micro_batch_of_a_step_gets_its_turn(micro_batches):
    with mock.patch.object(layer_pass, "MOST", 10**9):
        samples = Samples()
        run(samples, range(STRIDE * micro_batches * 3))
    assert {number % micro_batches for number in samples.take()} == set(range(micro_batches))


def values(exposed: float, **more: float) -> dict[str, float]:
    stages = {"dispatch ms": 2.0, "experts ms": 3.0, "combine ms": 1.0, "exposed ms": exposed, "layer ms": 6.0}
    links = {"inter-node MB": 1.5, "intra-node MB": 0.25}
    both = stages | links | {f"backward {name}": 2 * value for name, value in (stages | links).items()}
    return {"passes": 3.0, "expert imbalance": 1.4, "rank imbalance": 1.1} | both | more


def test_the_table_names_the_worst_layers_and_the_mean_of_all():
    from megatron_moe_opt.integration.observe import telemetry_report

    layers = {number: values(exposed=number % 10 / 10) for number in range(1, 62)}
    lines = telemetry_report.lines(layers)
    assert lines[0].startswith("telemetry: 61 MoE layers, means of 3 observed passes, forward + backward; the 3 with")
    assert len(lines) == 1 + 1 + 3 + 1 and len({len(line) for line in lines[1:]}) == 1
    assert [line.split()[1:3] for line in lines[2:5]] == [["layer", "9"], ["layer", "19"], ["layer", "29"]]
    assert lines[5].split()[1] == "all"
    assert (
        "2.00 + 4.00" in lines[2] and "0.90 + 1.80" in lines[2] and " 15%" in lines[2] and "1.500 + 3.000" in lines[2]
    )

    few = telemetry_report.lines({number: values(exposed=1.0) for number in (3, 1, 2, 4)})
    assert sum("telemetry: layer" in line for line in few) == 4 and "most exposed" not in few[0]
    forward_only = {name: value for name, value in values(1.0).items() if not name.startswith("backward")}
    assert "2.00 + -" in telemetry_report.lines({1: forward_only})[2]
    assert telemetry_report.lines({}) == []
