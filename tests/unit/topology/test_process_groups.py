"""What a group that refines another takes over from it, by playing NCCL; and that no other code makes groups."""

from __future__ import annotations

import re
import types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import megatron_moe_opt
from megatron_moe_opt.topology import process_groups


class PlayedNccl:
    """Stands in for ProcessGroupNCCL."""

    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream, self.config, self._timeout = False, "NCCL's own", timedelta(minutes=10)
            self.global_ranks_in_group = [0]

    def __init__(self) -> None:
        self.options = self.Options()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout


class PlayedNccl2:
    """Stands in for what is behind "nccl" from PyTorch 2.15 on: another class, with the same options."""

    def __init__(self) -> None:
        self.options = PlayedNccl.Options()

    def set_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout


class Group:
    """Stands in for a group of GPUs."""

    bound_device_id = torch.device("cuda", 3)

    def __init__(self, backend: object) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> object:
        return self.backend if device.type == "cuda" else None


@pytest.mark.parametrize("kind", [PlayedNccl, PlayedNccl2])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_nccl_groups_take_over_priority_configuration_and_timeout(monkeypatch, kind: type, is_wrapped: bool):
    """Also under TORCH_DISTRIBUTED_DEBUG=DETAIL, which wraps them."""
    backend = kind()
    backend.options.is_high_priority_stream, backend.options.config = True, "at most 16 CTAs"
    backend.options._timeout, backend.options.global_ranks_in_group = timedelta(seconds=7), [0, 2, 4, 6]
    asked = {}
    world = types.SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    of_group = types.SimpleNamespace(wrapped_pg=backend) if is_wrapped else backend
    group = Group(of_group)

    def new_group(ranks: list[int], **arguments: object) -> object:
        assert world.bound_device_id is None
        distributed_c10d._world.group_count += 1  # as PyTorch does since 2.14
        asked.update(arguments, ranks=ranks)
        return PlayedNccl()

    played = {
        "ProcessGroupNCCL": PlayedNccl,
        "ProcessGroupNCCL2": PlayedNccl2,
        "is_nccl_available": lambda: True,
        "get_backend": lambda _: "nccl",
        "get_global_rank": lambda _, member: 2 * member,
        "new_group": new_group,
        "group": types.SimpleNamespace(WORLD=world),
    }
    for name, value in played.items():
        monkeypatch.setattr(dist, name, value, raising=False)
    count = distributed_c10d._world.group_count
    process_groups.refine(group, [3, 1], "a pair")
    assert distributed_c10d._world.group_count == count  # or ranks that have made fewer name the next group otherwise
    options = asked.pop("pg_options")
    bound = asked.pop("device_id", None)  # which would connect the other class's group at once
    assert bound == (group.bound_device_id if kind is PlayedNccl2 else None)
    assert asked == {
        "ranks": [2, 6],
        "timeout": timedelta(seconds=7),
        "backend": "nccl",
        "use_local_synchronization": True,
        "group_desc": "a pair",
    }
    assert options is not backend.options and options.global_ranks_in_group == [0]
    assert (options.is_high_priority_stream, options.config) == (True, "at most 16 CTAs")
    assert options._timeout == timedelta(seconds=7)
    assert world.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize("kind", [PlayedNccl, PlayedNccl2])
def test_a_group_follows_the_timeout_of_the_one_it_refines(monkeypatch, kind: type):
    refined, group, destroyed = (Group(kind()) for _ in range(3))
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(process_groups, "_refined", {refined: group, destroyed: group})
    monkeypatch.setattr(distributed_c10d, "_pg_map", {refined: None, group: None})
    group.backend.options._timeout = timedelta(seconds=7)
    process_groups.follow_timeouts()
    assert refined.backend.options._timeout == timedelta(seconds=7)
    assert destroyed.backend.options._timeout == timedelta(minutes=10)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a PyTorch without NCCL")
def test_nccls_classes_have_what_is_called_of_them():
    for kind in filter(None, (dist.ProcessGroupNCCL, getattr(dist, "ProcessGroupNCCL2", None))):
        assert hasattr(kind, "options")
        assert hasattr(kind, "_set_default_timeout") or hasattr(kind, "set_timeout")


def test_no_other_code_makes_process_groups():
    root = Path(megatron_moe_opt.__file__).parent
    makes = re.compile(r"\b(new_group|split_group|new_subgroups\w*|init_device_mesh)\(")
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if makes.search(file.read_text())}
    # Of the host backend: what Megatron calls, under the name that it calls.
    assert found == {"topology/process_groups.py", "integration/host/gloo.py"}


@pytest.mark.parametrize(("world", "destroyed"), [(1, ["one"]), (2, [])])
def test_after_a_failure_no_group_is_destroyed_that_others_may_wait_in(monkeypatch, world, destroyed):
    """NCCL would wait for them, and they for what this rank has not told yet."""
    gone: list[str] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", gone.append)
    with pytest.raises(MemoryError), process_groups.temporary_groups(["one"]):
        raise MemoryError
    assert gone == destroyed
