"""Expert groups get high-priority NCCL streams; what Megatron hears, by playing torch.distributed."""

from __future__ import annotations

import types

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_moe_opt
from megatron_moe_opt.integration import priorities

EXPERTS = {"ep", "ep_tp", "tp_ep_mp"}


@pytest.fixture
def high_priority(monkeypatch):
    """The groups, by their role, that Megatron makes with a high priority, given arguments and the ranks' backend."""
    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register()
    asked, made = {}, {}

    def options(name, configurations):
        asked[name] = configurations.get(name, {}).get("is_high_priority_stream", False)
        return name

    def create_group(ranks=None, pg_options=None, group_desc=None, **_):
        if pg_options is not None:
            made[group_desc] = asked[pg_options]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 8)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(parallel_state, "get_nccl_options", options)
    monkeypatch.setattr(parallel_state, "create_group", create_group)

    def high_priority(*arguments, backend="cpu:gloo,cuda:nccl", nccl=True, **named):
        played = types.SimpleNamespace(
            is_nccl_available=lambda: nccl,
            group=types.SimpleNamespace(WORLD=object()),
            get_backend_config=lambda: backend,
        )
        monkeypatch.setattr(priorities, "dist", played)
        sizes = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        try:
            parallel_state.initialize_model_parallel(*arguments, create_gloo_process_groups=False, **sizes, **named)
        finally:
            parallel_state.destroy_model_parallel()
        assert "EXPERT_DATA_PARALLEL_GROUP" in made and "DATA_PARALLEL_GROUP" in made
        return {role for role, high in made.items() if high}

    return high_priority


def test_the_groups_of_a_moe_layer_come_first(high_priority):
    assert high_priority(2) == {
        "EXPERT_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    }


def test_the_users_list_is_kept_and_extended(high_priority):
    users = ["cp", "ep"]
    found = high_priority(high_priority_stream_groups=users, context_parallel_size=2)
    assert "CONTEXT_PARALLEL_GROUP" in found and "EXPERT_MODEL_PARALLEL_GROUP" in found and len(found) == 4
    assert users == ["cp", "ep"]


@pytest.mark.parametrize("settings", [{"backend": "cpu:gloo,cuda:gloo"}, {"nccl": False}], ids=["gloo", "no nccl"])
def test_nothing_changes_without_nccl(high_priority, settings):
    assert high_priority(**settings) == set()
    assert high_priority(high_priority_stream_groups=["cp"], **settings) == {"CONTEXT_PARALLEL_GROUP"}


@pytest.fixture
def stock(monkeypatch):
    """Puts a function in the place of initialize_model_parallel; returns what took its place in turn."""

    def stock(function):
        monkeypatch.setattr(parallel_state, "initialize_model_parallel", function)
        priorities.prioritize_expert_groups()
        return parallel_state.initialize_model_parallel

    monkeypatch.setattr(priorities, "_uses_nccl", lambda: True)
    return stock


def test_arguments_reach_megatron_however_they_are_given(stock):
    def initialize(tensor=1, pipeline=1, high_priority_stream_groups=None, last=None):
        return tensor, pipeline, high_priority_stream_groups, last

    wrapped = stock(initialize)
    groups = list(priorities.EXPERT_GROUPS)
    assert set(groups) == EXPERTS
    assert wrapped() == (1, 1, groups, None)
    assert wrapped(4, last=3) == (4, 1, groups, 3)
    assert wrapped(4, 2, ["ep_tp", "dp"], 5) == (4, 2, ["ep_tp", "dp", "ep", "tp_ep_mp"], 5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tensr'"):
        wrapped(tensr=4)
    priorities.prioritize_expert_groups()
    assert parallel_state.initialize_model_parallel is wrapped


def test_a_megatron_without_the_argument_is_left_alone(stock):
    def initialize(tensor=1):
        return tensor

    assert stock(initialize) is initialize
