"""The stream model: closed forms against the simulator on random inputs, the paper's cases, hand-computed numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tests.schedule_checks import validate
from tools.papers.formulas.hybridep import (
    Stream,
    attention_seconds,
    ffn_seconds,
    gemm_seconds,
    pre_expert_seconds,
    stream_seconds,
)

MB, GB, MS = 1e6, 1e9, 1e-3


def forward(pieces: int) -> Schedule:
    """Builds the forward pass of Fig. 5(a): the all-gather at once; tokens once what precedes the experts is done;
    experts beside both.

    Experts and the tokens that they wait for are cut into equal pieces: with infinitely many, only the first lane to be
    through with its own decides.
    """
    ops = [
        Op(Kind.ALL_GATHER, Lane.INTER, writes=("experts",), group="domain"),
        Op(Kind.PERMUTE, Lane.COMPUTE, writes=("rows",)),
        Op(Kind.ALL_TO_ALL, Lane.INTER, 0, 1, (1,), ("rows",), ("arrived",), "same offset"),
    ]
    ops += [Op(Kind.COMPUTE, Lane.COMPUTE, piece, waits_for=(1,), writes=(f"out.{piece}",)) for piece in range(pieces)]
    ops.append(Op(Kind.ALL_TO_ALL, Lane.INTER, 1, 1, (2,), ("arrived",), ("back",), "same offset"))
    return Schedule("stream", tuple(ops))


def played(stream: Stream, domain: int, pieces: int = 3) -> float:
    """What the simulator makes of the stream, its volumes counted peer by peer."""
    domains = stream.gpus // domain
    chunk = stream.data / stream.gpus  # for one GPU's experts
    seconds = {
        Kind.ALL_GATHER: sum(stream.expert for _ in range(domain - 1)) / stream.bandwidth,
        Kind.ALL_TO_ALL: sum(chunk * domain for _ in range(domains - 1)) / stream.bandwidth,
        Kind.PERMUTE: stream.pre_expert,
        Kind.COMPUTE: stream.experts / pieces,
    }
    schedule = forward(pieces)
    validate(schedule)
    return simulate(schedule, lambda op: seconds[op.kind]).seconds


def random_stream(rng: random.Random) -> tuple[Stream, list[int]]:
    """A stream whose parts take times of the same order, and the domain sizes that divide its level."""
    gpus = rng.choice([2, 3, 4, 6, 8, 12, 16, 30, 32, 64])
    bandwidth, expert = 10 ** rng.uniform(8, 11), 10 ** rng.uniform(4, 9)
    stream = Stream(
        gpus,
        data=gpus * expert * 10 ** rng.uniform(-2, 2),
        expert=expert,
        bandwidth=bandwidth,
        pre_expert=rng.choice([0, gpus * expert / bandwidth * 10 ** rng.uniform(-2, 1)]),
        experts=rng.choice([0, gpus * expert / bandwidth * 10 ** rng.uniform(-2, 1)]),
    )
    return stream, [size for size in range(1, gpus + 1) if gpus % size == 0]


def test_closed_forms_are_the_simulator_s_on_a_thousand_streams():
    rng = random.Random(7)
    seen = {"1": 0, "2.1": 0, "2.2": 0}
    for _ in range(1000):
        stream, sizes = random_stream(rng)
        times = {(stream.gpus - size) / (stream.gpus - 1): played(stream, size) for size in sizes}
        for p, seconds in times.items():
            assert stream.seconds(p) == pytest.approx(seconds, rel=1e-9)
        found = stream.optimum()
        seen[found.case] += 1
        assert 0 <= found.p <= 1 and found.seconds == stream.seconds(found.p)
        # T is convex, with its only kink at the border: nothing realisable, and nothing else, takes less.
        others = [*times.values(), *(stream.seconds(step / 50) for step in range(51)), stream.seconds(stream.border)]
        assert found.seconds <= min(others) * (1 + 1e-9)
    assert min(seen.values()) > 50


def test_the_cases_are_those_of_equations_11_and_12():
    """Their right sides, written out, on streams without expert time."""
    rng = random.Random(11)
    for _ in range(200):
        stream, _ = random_stream(rng)
        stream = replace(stream, experts=0.0)
        g, d, e, b, pe = stream.gpus, stream.data, stream.expert, stream.bandwidth, stream.pre_expert
        border = (e * (g - 1) - b * pe) / (e * (g - 1))
        for p in (step / 20 for step in range(21)):
            if p >= border:
                wanted = pe + 2 * d * (g - 1) / (g * b) * p
            else:
                wanted = p * (g - 1) * (2 * d - g * e) / (b * g) + (g - 1) * e / b
            assert stream.seconds(p) == pytest.approx(wanted, rel=1e-9)
        assert stream.border == pytest.approx(max(border, 0.0), abs=1e-12)
        case = "1" if border <= 0 else "2.1" if 2 * d < g * e else "2.2"
        assert stream.optimum().case == case


# Table IV: G 8; Lat_PE (ms), D (MB), P_E (MB), and the printed p, which is 1 - S / G.
TABLE_IV = {
    "Mix-1": (0.049, 8, 4.7, 0.75),
    "Mix-2": (0.049, 8, 2.35, 0.5),
    "AG-only-1": (0.099, 3, 0.094, 0),
    "AG-only-2": (0.099, 3, 0.047, 0),
}


@pytest.mark.parametrize(
    ("name", "case", "p"),
    [("Mix-1", "2.1", 0.809), ("Mix-2", "2.1", 0.619), ("AG-only-1", "1", 0), ("AG-only-2", "1", 0)],
)
def test_table_iv_with_its_bandwidth_in_bytes(name, case, p):
    pre_expert, data, expert, printed = TABLE_IV[name]
    stream = Stream(8, data * MB, expert * MB, 128 * GB, pre_expert * MS)
    found = stream.optimum()
    assert (found.case, round(found.p, 3)) == (case, p)
    least = min((1, 2, 4, 8), key=lambda size: stream.seconds((8 - size) / 7))
    assert 1 - least / 8 == printed


@pytest.mark.parametrize(("name", "p", "domain"), [("Mix-1", 0.976, 1), ("Mix-2", 0.952, 2)])
def test_table_iv_does_not_follow_as_it_is_printed(name, p, domain):
    pre_expert, data, expert, printed = TABLE_IV[name]
    stream = Stream(8, data * MB, expert * MB, 128 * GB / 8, pre_expert * MS)
    least = min((1, 2, 4, 8), key=lambda size: stream.seconds((8 - size) / 7))
    assert (round(stream.optimum().p, 3), least) == (p, domain) and 1 - least / 8 != printed


def test_expert_compute_hides_behind_what_there_is():
    """Eq. 7 takes all of it for hidden, even where all experts have travelled and nothing is left to hide behind."""
    assert stream_seconds(pre_expert=5, experts=3, migration=4, exchange=0) == 5 + 3
    assert stream_seconds(pre_expert=5, experts=3, migration=6, exchange=0) == 5 + 3
    assert stream_seconds(pre_expert=5, experts=3, migration=6, exchange=1) == 6 + 2
    assert stream_seconds(pre_expert=5, experts=0, migration=6, exchange=1) == 6 + 2


def test_computation_by_hand():
    """2 tokens, hidden 4, 6 middle elements, a sequence of 8, one multiply-add a second."""
    assert gemm_seconds(2, 4, 6, 0.5) == 96
    attention, ffn = attention_seconds(2, 4, 8, 1.0), ffn_seconds(2, 4, 6, False, 1.0)
    assert attention == 4 * (2 * 4 * 4) + 2 * (2 * 4 * 4)
    assert (ffn, ffn_seconds(2, 4, 6, True, 1.0)) == (2 * 2 * 4 * 6, 3 * 2 * 4 * 6)
    assert pre_expert_seconds(attention, ffn) == attention
    assert pre_expert_seconds(attention, ffn, 3) == 4 * attention + 3 * ffn


def test_nothing_to_gather_is_free():
    stream = Stream(4, data=8.0, expert=0.0, bandwidth=1.0, pre_expert=0.0)
    assert stream.optimum().case == "1" and stream.optimum().seconds == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpus": 1}, "1 GPU(s) have nothing to send: a stream needs two"),
        ({"bandwidth": 0.0}, "bandwidth 0.0 is not positive and finite"),
        ({"bandwidth": float("inf")}, "bandwidth inf is not positive and finite"),
        ({"data": -1.0}, "data -1.0 of a stream is negative or not finite"),
        ({"experts": float("nan")}, "experts nan of a stream is negative or not finite"),
    ],
)
def test_refusals(change, sentence):
    with pytest.raises(ValueError) as error:
        replace(Stream(8, 1.0, 1.0, 1.0, 1.0), **change)
    assert str(error.value) == sentence
