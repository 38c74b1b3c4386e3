"""Cost curves: lines between points, the ends, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.curves import AlphaBeta, CostCurve, Costs
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op

CURVE = CostCurve(((100, 3.0), (200, 4.0), (400, 10.0)))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (100, 3.0),
        (200, 4.0),
        (150, 3.5),
        (300, 7.0),
        (400, 10.0),
        (800, 20.0),  # beyond: the rate of the last point
        (0, 2.0),  # below: the line of the first two points
        (50, 2.5),
    ],
)
def test_straight_lines_between_points(size, seconds):
    assert CURVE.seconds(size) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "latency"),
    [
        (((100, 1.0), (200, 3.0)), 0.0),  # the line would meet 0 bytes at -1 s
        (((100, 3.0), (200, 2.0)), 3.0),  # it would meet 0 bytes at 4 s, above the first point
        (((100, 3.0), (200, 4.0)), 2.0),
        (((100, 3.0),), 0.0),
    ],
)
def test_latency_is_between_nothing_and_the_first_point(points, latency):
    curve = CostCurve(points)
    assert curve.latency == curve.seconds(0) == latency
    size, seconds = points[0]
    assert curve.seconds(size / 2) == pytest.approx((latency + seconds) / 2)


@st.composite
def curves(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 10**9), min_size=1, max_size=6)))
    times = draw(st.lists(st.floats(1e-7, 10), min_size=len(sizes), max_size=len(sizes)))
    return CostCurve(tuple(zip(sizes, sorted(times), strict=True)))


@given(curves(), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_bytes_never_take_less_time_where_the_points_say_so(curve, first, second):
    less, more = sorted((first, second))
    assert 0 <= curve.latency <= curve.seconds(less) <= curve.seconds(more) * (1 + 1e-12)


def test_from_efficiency_meets_its_points():
    curve = CostCurve.from_efficiency(25e9, [(8e6, 0.427), (32e6, 0.633)], crossing=0.5)
    assert curve.seconds(8e6) == pytest.approx(8e6 * 0.5 / (25e9 * 0.427), rel=1e-12)
    assert curve.seconds(32e6) == pytest.approx(32e6 * 0.5 / (25e9 * 0.633), rel=1e-12)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ((), "at least one point"),
        (((0, 1.0),), r"point 0 .* not positive and finite"),
        (((1, 1.0), (2, 0.0)), r"point 1 .* not positive and finite"),
        (((1, -1.0),), "not positive and finite"),
        (((1, math.inf),), "not positive and finite"),
        (((1, math.nan),), "not positive and finite"),
        (((math.inf, 1.0),), "not positive and finite"),
        (((2, 1.0), (2, 2.0)), r"point 1 .* has 2 bytes, not more"),
        (((2, 1.0), (1, 2.0)), r"point 1 .* has 1 bytes, not more"),
    ],
)
def test_refuses_points_that_are_no_curve(points, message):
    with pytest.raises(ValueError, match=message):
        CostCurve(points)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, [(1, 0.5)], 1.0), "bandwidth 0 "),
        ((1e9, [(1, 0.0)], 1.0), "efficiency 0.0 at 1 bytes"),
        ((1e9, [(1, 1.1)], 1.0), "efficiency 1.1 at 1 bytes"),
        ((1e9, [(1, 0.5)], 0.0), "crossing 0.0 "),
        ((1e9, [(1, 0.5)], 1.5), "crossing 1.5 "),
    ],
)
def test_refuses_impossible_efficiencies(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostCurve.from_efficiency(*arguments)


def test_refuses_negative_sizes():
    with pytest.raises(ValueError, match="-1 bytes"):
        CURVE.seconds(-1)


def test_costs_are_by_kind_and_group():
    costs = Costs(
        {(Kind.ALL_TO_ALL, "ep"): CURVE, (Kind.COPY, None): CostCurve(((100, 1.0),))},
        overhead=0.25,
    )
    assert costs(Op(Kind.ALL_TO_ALL, Lane.INTER, size=150, group="ep")) == 3.75
    assert costs(Op(Kind.COPY, Lane.COPY, size=50)) == 0.75
    with pytest.raises(
        ConfigurationError,
        match=r"no cost curve for all_to_all in group cp \(there are: all_to_all in group ep, copy\)",
    ):
        costs(Op(Kind.ALL_TO_ALL, Lane.INTER, size=150, group="cp"))
    with pytest.raises(ConfigurationError, match=r"no cost curve for copy \(there are: none\)"):
        Costs()(Op(Kind.COPY, Lane.COPY))


lines = st.builds(AlphaBeta, st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
several_sizes = st.sets(st.integers(1, 2**30), min_size=2, max_size=12).map(sorted)


def measured(line, sizes, errors=()):
    """The points of a line; the first ones off by a part of them."""
    factors = [1 + error for error in errors] + [1.0] * len(sizes)
    points = zip(sizes, factors, strict=False)
    return CostCurve(tuple((size, line.seconds(size) * factor) for size, factor in points))


@given(lines, several_sizes)
def test_a_fit_recovers_alpha_and_beta(line, sizes):
    """They are found as well as the points show them: a latency far below their seconds is lost in
    these seconds' rounding.
    """
    fit = AlphaBeta.fit(measured(line, sizes))
    lost = 1e-12 * line.seconds(sizes[-1]) * sizes[-1] / (sizes[-1] - sizes[0])
    assert fit.alpha == pytest.approx(line.alpha, rel=1e-6, abs=lost)
    assert fit.beta == pytest.approx(line.beta, rel=1e-6, abs=lost / sizes[0])
    assert fit.r_squared <= 1 and fit.largest_error < 1e-6


@given(lines, several_sizes, st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=12), st.data())
def test_no_line_has_less_squares_of_relative_errors(line, sizes, errors, data):
    curve = measured(line, sizes, errors)
    fit = AlphaBeta.fit(curve)
    assert fit.alpha >= 0 and fit.beta >= 0
    near = st.floats(0.8, 1.25)
    other = AlphaBeta(
        data.draw(st.sampled_from([fit.alpha, line.alpha, 0.0])) * data.draw(near),
        data.draw(st.sampled_from([fit.beta, line.beta, 0.0])) * data.draw(near),
    )

    def squares(one):
        return sum((one.seconds(size) / seconds - 1) ** 2 for size, seconds in curve.points)

    assert squares(fit) <= squares(other) * (1 + 1e-6) + 1e-12
    of_points = [abs(fit.seconds(size) / seconds - 1) for size, seconds in curve.points]
    assert fit.largest_error == pytest.approx(max(of_points))


def test_quality_of_a_fit_by_hand():
    """1, 3 and 5 seconds at 100, 200 and 300 bytes want a latency of -1: what is left is a line through the origin."""
    fit = AlphaBeta.fit(CostCurve(((100, 1.0), (200, 3.0), (300, 5.0))))
    rates = (100, 200 / 3, 60)
    assert fit.alpha == 0 and fit.beta == pytest.approx(sum(rates) / sum(rate**2 for rate in rates))
    errors = [fit.beta * size - seconds for size, seconds in ((100, 1), (200, 3), (300, 5))]
    assert fit.r_squared == pytest.approx(1 - sum(error**2 for error in errors) / 8)
    assert fit.largest_error == pytest.approx(max(abs(errors[0]), abs(errors[1]) / 3, abs(errors[2]) / 5))
    falling = AlphaBeta.fit(CostCurve(((100, 3.0), (200, 1.0))))
    assert falling.beta == 0 and falling.alpha == pytest.approx((1 / 3 + 1) / (1 / 9 + 1))


def test_one_point_is_a_rate():
    assert AlphaBeta.fit(CostCurve(((100, 2.0),))) == AlphaBeta(0.0, 0.02)


def test_points_of_one_height_are_a_latency():
    fit = AlphaBeta.fit(CostCurve(((100, 2.0), (300, 2.0))))
    assert (fit.alpha, fit.beta, fit.r_squared) == (2.0, 0.0, 1.0)
