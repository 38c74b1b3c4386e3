"""The traffic counter against hand-computed numbers: 4 ranks, ranks 0 and 1 on node 0, ranks 2 and 3 on node 1.

With an equal message to every peer, each rank has 1 peer inside its node and 2 on the other one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.runtime.engine.collectives import start_all_gather_rows, start_reduce_scatter_rows
from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
from megatron_moe_opt.runtime.observed.traffic_rows import TrafficRow
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes

NODES = NodeMap((0, 0, 1, 1))
INTRA, INTER = "intra-node", "inter-node"


def _rows(*rows):
    return tuple(sorted((TrafficRow(*row) for row in rows), key=lambda row: (row.collective, row.link)))


def _count(issue):
    """(rows of this rank, rows of all ranks) of what `issue` sends."""
    with TrafficCounter(NODES) as counter:
        issue()
    return counter.rows(), counter.reduce()


def _all_to_all_with_splits():
    rank = dist.get_rank()
    # Rows of 3 floats = 12 bytes that rank r sends to ranks 0..3; rank 2 sends nothing at all.
    rows_to = [[1, 2, 0, 4], [0, 5, 1, 0], [0, 0, 0, 0], [7, 0, 1, 3]]
    splits = rows_to[rank]
    received = [rows[rank] for rows in rows_to]
    send, receive = torch.ones(sum(splits), 3), torch.empty(sum(received), 3)
    own, total = _count(lambda: dist.all_to_all_single(receive, send, received, splits))
    expected = [
        _rows(("all_to_all", INTRA, 1, 2 * 12), ("all_to_all", INTER, 1, 4 * 12)),  # to 1; to 3 (2 is empty)
        _rows(("all_to_all", INTER, 1, 1 * 12)),  # to 2
        (),
        _rows(("all_to_all", INTRA, 1, 1 * 12), ("all_to_all", INTER, 1, 7 * 12)),  # to 2; to 0 (1 is empty)
    ]
    assert own == expected[rank], own
    assert total == _rows(("all_to_all", INTRA, 2, 3 * 12), ("all_to_all", INTER, 3, 12 * 12)), total


def _equal_messages(name):
    """8 int64 a rank = 64 bytes; a quarter is 16 bytes. Each row: (messages, bytes) intra, then inter.

    Reduce-scatters go to the process group itself: torch.distributed's are made of all-to-alls on the host.
    """
    rank = dist.get_rank()
    data, quarter, whole = torch.ones(8, dtype=torch.int64), torch.ones(2).long(), torch.empty(32).long()
    quarters = [quarter.clone() for _ in range(4)]
    root = rank == 1
    all_to_root = {0: ((1, 64), None), 1: (None, None), 2: (None, (1, 64)), 3: (None, (1, 64))}[rank]
    issue, collective, (intra, inter) = {
        "all_to_all_single": (
            lambda: dist.all_to_all_single(torch.empty_like(data), data),
            "all_to_all",
            ((1, 16), (2, 32)),
        ),
        "all_gather": (
            lambda: dist.all_gather([torch.empty_like(data) for _ in range(4)], data),
            "all_gather",
            ((1, 64), (2, 128)),
        ),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(whole, data),
            "all_gather",
            ((1, 64), (2, 128)),
        ),
        "reduce_scatter": (
            lambda: dist.group.WORLD.reduce_scatter(torch.empty_like(quarter), quarters).wait(),
            "reduce_scatter",
            ((1, 16), (2, 32)),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.group.WORLD._reduce_scatter_base(quarter, data).wait(),
            "reduce_scatter",
            ((1, 16), (2, 32)),
        ),
        # Two messages to each peer: the peer's quarter to be reduced, then this rank's reduced quarter.
        "all_reduce": (lambda: dist.all_reduce(data), "all_reduce", ((2, 32), (4, 64))),
        "all_reduce_async": (
            lambda: dist.all_reduce(data, async_op=True).wait(),
            "all_reduce",
            ((2, 32), (4, 64)),
        ),
        # 5 elements in 4 parts: 2, 1, 1, 1.
        "all_reduce_uneven": (
            lambda: dist.all_reduce(data[:5]),
            "all_reduce",
            {
                0: ((2, 8 + 16), (4, 2 * (8 + 16))),
                1: ((2, 16 + 8), (4, 2 * (8 + 8))),
                2: ((2, 8 + 8), (4, (16 + 8) + (8 + 8))),
                3: ((2, 8 + 8), (4, (16 + 8) + (8 + 8))),
            }[rank],
        ),
        "broadcast": (
            lambda: dist.broadcast(data, src=1),
            "broadcast",
            ((1, 64), (2, 128)) if root else (None, None),
        ),
        "scatter": (
            lambda: dist.scatter(quarter, quarters if root else None, src=1),
            "scatter",
            ((1, 16), (2, 32)) if root else (None, None),
        ),
        "reduce": (lambda: dist.reduce(data, dst=1), "reduce", all_to_root),
        "gather": (
            lambda: dist.gather(data, [torch.empty_like(data) for _ in range(4)] if root else None, dst=1),
            "gather",
            all_to_root,
        ),
        "barrier": (dist.barrier, "barrier", ((1, 0), (2, 0))),
        "functional_all_reduce": (
            lambda: funcol.all_reduce(data, "sum", dist.group.WORLD).sum(),
            "all_reduce",
            ((2, 32), (4, 64)),
        ),
        "functional_all_gather": (
            lambda: funcol.all_gather_tensor(data, 0, dist.group.WORLD).sum(),
            "all_gather",
            ((1, 64), (2, 128)),
        ),
        "empty_all_gather": (
            lambda: dist.all_gather([torch.empty(0) for _ in range(4)], torch.empty(0)),
            "all_gather",
            (None, None),
        ),
    }[name]
    own, _ = _count(issue)
    links = ((INTRA, intra), (INTER, inter))
    assert own == _rows(*((collective, link, *sent) for link, sent in links if sent)), own


def _subgroup():
    """Ranks are numbered inside a group; links are those of the global ranks."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    group = pairs[rank % 2]
    with TrafficCounter(NODES) as counter:
        dist.all_gather([torch.empty(5) for _ in range(2)], torch.ones(5), group=group)
        if rank in (0, 2):
            dist.broadcast(torch.ones(3), src=2, group=group)
    sent = [0, 0, 0, 0]
    sent[(rank + 2) % 4] = 20 + (12 if rank == 2 else 0)
    assert counter.bytes_to() == sent
    assert {row.link for row in counter.rows()} == {INTER}
    assert counter.reduce(group) == (
        _rows(("all_gather", INTER, 2, 40), ("broadcast", INTER, 1, 12))
        if rank in (0, 2)
        else _rows(("all_gather", INTER, 2, 40))
    )


