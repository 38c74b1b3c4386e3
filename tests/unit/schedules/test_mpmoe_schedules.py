"""MPMoE's schedules: Fig. 4b, Table II, and what partitions that share buffers wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.schedules.hops import HopRows, HopStages
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from megatron_moe_opt.schedules.mpmoe import backward, by_rows, forward, jointly, token_shares
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, Lane, ScheduleError
from tests.schedule_checks import validate, validate_ranks

ROW = RowBytes(packed=80, token=64, middle=300, activations=500)
DIRECTIONS = {"forward": forward, "backward": backward}
REUSING = [strategy for strategy in STRATEGIES if strategy != "none"]

strategies = st.sampled_from(sorted(STRATEGIES))
number = st.integers(0, 10**6)
directions = st.sampled_from(sorted(DIRECTIONS))
sizes = st.sampled_from((1, 2, 4))
rows_on_a_way = st.one_of(
    st.tuples(
        st.one_of(
            st.builds(by_rows, sizes, sizes, sizes),
            st.builds(by_rows, sizes, sizes, st.just(1), sizes),
            st.builds(jointly, sizes),
        ),
        st.just(st.builds(PartitionRows, number, number)),
    ),
    *(
        st.tuples(
            st.builds(HopStages, st.just(levels), st.just(hops), st.just(True), sizes, sizes),
            st.just(
                st.builds(HopRows, number, st.builds(lambda one, hops=hops: dict.fromkeys(hops, one), number), number)
            ),
        )
        for levels, hops in ((1, ()), (1, (0,)), (2, (0, 1)), (2, (1,)), (3, (0, 1, 2)))
    ),
)


@given(st.data(), directions, strategies, rows_on_a_way, st.integers(1, 9))
def test_valid_and_alike_on_all_ranks(data, direction, strategy, rows_on_a_way, count):
    way, rows = rows_on_a_way
    schedule, other, longer = (
        DIRECTIONS[direction](strategy, data.draw(st.lists(rows, min_size=parts, max_size=parts)), ROW, way)
        for parts in (count, count, count + 1)
    )
    validate(schedule)
    groups = {op.group: [(0, 1)] for op in schedule.ops if op.group is not None}
    validate_ranks({0: schedule, 1: other}, groups)
    if groups:
        with pytest.raises(ScheduleError):
            validate_ranks({0: schedule, 1: longer}, groups)


def lane_of(schedule, lane):
    """Returns kinds and partitions of a lane's ops, in its order."""
    return [(op.kind, op.chunk) for op in schedule.ops if op.lane is lane]


