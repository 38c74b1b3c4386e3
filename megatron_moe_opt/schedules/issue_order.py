"""The order in which ops are issued, for GPUs on which streams share one hardware queue.

Megatron sets CUDA_DEVICE_MAX_CONNECTIONS=1 where its tensor or context parallelism relies on launch order. Then an op
that waits holds up all that is issued after it, in whichever lane. So ops are issued in the order in which they would
start: nothing stands behind an op that starts later than itself.

When ops start depends on how long they take. All ranks must issue alike, or two of them could wait for each other in
two process groups: so what an op takes is that of its kind, whatever this rank's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from megatron_moe_opt.schedules.schedule import Kind, Lane, Op

SECONDS = {
    Kind.PERMUTE: 0.1,
    Kind.COPY: 0.1,
    Kind.SUM: 0.1,
    Kind.COMPUTE: 2.0,
    Kind.GRADIENT: 4.0,
}
"""What ops of a kind take, against a collective's 1."""


def in_issue_order(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The same ops by the time at which they would start; those of a lane keep their order.

    Args:
        ops: each after those it waits for.
    """
    order = _order(tuple((op.lane, op.waits_for, SECONDS.get(op.kind, 1.0)) for op in ops))
    place = {old: new for new, old in enumerate(order)}
    return tuple(replace(ops[old], waits_for=tuple(place[other] for other in ops[old].waits_for)) for old in order)


@lru_cache(maxsize=1024)
def _order(ops: tuple[tuple[Lane, tuple[int, ...], float], ...]) -> list[int]:
    """Indexes of ops, given the lane of each, what it waits for and what it takes, by their starts."""
    starts, ends = [], []
    free: dict[Lane, float] = {}
    for lane, waits_for, seconds in ops:
        starts.append(max((free.get(lane, 0.0), *(ends[other] for other in waits_for))))
        free[lane] = starts[-1] + seconds
        ends.append(free[lane])
    return sorted(range(len(ops)), key=starts.__getitem__)
