"""What is known of a process group is forgotten with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from megatron_moe_opt.integration.layer import linked_blocks
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.group_cache import nodes_of

USES = {
    "nodes": nodes_of,
    "holders of samples": lambda group: linked_blocks._holders(ExpertGroups(group, None, group), group),
}


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("use", USES)
def test_caches_hold_no_destroyed_group(alone, use):
    group = dist.new_group([0])
    first = USES[use](group)
    assert USES[use](group) is first
    there, other = weakref.ref(group), dist.new_group([0])
    assert USES[use](other) is not first
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert there() is None
