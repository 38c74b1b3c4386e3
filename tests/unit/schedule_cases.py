"""Random schedules for property tests, and timelines of given times."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Span, Timeline

BUFFERS = ("a", "b", "c")


@st.composite
def schedules(draw, max_ops=12):
    """Ops in any lanes that wait for any earlier ones and touch any of BUFFERS, all of them inputs.

    The size of an op stands for how long it takes.
    """
    ops = []
    buffers = st.sets(st.sampled_from(BUFFERS), max_size=1)
    for index in range(draw(st.integers(0, max_ops))):
        waits_for = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        ops.append(
            Op(
                Kind.COMPUTE,
                draw(st.sampled_from(list(Lane)[:4])),
                size=draw(st.integers(0, 20)),
                waits_for=tuple(sorted(waits_for)),
                reads=tuple(draw(buffers)),
                writes=tuple(draw(buffers)),
            )
        )
    return Schedule("random", tuple(ops), BUFFERS)


def timeline_of(*spans: tuple[Lane, float, float]) -> Timeline:
    """A copy in each of these lanes, from its start to its end."""
    made = tuple(Span(Op(Kind.COPY, lane), start, end) for lane, start, end in spans)
    return Timeline(Schedule("made", tuple(span.op for span in made)), made)