def _send_receive():
    rank = dist.get_rank()

    def ring():
        receive = torch.empty(6, dtype=torch.bfloat16)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(6, dtype=torch.bfloat16), (rank + 1) % 4),
                dist.P2POp(dist.irecv, receive, (rank - 1) % 4),
            ]
        )
        for request in requests:
            request.wait()

    own, total = _count(ring)
    assert own == _rows(("send", INTRA if rank in (0, 2) else INTER, 1, 12)), own
    assert total == _rows(("send", INTRA, 2, 24), ("send", INTER, 2, 24))


class _Gather(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, shard):
        whole = shard.new_empty(4 * shard.numel())
        dist.all_gather_into_tensor(whole, shard)
        return whole

    @staticmethod
    def backward(ctx, grad):
        shard = grad.new_empty(grad.numel() // 4)
        dist.reduce_scatter_tensor(shard, grad.contiguous())
        return shard


def _backward(recompute):
    shard = torch.ones(8, requires_grad=True)
    gathers = 2 if recompute else 1  # forward, and again in backward where it is recomputed

    def squares(shard):
        return _Gather.apply(shard) ** 2

    def step():
        whole = checkpoint(squares, shard, use_reentrant=False) if recompute else squares(shard)
        whole.sum().backward()

    own, _ = _count(step)
    assert torch.equal(shard.grad, torch.full((8,), 8.0))
    assert own == _rows(
        ("all_gather", INTRA, gathers, gathers * 32),
        ("all_gather", INTER, gathers * 2, gathers * 64),
        ("reduce_scatter", INTRA, 1, 32),
        ("reduce_scatter", INTER, 2, 64),
    ), own


def _built_on_all_to_all():
    """What Gloo lacks, and the extension's exchange makes, has its own name."""
    rank = dist.get_rank()
    counts = [1, 0, 2, 3]  # rows of 2 floats = 8 bytes

    def issue():
        start_all_gather_rows(torch.ones(counts[rank], 2), counts, None).wait()
        start_reduce_scatter_rows(torch.ones(6, 2), counts, None).wait()

    own, _ = _count(issue)
    to_peers = {peer: 8 * counts[peer] for peer in range(4) if peer != rank and counts[peer]}
    peers = {INTRA: [rank ^ 1], INTER: [(rank + 2) % 4, (rank + 2) % 4 ^ 1]}
    expected = []
    for link in (INTRA, INTER):
        if counts[rank]:
            expected.append(("all_gather", link, len(peers[link]), len(peers[link]) * 8 * counts[rank]))
        parts = [to_peers[peer] for peer in peers[link] if peer in to_peers]
        if parts:
            expected.append(("reduce_scatter", link, len(parts), sum(parts)))
    assert own == _rows(*expected), own


def _started_beside():
    """What a schedule that was started sends is counted once, though another thread sends it."""
    from megatron_moe_opt.runtime.engine import steps
    from megatron_moe_opt.runtime.engine.executor import executor
    from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule

    def issue():
        gather = steps.all_gather(torch.ones(1, 2), torch.empty(4, 2), [1] * 4, dist.group.WORLD)
        schedule = Schedule("gather", (Op(Kind.ALL_GATHER, Lane.EXPERTS, group="world"),))
        executor().start(schedule, [gather]).wait()

    own, _ = _count(issue)
    assert own == _rows(("all_gather", INTRA, 1, 8), ("all_gather", INTER, 2, 16)), own


def _nothing_outside():
    with TrafficCounter(NODES) as counter:
        pass
    dist.all_reduce(torch.ones(4))
    assert counter.rows() == () and counter.reduce() == () and counter.bytes_to() == [0, 0, 0, 0]


def _discovered(names, expected):
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("GROUP_RANK", "SLURM_NODEID"):
            patch.delenv(variable, raising=False)
        for variable, values in names.items():
            patch.setenv(variable, values[dist.get_rank()])
        assert discover_nodes() == NodeMap(tuple(expected))


def test_all_to_all_with_splits(ranks):
    ranks.run(_all_to_all_with_splits)


@pytest.mark.parametrize(
    "name",
    [
        "all_to_all_single",
        "all_gather",
        "all_gather_into_tensor",
        pytest.param(
            "reduce_scatter",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.7", reason="Gloo has no reduce_scatter of a list before torch 2.7"
            ),
        ),
        "reduce_scatter_tensor",
        "all_reduce",
        "all_reduce_async",
        "all_reduce_uneven",
        "broadcast",
        "scatter",
        "reduce",
        "gather",
        "barrier",
        "functional_all_reduce",
        "functional_all_gather",
        "empty_all_gather",
    ],
)
def test_equal_messages(ranks, name):
    ranks.run(_equal_messages, name=name)


def test_subgroup(ranks):
    ranks.run(_subgroup)


def test_send_receive(ranks):
    ranks.run(_send_receive)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward(ranks, recompute):
    ranks.run(_backward, recompute=recompute)


@pytest.mark.host_only(reason="is about what Gloo lacks")
def test_built_on_all_to_all(ranks):
    ranks.run(_built_on_all_to_all)


@pytest.mark.host_only(reason="streams of a GPU are played on the host")
def test_started_beside(ranks):
    ranks.run(_started_beside)


def test_nothing_outside_the_context(ranks):
    ranks.run(_nothing_outside)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({}, [0, 0, 0, 0]),  # one host name
        ({"SLURM_NODEID": "7733"}, [0, 0, 1, 1]),
        ({"GROUP_RANK": "1010", "SLURM_NODEID": "0000"}, [0, 1, 0, 1]),  # torchrun's word goes first
    ],
)
def test_discover_nodes(ranks, names, expected):
    ranks.run(_discovered, names=names, expected=expected)