@pytest.mark.parametrize(("way", "s", "r"), [(by_rows(2, 1), "arrived", "combined"), (jointly(2), "gathered", "parts")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sends_alternate_as_in_figure_4b(strategy, way, s, r):
    schedule = forward(strategy, [PartitionRows(8, 8)] * 4, ROW, way)
    sends = [(base_name(op.writes[0]), op.chunk) for op in schedule.ops if op.lane is Lane.INTER]
    assert sends == [(s, 0), (s, 1), (r, 0), (s, 2), (r, 1), (s, 3), (r, 2), (r, 3)]
    assert lane_of(schedule, Lane.COMPUTE) == [(Kind.COMPUTE, j) for j in range(4)]


@pytest.mark.parametrize(
    ("strategy", "offloaded", "sent_again", "recomputed"),
    [
        ("none", (), False, False),
        ("S1", ("host_tokens", "host_middle"), False, False),
        ("S2", ("host_middle",), True, False),
        ("S3", ("host_tokens",), False, True),
        ("S4", (), True, True),
    ],
)
def test_restores_as_in_table_ii(strategy, offloaded, sent_again, recomputed):
    partitions = [PartitionRows(8, 16)] * 3
    there, back = (direction(strategy, partitions, ROW, by_rows(2, 2)) for direction in (forward, backward))
    bytes_of = {"host_tokens": 16 * ROW.token, "host_middle": 16 * ROW.middle}
    out = {(base_name(op.writes[0]), op.chunk): op.size for op in there.ops if op.kind is Kind.OFFLOAD}
    fetched = {(base_name(op.reads[0]), op.chunk): op.size for op in back.ops if op.kind is Kind.PREFETCH}
    assert out == fetched == {(name, j): bytes_of[name] for name in offloaded for j in range(3)}
    sends = [op for op in back.ops if op.kind is Kind.ALL_TO_ALL]
    assert len(sends) == (9 if sent_again else 6)
    assert sum(op.kind is Kind.COMPUTE for op in back.ops) == (3 if recomputed else 0)
    ran = [
        [op.chunk for op in ops if op.kind is kind]
        for ops, kind in ((there.ops, Kind.COMPUTE), (back.ops, Kind.GRADIENT))
    ]
    assert ran == [[0, 1, 2]] * 2  # what ran first comes first again, as Transformer Engine needs it
    activated = [op.size for op in back.ops if op.kind is Kind.ACTIVATE]
    assert activated == ([16 * ROW.activations] * 3 if "host_middle" in offloaded else [])


@pytest.mark.parametrize("strategy", REUSING)
def test_partitions_share_buffers_as_in_figure_6(strategy):
    """Expert inputs and outputs have two buffers (arrived and sorted; computed and sent), T_M has one; where it is
    offloaded, two."""
    middle = {"middle.0", "middle.1"} if strategy in ("S1", "S2") else {"middle.0"}
    for count in (4, 8):
        arguments = strategy, [PartitionRows(8, 8)] * count, ROW, by_rows(2, 1)
        schedules = forward(*arguments), backward(*arguments)
        there, back = ({name for op in schedule.ops for name in op.writes} for schedule in schedules)
        on_device = {name for name in there if base_name(name) not in ("combined", "host_tokens", "host_middle")}
        assert on_device <= {"arrived.0", "tokens.0", *middle, "output.0", "unsorted.0"}
        assert {name for name in back if base_name(name) in ("middle", "activations")} - {"activations.0"} == middle


@given(
    strategies, st.integers(1, 9), st.floats(0.2, 5), st.floats(0.2, 5), st.sampled_from((by_rows(2, 1), jointly(2)))
)
def test_overlaps(strategy, count, send_seconds, compute_seconds, way):
    """Where all but sends and experts is free, the lanes are busy as the paper's Fig. 8a has them."""
    seconds = {Kind.ALL_TO_ALL: send_seconds, Kind.COMPUTE: compute_seconds}
    schedule = forward(strategy, [PartitionRows(8, 8)] * count, ROW, way)
    found = simulate(schedule, lambda op: seconds.get(op.kind, 0.0)).seconds
    busiest = max(2 * count * send_seconds, count * compute_seconds)
    assert found >= busiest - 1e-9
    # Ends apart, two sends and an expert call of neighbouring partitions are side by side.
    ends = 2 * send_seconds + compute_seconds
    assert found <= ends + max(count - 1, 0) * max(2 * send_seconds, compute_seconds) + 1e-9


@pytest.mark.parametrize("inner", [0.1, 0.5])
@pytest.mark.parametrize("way", ["hops", "expert-tp"])
def test_the_first_links_do_not_wait_for_those_inside_nodes(way, inner):
    """Where links between nodes take twice as long as experts, a forward pass takes as long as they do."""
    seconds = {Lane.INTER: 1.0, Lane.INTRA: inner, Lane.COMPUTE: 1.0}
    stages, rows = by_rows(2, 2), PartitionRows(8, 16)
    if way == "hops":
        stages, rows = HopStages(2, (0, 1), is_piped=True), HopRows(8, {0: 8, 1: 8}, 16)
    schedule = forward("none", [rows] * 8, ROW, stages)
    found = simulate(schedule, lambda op: seconds[op.lane] if op.group or op.kind is Kind.COMPUTE else 0.0)
    assert found.seconds == pytest.approx(found.busy(Lane.INTER)) == 16


@pytest.mark.parametrize("count", range(4, 9))
@pytest.mark.parametrize("build", [forward, backward])
def test_smaller_partitions_at_the_ends_wait_less(build, count):
    """Experts that take longer than links wait for the first partition's way out and the last one's way back alone."""
    shares = token_shares(count, "none")
    assert shares == shares[::-1] and sum(shares) < 4 * count
    way = HopStages(1, (0,), is_piped=True)

    def simulated(shares: list[int]) -> float:
        parts = [HopRows(share, {0: share}, share) for share in shares]
        of_op = {"tokens.0": 1.0, Kind.COMPUTE: 3.0, Kind.GRADIENT: 3.0}
        schedule = build("none", parts, RowBytes(1, 1), way)
        return simulate(schedule, lambda op: of_op.get(op.group or op.kind, 0.0) * op.size / sum(shares)).seconds

    assert simulated(shares) == pytest.approx(3 + 2 * shares[0] / sum(shares))
    assert simulated([1] * count) == pytest.approx(3 + 2 / count)


@pytest.mark.parametrize("strategy", REUSING)
def test_partitions_that_share_memory_are_equal(strategy):
    assert token_shares(8, strategy) == [4] * 8


@pytest.mark.parametrize("build", [forward, backward])
@pytest.mark.parametrize("strategy", ["none", "S3"])
def test_what_a_tp_group_gets_back_of_a_partition_comes_beside_the_next_ones(build, strategy):
    """Where experts take longest, all AllGathers but the last two are beside them, each once its own rows are there."""
    seconds = {"tokens.0": 0.5, TP: 1.0}
    way, rows = HopStages(1, (0,), is_piped=True, tp_size=2), HopRows(8, {0: 8}, 16, tp_size=2)
    schedule = build(strategy, [rows] * 4, ROW, way)
    experts = dict.fromkeys((Kind.COMPUTE, Kind.GRADIENT), 2.0)
    found = simulate(schedule, lambda op: seconds[op.group] if op.group else experts.get(op.kind, 0.0))
    assert found.busy(Lane.INTRA) == 4
    assert found.seconds <= 0.5 + found.busy(Lane.COMPUTE) + 2
    for op in schedule.ops:
        if op.group == TP:
            assert [schedule.ops[other].writes for other in op.waits_for] == [op.reads]


def test_sums_of_shards_do_not_hold_up_the_next_partition():
    """Joint all-to-alls follow each other at once: sums are beside them, of parts in a buffer for each partition."""
    seconds = {Kind.ALL_TO_ALL: 1.0, Kind.SUM: 0.5}
    schedule = forward("none", [PartitionRows(8, 16)] * 4, ROW, jointly(2))
    found = simulate(schedule, lambda op: seconds.get(op.kind, 0.0))
    assert found.seconds == found.busy(Lane.INTER) + 0.5 == 8.5
