"""Time over bytes of each kind of op: measured, or given as bandwidth and efficiency."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules.schedule import Kind, Op


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
    """(bytes, seconds), by ascending bytes; bytes count as Op.size does."""

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
        """The papers' way: seconds = bytes * crossing / (bandwidth * efficiency) (MoNTA, eq. 8 to 10).

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
        """Seconds of an op without bytes."""
        if len(self.points) == 1:
            return 0.0
        (size, seconds), (next_size, next_seconds) = self.points[:2]
        intercept = seconds - size * (next_seconds - seconds) / (next_size - size)
        return min(max(intercept, 0.0), seconds)

    def seconds(self, size: float) -> float:
        """Time of an op of `size` bytes.

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
class Costs:
    """What every op of a schedule costs; called with an Op, it gives its seconds."""

    curves: Mapping[tuple[Kind, str | None], CostCurve] = field(default_factory=dict)
    """By kind of op and role of its group (None for ops that are not collectives)."""
    overhead: float = 0.0
    """Seconds that every op takes besides."""

    def __call__(self, op: Op) -> float:
        """Seconds of one op.

        Raises:
            ConfigurationError: there is no curve for it.
        """
        curve = self.curves.get((op.kind, op.group))
        if curve is None:
            raise ConfigurationError(
                f"no cost curve for {_name(op.kind, op.group)} (there are: "
                f"{', '.join(_name(*key) for key in self.curves) or 'none'}); measure one with moe-opt profile"
            )
        return self.overhead + curve.seconds(op.size)


def _name(kind: Kind, group: str | None) -> str:
    return kind.value if group is None else f"{kind.value} in group {group}"
