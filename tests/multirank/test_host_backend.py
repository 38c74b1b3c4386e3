"""Megatron-Core on the host: training, its exactness across layouts, checkpoints, and failures that say what failed."""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from packaging.version import Version

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.runtime.engine.collectives import (
    CollectiveError,
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
    start_all_gather_rows,
    start_reduce_scatter_rows,
)
from tests.ranks.gpt import gpt
from tests.ranks.megatron import parallel
from tests.ranks.pool import RankFailure, RankPool

pytestmark = pytest.mark.host_only(reason="is about Megatron on a host without GPUs")

SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 64}
PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
EXPERT_BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}
RECOMPUTE_MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def train(layout, steps, **settings):
    with parallel(**layout):
        return gpt(**settings).train(steps)


# fmt: off
@pytest.mark.parametrize(("layout", "settings"), [
    ({"ep": 2},                            {"overlap": True, "bf16": True}),
    ({"tp": 2, "ep": 2},                   {**SHARED_EXPERT}),
    ({"tp": 2, "ep": 2, "etp": 2},         {**SHARED_EXPERT, "moe_shared_expert_overlap": True}),
    ({"tp": 2, "ep": 2, "etp": 2},         {"bf16": True, "distributed_optimizer": False}),
    ({"tp": 2, "etp": 2, "cp": 2},         {"moe_expert_capacity_factor": 1.0}),
    ({"pp": 2, "ep": 2},                   {"microbatches": 4, "overlap": True}),
    ({"ep": 2},                            PAD),
    ({"ep": 2},                            {"hidden_dropout": 0.1, "attention_dropout": 0.1, **EXPERT_BIAS}),
], ids=str)
# fmt: on
def test_loss_falls(ranks, layout, settings):
    losses = ranks.run(train, layout=layout, steps=4, **settings)
    assert losses == [losses[0]] * 4
    assert 4.7 < losses[0][0] < 5.0  # ln(128) = 4.85
    assert losses[0][-1] < 0.95 * losses[0][0]


def test_variants_that_change_no_sum_give_the_same_bits(ranks):
    layout = {"ep": 2, "etp": 2}
    losses = ranks.run(train, layout=layout, steps=2)
    for settings in ({"overlap": True}, RECOMPUTE_MOE, RECOMPUTE_ALL, {}):
        assert ranks.run(train, layout=layout, steps=2, **settings) == losses, settings
    whole = ranks.run(train, layout=layout, steps=2, distributed_optimizer=False)
    if Version(torch.__version__) < Version("2.7"):  # sums the norm of gradients by parameter otherwise than by shard
        losses = [pytest.approx(of_rank, rel=1e-6) for of_rank in losses]
    assert whole == losses


def gradients(layout, **settings):
    """Reduced gradients of one step on the same data, by parameter name; expert parameters of this rank."""
    with parallel(**layout):
        model = gpt(distributed_optimizer=False, same_data=True, microbatches=1, **settings)
        model.model.zero_grad_buffer()
        model.forward_backward()
        return {name: p.main_grad.clone() for name, p in model.model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"num_query_groups": 2}], ids=str)
