"""MPMoE's formulas: memory by the paper's own numbers, the three paradigms against the simulator."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tests.unit.mpmoe_paradigms import paradigm_1, paradigm_2, paradigm_3, paradigm_seconds
from tools.papers.formulas.mpmoe import LayerElements

MODELS = {"GPT-S": (768, 3072), "GPT-XL": (2048, 8192), "BERT-L": (1024, 4096)}  # M, H (Table III)
seconds = st.integers(1, 1000).map(float)
partitions = st.integers(1, 9)
alphas = st.floats(0.5, 1)  # below it lanes are no longer side by side (section II-C)


@pytest.mark.parametrize("name", MODELS)
def test_equations_term_by_term(name):
    """Counted tensor by tensor, not by the closed forms."""
    tokens, (hidden, ffn), experts = 4096, MODELS[name], 64
    layer = LayerElements(tokens, hidden, ffn, experts)
    parameters = hidden * experts + hidden * ffn + ffn * hidden
    assert layer.model_states == 4 * parameters
    tensors = {"T_I": hidden, "T_DI": hidden, "T_M": ffn, "T_DO": hidden, "T_O": hidden}
    assert layer.activations == layer.pipelined == sum(tokens * width for width in tensors.values())
    assert layer.buffers == tokens * (tensors["T_M"] + tensors["T_DO"])
    for n in (2, 4, 8):
        buffers = {"T_DI": 2, "T_M": 1, "T_DO": 2}  # of a partition's size, in the place of n
        whole = sum(tokens * tensors[name] for name in buffers)
        shared = sum(number * tokens // n * tensors[name] for name, number in buffers.items())
        assert layer.saving(n) == whole - shared
        kept = layer.model_states + 2 * (layer.activations - layer.saving(n))
        assert layer.saving_ratio(n) == pytest.approx(1 - kept / (layer.model_states + 2 * layer.activations))
        assert layer.reused(n) == 2 * (layer.activations - layer.saving(n))
    assert layer.saving(1) == 0


def test_the_savings_of_figure_11():
    """23, 34 and 38 % are measured averages over models and tokens: the bound for many tokens lies above them."""
    for hidden, ffn in MODELS.values():
        layer = LayerElements(16384, hidden, ffn, 64)
        bounds = [layer.saving_ratio(n) for n in (2, 4, 8)]
        assert all(bound > measured for bound, measured in zip(bounds, (0.15, 0.3, 0.38), strict=True))
        assert bounds == sorted(bounds) and bounds[-1] < 0.75  # (2 + 4) / 8 of activations and buffers, at most


def _played(ops, slowdown=None):
    """Plays ops, given by name as (lane, seconds, names of the ops it waits for), in the order of issue."""
    numbers = dict(zip(ops, count(), strict=False))
    schedule = Schedule(
        "figure 8",
        tuple(
            Op(Kind.COMPUTE, lane, size=seconds, waits_for=tuple(numbers[name] for name in waits_for))
            for lane, seconds, waits_for in ops.values()
        ),
    )
    return simulate(schedule, lambda op: op.size, slowdown).seconds


def _pipeline(n, send, compute, receive, transfer=None, lane=None):
    """Returns the graphs of Fig. 8: S -> C -> R of each partition; M after S and C, or before C. S and R in turn."""
    ops = {}

    def add(name, lane, seconds, *waits_for):
        ops[name] = lane, seconds, [other for other in waits_for if other in ops]

    if lane is Lane.H2D:
        for i in range(n):
            add(f"M{i}", lane, transfer)
    for i in range(n + 1):
        if i < n:
            add(f"S{i}", Lane.INTER, send)
            add(f"C{i}", Lane.COMPUTE, compute, f"S{i}", f"M{i}")
            if lane is Lane.D2H:
                add(f"M{i}", lane, transfer, f"C{i}")
        if i:
            add(f"R{i - 1}", Lane.INTER, receive, f"C{i - 1}")
    return ops


def _in_phases(phases):
    """Returns ops in which every lane's work of a phase comes after all of the phase before."""
    ops = {}
    before = []
    for number, phase in enumerate(phases):
        names = [f"{lane.value} {number}" for lane in phase]
        ops |= {name: (lane, phase[lane], before) for name, lane in zip(names, phase, strict=True)}
        before = names
    return ops


@given(partitions, seconds, seconds, seconds)
def test_paradigm_1_is_what_the_simulator_plays(n, send, compute, receive):
    """Exactly, by the graph of Fig. 8 alone: both lanes end every phase together or wait for the other."""
    played = _played(_pipeline(n, send, compute, receive))
    assert paradigm_seconds(paradigm_1(n, send, compute, receive)) == pytest.approx(played)


@given(partitions, seconds, seconds, seconds, seconds)
def test_paradigms_2_and_3_are_what_the_simulator_plays_in_phases(n, send, compute, receive, transfer):
    for paradigm in (paradigm_2, paradigm_3):
        phases = paradigm(n, send, compute, receive, transfer)
        assert sum(lane in phase for phase in phases for lane in (Lane.D2H, Lane.H2D)) == n
        assert paradigm_seconds(phases) == pytest.approx(_played(_in_phases(phases)))


@given(partitions, seconds, seconds, seconds, seconds)
def test_without_phases_paradigms_2_and_3_take_no_longer(n, send, compute, receive, transfer):
    """Copies run ahead, or fall behind, by the graph alone, where nothing waits for them: the closed form is a bound.

    It is reached where copies never decide a phase.
    """
    for paradigm, lane in ((paradigm_2, Lane.D2H), (paradigm_3, Lane.H2D)):
        for of in (transfer, min(receive, send, compute, transfer)):
            bound = paradigm_seconds(paradigm(n, send, compute, receive, of))
            played = _played(_pipeline(n, send, compute, receive, of, lane))
            assert played <= bound * (1 + 1e-9)
        assert played == pytest.approx(bound)


@given(st.integers(3, 9), seconds, seconds, seconds, alphas, alphas)
def test_interference_of_a_phase(n, send, compute, receive, of_comm, of_comp):
    """The paper's formula of P2. Slowed all along, a phase takes no less than where slowdown ends with its cause."""
    slowdown = {(Lane.INTER, Lane.COMPUTE): of_comm, (Lane.COMPUTE, Lane.INTER): of_comp}
    one, more = (paradigm_seconds(paradigm_1(of, send, compute, receive), slowdown) for of in (n, n + 1))
    assert more - one == pytest.approx(max((send + receive) / of_comm, compute / of_comp))
    assert _played(_pipeline(n, send, compute, receive), slowdown) <= one * (1 + 1e-9)


@given(st.integers(2, 6), seconds, alphas, alphas, alphas)
def test_interference_of_all_lanes_at_once(n, work, comm, comp, mem):
    """Where all lanes of a phase end together, phases and simulator agree on slowdowns too."""
    lanes = Lane.INTER, Lane.COMPUTE, Lane.D2H
    slowdown = {
        (lane, *(other for other in lanes if other is not lane)): rate
        for lane, rate in zip(lanes, (comm, comp, mem), strict=True)
    }
    phases = [{lane: work * slowdown[key] for key in slowdown for lane in key[:1]} for _ in range(n)]
    assert paradigm_seconds(phases, slowdown) == pytest.approx(n * work)
    assert _played(_in_phases(phases), slowdown) == pytest.approx(n * work)
