"""What is known of a process group is forgotten with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from megatron_moe_opt.integration.layer import netmoe_layer
from megatron_moe_opt.integration.observe import telemetry_report
from megatron_moe_opt.topology import domain_groups
from megatron_moe_opt.topology.expert_groups import ExpertGroups

USES = {
    "nodes of levels": lambda group: domain_groups._nodes(group),
    "nodes of telemetry": lambda group: telemetry_report._nodes(group),
    "holders of samples": lambda group: netmoe_layer._holders(ExpertGroups(group, None, group), group),
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
