"""The exchange plan against a hand-computed case and against a simulated exchange."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.row_map import cut_counts
from megatron_moe_opt.runtime.rows.exchange_plan import (
    MIN_PHASE_BYTES,
    Sharing,
    plan_exchange,
    plan_partitions,
    share_out,
)

_C = load_extension()


def test_hand_computed_plan():
    # 2 expert-parallel x 2 expert-TP ranks, 4 experts: experts 0, 1 on ep rank 0 and 2, 3 on ep rank 1.
    counts = torch.tensor(
        [
            [[1, 2, 3, 4], [5, 0, 0, 1]],  # ep rank 0, etp ranks 0 and 1
            [[2, 2, 2, 2], [0, 0, 7, 0]],  # ep rank 1
        ]
    )
    plan = plan_exchange(counts, ep_rank=1, etp_rank=0)
    (chunk,) = plan.chunks
    assert chunk.send_counts == [4, 4]
    assert chunk.receive_counts == [7, 4]  # experts 2 and 3 of (ep 0, etp 0) and (ep 1, etp 0)
    assert chunk.gather_counts == [11, 8]  # etp 0: 7 + 4, etp 1: 1 + 7
    assert plan.tokens_per_expert.tolist() == [3 + 2 + 0 + 7, 4 + 2 + 1 + 0]
    assert (plan.num_sent, plan.num_gathered, plan.arrives_sorted) == (8, 19, False)
    # Arrival order: (etp 0: ep 0, ep 1), (etp 1: ep 0, ep 1), each expert 2 then expert 3.
    moved = moves(plan)
    arrival = [2] * 3 + [3] * 4 + [2] * 2 + [3] * 2 + [3] * 1 + [2] * 7
    assert sorted(moved) == list(range(19)) == sorted(moved.values())
    assert [expert for _, expert in sorted((moved[i], expert) for i, expert in enumerate(arrival))] == sorted(arrival)


def moves(plan):
    """Source row -> target row, over all chunks."""
    return {
        source + i: target + i
        for chunk in plan.chunks
        for source, target, rows in zip(*(list_.tolist() for list_ in chunk.by_expert.tensors[:3]), strict=True)
        for i in range(rows)
    }


@given(
    data=st.data(),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2, 4]),
    local=st.integers(1, 3),
    num_chunks=st.sampled_from([1, 2, 3, 8]),
)
def test_a_simulated_exchange_of_all_ranks_ends_in_expert_order(data, ep, etp, local, num_chunks):
    experts = ep * local
    flat = data.draw(st.lists(st.integers(0, 5), min_size=ep * etp * experts, max_size=ep * etp * experts))
    counts = torch.tensor(flat, dtype=torch.int64).view(ep, etp, experts)
    ranks = [(e, t) for e in range(ep) for t in range(etp)]
    plans = {rank: plan_exchange(counts, *rank, num_chunks) for rank in ranks}
    # A row is (expert, etp rank, ep rank, its number among that rank's rows for the expert): its name and its order.
    parts = {rank: cut_rows(counts, rank, num_chunks) for rank in ranks}
    arrived = {rank: [] for rank in ranks}
    for c in range(num_chunks):
        received = {}
        for e, t in ranks:
            chunk = plans[e, t].chunks[c]
            received[e, t] = [
                row for peer in range(ep) for row in block(parts[peer, t][c], plans[peer, t].chunks[c].send_counts, e)
            ]
            assert len(received[e, t]) == sum(chunk.receive_counts)
        for e, t in ranks:
            assert plans[e, t].chunks[c].gather_counts == [len(received[e, peer]) for peer in range(etp)]
            arrived[e, t] += [row for peer in range(etp) for row in received[e, peer]]
    for (e, t), plan in plans.items():
        moved = moves(plan)
        in_order = [row for _, row in sorted((moved[i], row) for i, row in enumerate(arrived[e, t]))]
        assert in_order == sorted(in_order) and len(in_order) == plan.num_gathered
        mine = counts[:, :, e * local : (e + 1) * local]
        assert plan.tokens_per_expert.tolist() == mine.sum((0, 1)).tolist()
        assert plan.num_sent == counts[e, t].sum()


def cut_rows(counts, rank, num_chunks):
    """The rows of a rank, [chunk][row], as RowMap.cut has them."""
    e, t = rank
    chunks = [[] for _ in range(num_chunks)]
    for expert, count in enumerate(counts[e, t].tolist()):
        for c in range(num_chunks):
            numbers = range(count * c // num_chunks, count * (c + 1) // num_chunks)
            chunks[c] += [(expert, t, e, number) for number in numbers]
    return chunks


def block(rows, sizes, index):
    """Block `index` of `rows`."""
    first = sum(sizes[:index])
    return rows[first : first + sizes[index]]


@given(seed=st.integers(0, 2**31), number=st.integers(1, 5), chunks=st.integers(1, 3))
def test_a_partition_is_planned_as_an_exchange_of_its_part(seed, number, chunks):
    """Whose chunks are as large as those of all rows, cut so often."""
    counts = torch.randint(0, 9, (3, 2, 6), generator=torch.Generator().manual_seed(seed))
    plans = plan_partitions(counts, 2, 1, number, num_chunks=chunks)
    assert len(plans) == number
    for parts, plan in zip(cut_counts(counts, number * chunks).split(chunks), plans, strict=True):
        assert [sum(chunk.send_counts) for chunk in plan.chunks] == [int(part[2, 1].sum()) for part in parts]
        assert plan.tokens_per_expert.tolist() == parts[..., 4:].sum((0, 1, 2)).tolist()
        moved = moves(plan)
        assert sorted(moved) == list(range(plan.num_gathered)) == sorted(moved.values())
        if chunks > 1:
            assert [chunk.first_gathered for chunk in plan.chunks] == [
                sum(before.num_gathered for before in plan.chunks[:c]) for c in range(chunks)
            ]
            continue
        alone = plan_exchange(parts[0], 2, 1)
        assert [facts(chunk) for chunk in plan.chunks] == [facts(chunk) for chunk in alone.chunks]
        assert plan.tokens_per_expert.tolist() == alone.tokens_per_expert.tolist()


@given(seed=st.integers(0, 2**31), tp_size=st.integers(1, 5), number=st.integers(1, 4))
def test_ranks_of_a_tp_group_exchange_a_part_each(seed, tp_size, number):
    drawn = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 9, (3, 2, 6), generator=drawn)
    tp_ranks = torch.randint(0, tp_size, (3, 2), generator=drawn)
    sent, rows, total = _C.share_out(counts, tp_ranks, tp_size, number, 2, 1)
    parts = cut_counts(counts, number * tp_size)
    for partition, of_partition in enumerate(parts.split(tp_size)):
        assert sent[partition].equal(of_partition.gather(0, tp_ranks.view(1, 3, 2, 1).expand(1, 3, 2, 6))[0])
    assert rows == parts[:, 2, 1].view(-1, 3, 2).sum(2).tolist()
    assert total == counts.sum()


def test_as_many_counts_as_the_largest_layers_have_are_shared_out():
    """In four partitions, of 384 experts on as many ranks and TP 8."""
    counts = torch.ones(384, 1, 384, dtype=torch.int64)
    sent, rows, total = _C.share_out(counts, torch.arange(384)[:, None] % 8, 8, 4, 0, 0)
    assert sent.shape == (4, 384, 1, 384) and len(rows) == 32 and total == 384 * 384


def test_joint_groups_inside_a_tp_group_take_as_many_phases():
    """Three rows in four parts are 0, 1, 1 and 1: the first two TP ranks send half of what the others do."""
    counts, phases = torch.full((2, 1, 4), 3), []
    for tp_ranks in ([[0], [1]], [[2], [3]]):
        copies = SimpleNamespace(
            check_alike=lambda *_: None,
            tp_ranks=torch.tensor(tp_ranks),
            ep_ranks=(0, 1, 0, 1),
            group=SimpleNamespace(size=lambda: 4),
        )
        row_bytes = MIN_PHASE_BYTES * 2 // 3 + 1  # a mean phase has 1.5 rows
        sent, parts = share_out(counts, 0, 0, Sharing(copies, row_bytes, True))
        phases.append((int(sent.sum()), parts.num_phases))
    assert phases == [(4, 2), (8, 2)]


def facts(chunk):
    lists = [list_.tolist() for list_ in chunk.by_expert.tensors[:3]]
    told = {one.name: getattr(chunk, one.name) for one in fields(chunk)}
    return told | {"by_expert": (lists, chunk.by_expert.num_rows)}


@pytest.mark.parametrize(
    ("counts", "arguments"),
    [
        (torch.zeros(2, 1, 3, dtype=torch.int64), (0, 0, 1)),
        (torch.zeros(2, 1, 4), (0, 0, 1)),
        (torch.zeros(2, 1, 4, dtype=torch.int64), (2, 0, 1)),
        (torch.zeros(2, 1, 4, dtype=torch.int64), (0, 0, 0)),
        (torch.full((2, 1, 4), -1), (0, 0, 1)),
        (torch.full((2, 1, 4), 2**62), (0, 0, 1)),
    ],
    ids=["experts", "dtype", "rank", "chunks", "negative", "too many"],
)
def test_counts_that_make_no_plan_are_refused(counts, arguments):
    with pytest.raises(ValueError):
        plan_exchange(counts, *arguments)


@pytest.mark.parametrize(
    ("tp_ranks", "tp_size", "partitions"),
    [([[0], [2]], 2, 1), ([[0], [-1]], 2, 1), ([[0, 1]], 2, 1), ([[0], [0]], 0, 1), ([[0], [1]], 2, 0)],
    ids=["too large", "negative", "shape", "no ranks", "no partitions"],
)
def test_tp_ranks_that_share_nothing_out_are_refused(tp_ranks, tp_size, partitions):
    with pytest.raises(ValueError):
        _C.share_out(torch.ones(2, 1, 4, dtype=torch.int64), torch.tensor(tp_ranks), tp_size, partitions, 0, 0)