def test_context_parallel_gradients_equal_those_of_one_rank(ranks, settings):
    alone = ranks.run(gradients, layout={}, **settings)[0]
    for split in ranks.run(gradients, layout={"cp": 2}, **settings):
        assert split.keys() == alone.keys()
        for name, gradient in alone.items():
            error = (split[name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{name}: {error}"


def save(layout, folder, **settings):
    with parallel(**layout):
        model = gpt(same_data=True, microbatches=1, **settings)
        model.train(2)
        model.save(folder)
        return model.train(2)


def load(layout, folder, **settings):
    with parallel(**layout, seed=4321):
        model = gpt(same_data=True, microbatches=1, **settings)
        model.load(folder)
        model.step = 2
        return model.train(2)


# fmt: off
@pytest.mark.parametrize("settings", [{"bf16": True}, {"distributed_optimizer": False}], ids=str)
# fmt: on
def test_checkpoint_resumes_to_the_same_losses(ranks, tmp_path, settings):
    layout = {"tp": 2, "ep": 2}
    saved = ranks.run(save, layout=layout, folder=str(tmp_path), **settings)
    assert ranks.run(load, layout=layout, folder=str(tmp_path), **settings) == saved


# Not between layouts with and without expert parallelism: Megatron gives one of them two optimizers, the other one.
# fmt: off
@pytest.mark.parametrize(("saved", "layouts"), [
    ({"tp": 2, "ep": 2}, [{"ep": 4}, {"pp": 2, "cp": 2, "ep": 2}, {"etp": 2, "ep": 2}]),
    ({},                 [{"pp": 2, "tp": 2, "etp": 2}, {"cp": 2}]),
], ids=str)
# fmt: on
def test_every_layout_continues_a_checkpoint_alike(ranks, tmp_path, saved, layouts):
    settings = {"optimizer_format": "fully_reshardable", "moe_aux_loss_coeff": 0.0}
    losses = ranks.run(save, layout=saved, folder=str(tmp_path), **settings)
    for layout in layouts:
        continued = ranks.run(load, layout=layout, folder=str(tmp_path), **settings)
        assert torch.allclose(torch.tensor(continued), torch.tensor(losses), rtol=1e-5, atol=0), layout


COUNTS = [3, 0, 5, 1]


def uneven_collectives(dtype):
    """Every rows function on unequal counts, one of them zero, next to what it should give."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    everyone = torch.randn(4, sum(COUNTS), 2, 3).to(dtype)  # the rows of all ranks, known to each
    mine = everyone[rank]
    own_rows = mine.split(COUNTS)[rank]

    total = everyone[0].float()
    for other in everyone[1:]:
        total = total + other
    total = total.to(dtype)
    gathered = start_all_gather_rows(own_rows, COUNTS, group).wait()
    reduced = start_reduce_scatter_rows(mine, COUNTS, group).wait()
    received = all_to_all_rows(mine, [COUNTS[rank]] * 4, COUNTS, group)
    assert torch.equal(gathered, torch.cat([everyone[r].split(COUNTS)[r] for r in range(4)]))
    assert torch.equal(reduced, total.split(COUNTS)[rank])
    assert torch.equal(received, torch.cat([everyone[r].split(COUNTS)[rank] for r in range(4)]))

    # Stock Megatron's own calls give the same bits, equal counts included.
    assert torch.equal(gather_from_sequence_parallel_region(own_rows, group=group, output_split_sizes=COUNTS), gathered)
    stock = reduce_scatter_to_sequence_parallel_region(mine, group=group, input_split_sizes=COUNTS)
    assert torch.equal(stock, reduced)
    stock = torch.empty_like(received)
    dist.all_to_all_single(stock, mine, np.array([COUNTS[rank]] * 4), np.array(COUNTS), group=group)
    assert torch.equal(stock, received)
    even = everyone[:, :8]
    stock = torch.empty_like(even[rank])
    dist.all_to_all_single(stock, even[rank], group=group)
    assert torch.equal(stock, torch.cat([other.chunk(4)[rank] for other in even]))
    stock = reduce_scatter_to_sequence_parallel_region(even[rank], group=group)
    assert torch.equal(stock, reduce_scatter_rows(even[rank], group))
    assert torch.equal(all_gather_rows(even[rank], group), even.flatten(0, 1))
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unequal_rows(ranks, dtype):
    assert ranks.run(uneven_collectives, dtype=dtype) == [True] * 4


ROW_BYTES = 3 * 4


def issued():
    """What each of the functions on rows has issued when it waits, with the rows that each transfer moves."""
    from torch.profiler import profile, record_function

    group, rank, found = dist.group.WORLD, dist.get_rank(), []
    for start in (
        lambda: start_all_gather_rows(torch.ones(2, 3), None, group),
        lambda: start_all_gather_rows(torch.ones(1 + rank, 3), [1, 2, 3, 4], group),
        lambda: start_reduce_scatter_rows(torch.ones(8, 3), None, group),
        lambda: dist.all_to_all_single(  # stock Megatron's call
            torch.ones(4 + 4 * rank, 3), torch.ones(10, 3), [1 + rank] * 4, [1, 2, 3, 4], group, async_op=True
        ),
    ):
        with profile(record_shapes=True) as profiled:
            pending = start()
            with record_function("waits"):
                pending.wait()
        events = sorted(profiled.events(), key=lambda event: event.time_range.start)
        before = events[: [event.name for event in events].index("waits")]
        transfers = [event for event in before if event.name.startswith("gloo:")]
        found.append([(one.name, one.input_shapes[0][0] // ROW_BYTES) for one in transfers])
    return found


def test_all_transfers_of_a_collective_are_under_way_at_once_receives_first(ranks):
    """Else large messages go one direction after the other. Every rank begins with another one."""
    for rank, found in enumerate(ranks.run(issued)):
        assert [[name for name, _ in of_one] for of_one in found] == [["gloo:recv"] * 3 + ["gloo:send"] * 3] * 4
        assert [(rows - 1 - rank) % 4 for _, rows in found[1][:3]] == [3, 2, 1]
        assert [(rows - 1 - rank) % 4 for _, rows in found[3][3:]] == [1, 2, 3]


def no_rows():
    group, empty = dist.group.WORLD, torch.empty(0, 7)
    shapes = [
        all_gather_rows(empty, group).shape,
        reduce_scatter_rows(empty, group).shape,
        all_to_all_rows(empty, [0] * 4, [0] * 4, group).shape,
    ]
    return [tuple(shape) for shape in shapes]


def test_no_rows_at_all(ranks):
    assert ranks.run(no_rows) == [[(0, 7)] * 3] * 4


def outstanding_at_once():
    group = dist.group.WORLD
    pending = [start_reduce_scatter_rows(torch.full((8,), float(i)), None, group) for i in range(4)]
    average = torch.full((3,), float(dist.get_rank()))
    work = dist.all_reduce(average, dist.ReduceOp.AVG, group, async_op=True)
    scaled, part = torch.full((3,), float(dist.get_rank())), torch.empty(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5), group)
    dist.reduce_scatter_tensor(part, torch.ones(8), dist._make_nccl_premul_sum(0.25), group)
    assert scaled.tolist() == [3.0] * 3 and part.tolist() == [1.0] * 2
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        parts = [torch.empty(2), torch.empty(2)]
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.ones(8), group=group, async_op=True)
    manager.wait()
    work.wait()
    return [p.wait().tolist() for p in pending] + [average.tolist()] + [part.tolist() for part in parts]


def test_several_collectives_outstanding(ranks):
    expected = [[4.0 * i] * 2 for i in range(4)] + [[1.5] * 3, [4.0] * 2, [4.0] * 2]
    assert ranks.run(outstanding_at_once) == [expected] * 4


def received_after_the_sender_let_go():
    """Each rank sends to the next, drops the work and frees the tensor's storage, as Megatron does with an output."""
    rank = dist.get_rank()
    output = torch.full((1 << 16,), float(rank))
    dist.isend(output, (rank + 1) % 4)
    output.data = torch.empty(1)
    others = [torch.full((1 << 16,), -1.0) for _ in range(4)]  # take the memory, where it is free
    dist.barrier()
    dist.recv(others[0], (rank - 1) % 4)
    return others[0].unique().tolist()


def test_what_is_sent_is_what_the_tensor_held(ranks):
    assert ranks.run(received_after_the_sender_let_go) == [[3.0], [0.0], [1.0], [2.0]]


def given_up():
    """Rank 0 waits for a collective in which nobody else takes part, until another thread gives it up."""
    group, returned = dist.new_group(), threading.Event()
    if dist.get_rank() == 0:
        extension = load_extension()

        def give_up():
            while not returned.wait(0.01):
                extension.give_up_waits()

        thread = threading.Thread(target=give_up)
        thread.start()
        try:
            with pytest.raises(CollectiveError, match="^all_gather_rows on .* failed on rank 0: given up$"):
                all_gather_rows(torch.ones(2, 3), group)
        finally:
            returned.set()
            thread.join()
    dist.barrier()
    dist.destroy_process_group(group)


def test_what_waits_for_ranks_can_be_given_up(ranks):
    ranks.run(given_up)


def wrong_counts():
    start_reduce_scatter_rows(torch.ones(8), [1, 2, 3, 4], dist.group.WORLD)


def test_counts_that_do_not_fit_are_refused(ranks):
    with pytest.raises(RankFailure, match=r"reduce_scatter_rows: counts \[1, 2, 3, 4\] .* the 8 rows given"):
        ranks.run(wrong_counts)


def die_before(collective):
    """Rank 1 ends; rank 0 starts a collective with it."""
    group = dist.new_group([0, 1], group_desc="PAIR")
    dist.barrier(group)
    if dist.get_rank() == 1:
        os._exit(1)
    x = torch.ones(4)
    if collective == "all_to_all_rows":
        all_to_all_rows(x, [2, 2], [2, 2], group)
    elif collective == "reduce_scatter":
        dist.reduce_scatter(torch.empty(1), [torch.ones(1), torch.ones(3)], group=group, async_op=True).wait()
    elif collective == "irecv":
        dist.irecv(x, 1, group=group).wait()
    else:
        dist.all_reduce(x, group=group)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_to_all_rows", "irecv"])
def test_dead_rank_is_named(collective):
    pool = RankPool(world=2)
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(die_before, collective=collective)
    finally:
        pool.close()
    errors = {rank: (kind, message) for rank, kind, message in failure.value.errors}
    kind, message = errors[0]
    assert kind == CollectiveError.__name__
    assert re.match(rf"{collective} on group PAIR \(ranks 0, 1\) failed on rank 0: .+", message)
