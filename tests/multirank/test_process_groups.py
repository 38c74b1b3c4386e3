"""The process groups that the package makes: like the group that they refine, and gone with those who use them."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_moe_opt.options import Options
from tests.ranks.devices import rank_device
from tests.ranks.pool import RankFailure


def refined() -> None:
    from megatron.core import parallel_state

    import megatron_moe_opt
    from megatron_moe_opt.topology.process_groups import refine

    megatron_moe_opt.register()

    def timeout(group: dist.ProcessGroup) -> timedelta:
        return group._get_backend(rank_device()).options._timeout

    world = dist.group.WORLD
    ep = dist.new_group(timeout=timedelta(seconds=17), group_desc="EP")
    if dist.get_rank() < 2:  # the others make none, nor do they wait
        pair = refine(ep, [0, 1], "pair")
        assert timeout(pair) == timedelta(seconds=17)
        assert pair.group_desc == "pair" and dist.get_process_group_ranks(pair) == [0, 1]
        again = refine(ep, [1, 0], "pair")
        assert again.group_name != pair.group_name
        dist.barrier(again)
    parallel_state.update_pg_timeout(timedelta(seconds=900), ep)  # as Megatron-LM does after the first step
    if dist.get_rank() < 2:
        assert timeout(pair) == timeout(again) == timedelta(seconds=900)
        for group in (pair, again):
            dist.destroy_process_group(group)
    dist.barrier()
    # A world with a device splits the communicators of new groups off its own, which takes all ranks.
    split = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(distributed_c10d, "_get_split_source", lambda _: split.append(1))
        world.bound_device_id = torch.device("cuda", 0)
        try:
            group = refine(world, [dist.get_rank()], "alone")
            assert world.bound_device_id == torch.device("cuda", 0) and group.bound_device_id is None
        finally:
            world.bound_device_id = None
    assert not split
    dist.destroy_process_group(group)
    dist.destroy_process_group(ep)


def test_a_group_is_made_by_its_members_alone_and_like_the_one_it_refines(ranks):
    ranks.run(refined)


def number_of_groups() -> int:
    return len(distributed_c10d._world.pg_map)


def step(layer: Any) -> None:
    layer(torch.randn(8, 2, 64, requires_grad=True))[0].sum().backward()


def layers_end() -> None:
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.topology.domain_groups import release_domain_groups
    from tests.ranks.megatron import moe_config, parallel

    def build(*sizes: int) -> Any:
        options = Options(network_levels=(2, 2), domain_sizes=sizes)
        megatron_moe_opt.register(options)
        return build_layer(moe_config(moe_token_dispatcher_type="expert-migration"))

    try:
        with parallel(ep=4):
            from megatron.core import parallel_state

            ep = parallel_state.get_expert_model_parallel_group()
            gc.collect()
            release_domain_groups(ep)  # other tests'
            before = number_of_groups()
            first, second = build(2, 1), build(2, 1)
            made = number_of_groups()
            assert made > before
            step(first)
            del first
            gc.collect()
            release_domain_groups(ep)
            assert number_of_groups() == made  # the second uses them
            step(second)
            if dist.get_rank() > 0:
                del second  # on one rank it lives a little longer
            gc.collect()
            release_domain_groups(ep)
            assert number_of_groups() == made
            second = None
            gc.collect()
            third = build(1, 2)  # whose groups are others
            assert number_of_groups() == made
            step(third)
            del third
            gc.collect()
            release_domain_groups(ep)
            assert number_of_groups() == before
    finally:
        megatron_moe_opt.register()


def test_groups_are_gone_when_all_ranks_have_lost_the_layers_that_used_them(ranks):
    ranks.run(layers_end)


def waits_for_experts(seconds: int) -> None:
    """Rank 3 does not come to the pass."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config

    parallel_state.initialize_model_parallel(expert_model_parallel_size=4, distributed_timeout_minutes=seconds / 60)
    model_parallel_cuda_manual_seed(1)
    megatron_moe_opt.register(Options(domain_sizes=(4,)))
    layer = build_layer(moe_config(moe_token_dispatcher_type="expert-migration"))
    migrated = layer.token_dispatcher.dispatcher.migrated
    if dist.get_rank() == 3:
        return
    migrated.send()  # as ahead of a pass
    migrated.gathered()


@pytest.mark.host_only(reason="NCCL ends a process whose collective is over its time")
def test_the_timeout_of_the_run_is_that_of_travelling_experts(doomed_ranks):
    with pytest.raises(RankFailure) as caught:
        doomed_ranks.run(waits_for_experts, seconds=3, timeout_s=120)
    assert [rank for rank, *_ in caught.value.errors] == [0, 1, 2]
    for _, kind, message in caught.value.errors:
        assert kind == "LaneError" and "group expert migration: experts, level 0" in message


def two_trainings(folder: Path) -> None:
    import megatron_moe_opt
    from megatron_moe_opt.integration.auto.auto_layer import current_controller
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.optimizer_step import gradients_cleared, step_ended
    from megatron_moe_opt.topology import domain_groups
    from tests.ranks import megatron

    def layers(*names: str) -> list[Any]:
        with megatron.parallel(ep=2):
            return [build_layer(megatron.moe_config(moe_token_dispatcher_type=name)) for name in names]

    backend, rank, world = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    megatron_moe_opt.register(Options(network_levels=(2,), domain_sizes=(2,)))
    (travels,) = layers("expert-migration")
    megatron_moe_opt.register(Options(network_levels=(2,)))
    before, planned = layers("auto", "expert-migration"), current_controller()
    step(travels)
    step_ended(True)  # of an optimizer that does not know its model
    dist.destroy_process_group()
    megatron._layouts.clear()
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    gradients_cleared()  # of a model whose experts stay where they are: no groups are made for it
    after = layers("auto", "expert-migration")
    assert current_controller() is not planned
    assert [layer.layer for layer in current_controller().layers] == after[:1]
    assert {group for group, _ in domain_groups._made} == {after[1].token_dispatcher.dispatcher.groups.ep}
    del before  # whose groups are gone while it lives


def test_a_training_knows_nothing_of_groups_that_are_gone(doomed_ranks, tmp_path):
    """Its trials and its steps would wait in groups of the training before, or end in an error there."""
    doomed_ranks.run(two_trainings, folder=tmp_path)
