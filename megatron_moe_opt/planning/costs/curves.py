"""Time over bytes of each kind of op, measured or given as bandwidth and efficiency, and how much lanes disturb it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op

Slowdown = Mapping[tuple[Lane, ...], float]
"""How much lanes disturb each other: (y, x) holds the rate, in (0, 1], of an op in lane y while lane x is busy (MPMoE's
alpha(y, x)); (y, x, z) that while both x and z are."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of an op over its bytes: straight lines between measured points.

    Below the first point the line of the first two goes on, down to the latency at 0 bytes: where it meets 0 bytes,
    but not less than 0 and not more than the first point's time. Beyond the last point bytes take the time they take
    there.

    Raises:
        ValueError: no points; a size or a time that is not positive and finite; sizes that do not ascend.
    """

    points: tuple[tuple[float, float], ...]
    """The measured points (bytes, seconds), by ascending bytes; bytes count as Op.size does."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a cost curve needs at least one point")
        for index, (size, seconds) in enumerate(self.points):
            if not (0 < size < math.inf and 0 < seconds < math.inf):
                raise ValueError(f"point {index} of a cost curve, ({size}, {seconds}), is not positive and finite")
            if index and size <= self.points[index - 1][0]:
                raise ValueError(f"point {index} of a cost curve has {size} bytes, not more than the point before it")

    @classmethod
    def from_efficiency(
        cls, bandwidth: float, efficiencies: Iterable[tuple[float, float]], crossing: float = 1.0
    ) -> CostCurve:
        """Returns the curve that the papers use: seconds = bytes * crossing / (bandwidth * efficiency) (MoNTA, eq. 8 to
        10).

        Args:
            bandwidth: theoretical, bytes a second.
            efficiencies: (bytes, part of the bandwidth that ops of this size reach, in (0, 1]).
            crossing: the part of the bytes that crosses the link, such as (e - 1) / e in a group of e ranks.

        Raises:
            ValueError: a bandwidth, efficiency or part that is out of range.
        """
        if not 0 < bandwidth < math.inf:
            raise ValueError(f"bandwidth {bandwidth} is not positive and finite")
        if not 0 < crossing <= 1:
            raise ValueError(f"crossing {crossing} is not in (0, 1]")
        points = []
        for size, efficiency in efficiencies:
            if not 0 < efficiency <= 1:
                raise ValueError(f"efficiency {efficiency} at {size} bytes is not in (0, 1]")
            points.append((size, size * crossing / (bandwidth * efficiency)))
        return cls(tuple(points))

    @property
    def latency(self) -> float:
        """Seconds of an op without bytes: the latency."""
        if len(self.points) == 1:
            return 0.0
        (size, seconds), (next_size, next_seconds) = self.points[:2]
        intercept = seconds - size * (next_seconds - seconds) / (next_size - size)
        return min(max(intercept, 0.0), seconds)

    def seconds(self, size: float) -> float:
        """Returns the seconds that an op of `size` bytes takes.

        Raises:
            ValueError: a negative size.
        """
        if size < 0:
            raise ValueError(f"an op cannot have {size} bytes")
        index = bisect_left(self._sizes, size)
        if index == len(self.points):
            last_size, last_seconds = self.points[-1]
            return size * last_seconds / last_size
        left, left_seconds = self.points[index - 1] if index else (0.0, self.latency)
        right, right_seconds = self.points[index]
        if size == right:
            return right_seconds
        return left_seconds + (right_seconds - left_seconds) * (size - left) / (right - left)

    @cached_property
    def _sizes(self) -> list[float]:
        return [size for size, _ in self.points]


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of an op as a line, alpha + beta * bytes (Parm, section V-A), and how well measured points lie on it."""

    alpha: float
    """Seconds of an op without bytes: the latency."""
    beta: float
    """Seconds that every byte adds."""
    r_squared: float = 1.0
    """The part of the points' variance that the line explains: 1 where they lie on it, less than 0 where their mean
    would be nearer to them."""
    largest_error: float = 0.0
    """The largest relative error: how far the line is from a point, over the point's seconds."""

    @classmethod
    def fit(cls, curve: CostCurve) -> AlphaBeta:
        """Fits the line with the least squares of relative errors, and with neither alpha nor beta below 0.

        Relative, because sizes span decades: absolute errors are those of the largest sizes, whose noise would be many
        times the latency. A single point gives a line through the origin.
        """
        weights = [seconds**-2 for _, seconds in curve.points]
        total = sum(weights)
        mean_size, mean_seconds = (
            sum(weight * point[axis] for weight, point in zip(weights, curve.points, strict=True)) / total
            for axis in (0, 1)
        )
        spread = rise = 0.0
        for weight, (size, seconds) in zip(weights, curve.points, strict=True):
            spread += weight * (size - mean_size) ** 2
            rise += weight * (size - mean_size) * (seconds - mean_seconds)
        beta = max(rise / spread, 0.0) if spread else math.inf
        alpha = mean_seconds - beta * mean_size
        if alpha < 0:  # the best line through the origin
            alpha = 0.0
            rates = [size / seconds for size, seconds in curve.points]
            beta = sum(rates) / sum(rate**2 for rate in rates)
        return cls(alpha, beta, *_quality(curve.points, lambda size: alpha + beta * size))

    def seconds(self, size: float) -> float:
        """Returns the seconds that the line gives an op of `size` bytes."""
        return self.alpha + self.beta * size


def _quality(points: Iterable[tuple[float, float]], line: Callable[[float], float]) -> tuple[float, float]:
    """Returns R squared and the largest relative error."""
    errors = [(line(size) - seconds, seconds) for size, seconds in points]
    mean = sum(seconds for _, seconds in errors) / len(errors)
    variance = sum((seconds - mean) ** 2 for _, seconds in errors)
    unexplained = sum(error**2 for error, _ in errors)
    largest = max(abs(error) / seconds for error, seconds in errors)
    return (1 - unexplained / variance if variance else 1.0), largest


@dataclass(frozen=True)
class Costs:
    """What every op of a schedule costs; called with an Op, it gives its seconds."""

    curves: Mapping[tuple[Kind, str | None], CostCurve] = field(default_factory=dict)
    """The curves by kind of op and role of its group (None for ops that are not collectives)."""
    overhead: float = 0.0
    """Seconds that every op of a pipeline takes besides what its curve says."""

    def __call__(self, op: Op) -> float:
        """Returns the seconds of one op of a pipeline. Raises ConfigurationError as `curve` does.

        A sum is in the curve of the exchange whose parts it adds. An activation is taken to cost what a copy of as many
        bytes costs as it writes.
        """
        return 0.0 if op.kind is Kind.SUM else self.overhead + self.alone(op)

    def alone(self, op: Op) -> float:
        """Returns the seconds of what a layer calls by itself, outside of a pipeline. Raises as `curve` does."""
        return self.curve(op).seconds(op.size)

    def curve(self, op: Op) -> CostCurve:
        """Returns the curve by which an op of this kind, in this group, is predicted.

        Raises:
            ConfigurationError: there is no curve for them.
        """
        kind = Kind.COPY if op.kind is Kind.ACTIVATE else op.kind
        curve = self.curves.get((kind, op.group))
        if curve is None:
            raise ConfigurationError(
                f"no cost curve for {_name(kind, op.group)} (there are: "
                f"{', '.join(_name(*key) for key in self.curves) or 'none'}); measure one with moe-opt profile"
            )
        return curve


def _name(kind: Kind, group: str | None) -> str:
    return kind.value if group is None else f"{kind.value} in group {group}"
