"""The process groups that this package makes: all of them here, each of some ranks of a group that others have made.

A new group communicates as the one it refines: with its backend, its timeout and, on NCCL, its stream's priority and
its configuration (--distributed-timeout-minutes, --high-priority-stream-groups and --nccl-communicator-config-path in
Megatron-LM).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

_NCCL_SETTINGS = ("is_high_priority_stream", "config")
"""The settings of ProcessGroupNCCL.Options that a user can make, besides the timeout."""
COMMUNICATOR_BYTES = 2**30
"""The bytes of a GPU that NCCL takes for a communicator outside PyTorch's allocator: 0.5 to 2 GB were reported of its
default buffers (NVIDIA/nccl, issues 864 and 964). They grow with channels, peers and NCCL_BUFFSIZE.
"""
LET_GO_S = 0.1
"""How long a thread may take to get Python's lock where nobody holds it."""


def refine(group: ProcessGroup, members: Sequence[int], what: str) -> ProcessGroup:
    """Makes a new process group of some ranks of `group`. A collective call over these ranks, and no others.

    Ranks that make several groups make them in one order. Whoever makes a group destroys it, when all its ranks have
    done with it: a rank that destroys it while another still uses it, or is still making it, takes it from that one.

    Args:
        members: ranks of `group`; this one is among them. They are numbered in the order of their global ranks.
        what: what the group is for, in messages of errors and in traces.
    """
    ranks = sorted(dist.get_global_rank(group, member) for member in members)
    backend = _backend(group)
    # PyTorch 2.15's class binds a group to a GPU when it is made, by the rank's number where none is given.
    binds = isinstance(backend, getattr(dist, "ProcessGroupNCCL2", ()))
    bound = {"device_id": group.bound_device_id} if binds else {}
    with _made_by_members_alone(f"{what} {ranks}"):
        refined = dist.new_group(
            ranks,
            timeout=backend.options._timeout,
            backend=dist.get_backend(group),
            pg_options=_nccl_options(backend),
            use_local_synchronization=True,
            group_desc=what,
            **bound,
        )
    _refined[refined] = group
    return refined


def is_destroyed(group: ProcessGroup) -> bool:
    """Whether a process group has been destroyed, or all groups have."""
    try:
        dist.get_rank(group)
    except ValueError:
        return True
    return False


def all_let_go() -> None:
    """Waits until all ranks of the world have done with their groups, and threads of this one's hold no tensor.

    PyTorch 2.6 destroys a group while it holds Python's lock, which threads of the group need to let go of the tensors
    of its last call, if they have not: then neither goes on (seen with Gloo).
    """
    dist.barrier()
    time.sleep(LET_GO_S)


@contextmanager
def temporary_groups(groups: Iterable[ProcessGroup]) -> Iterator[None]:
    """Destroys this rank's groups after the block, when all ranks of the world have done with theirs.

    A rank that destroys a group while others make their next one can cut the connections of that one (seen with Gloo).
    After a failure none is destroyed but of a lone process: NCCL would wait for ranks that do not know of it yet.
    """
    lets_go = dist.get_world_size() == 1
    try:
        yield
        all_let_go()
        lets_go = True
    finally:
        for group in groups if lets_go else ():
            dist.destroy_process_group(group)


@contextmanager
def host_group() -> Iterator[ProcessGroup]:
    """Yields a group of the world whose objects stay in the memory of hosts, for what a GPU has no room for beside a
    model. A collective call over the world.
    """
    if dist.get_backend() == "gloo":
        yield dist.group.WORLD
        return
    timeout = _backend(dist.group.WORLD).options._timeout
    group = dist.new_group(timeout=timeout, backend="gloo", group_desc="objects on hosts")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


_refined: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""The groups that are refined, by those that refine them."""


def follow_timeouts() -> None:
    """Gives each group the timeout that the group it refines has now."""
    for refined, group in _refined.items():
        if refined in distributed_c10d._world.pg_map:  # not destroyed
            backend = _backend(refined)
            # Before PyTorch 2.15 the public name need not be there, from then on NCCL's class has no other.
            set_timeout = getattr(backend, "_set_default_timeout", None) or backend.set_timeout
            set_timeout(_backend(group).options._timeout)


def _backend(group: ProcessGroup) -> Any:
    backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    while hasattr(backend, "wrapped_pg"):  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend


def _nccl_options(backend: Any) -> Any:
    """Returns the options for a group like this one; None where it is not NCCL's.

    Its class is ProcessGroupNCCL before PyTorch 2.15, and then another, with the same options.
    """
    if not dist.is_nccl_available() or not isinstance(backend.options, dist.ProcessGroupNCCL.Options):
        return None
    options = dist.ProcessGroupNCCL.Options()
    for name in _NCCL_SETTINGS:
        if hasattr(options, name):  # NCCL before 2.17 has no configuration
            setattr(options, name, getattr(backend.options, name))
    if net_name := getattr(getattr(options, "config", None), "net_name", None):
        options.config.net_name = net_name  # a string of its own: versions of NCCL free it with the communicator
    options._timeout = backend.options._timeout
    return options


_made: Counter[str] = Counter()


@contextmanager
def _made_by_members_alone(what: str) -> Iterator[None]:
    """Has new_group inside the block ask nothing of ranks outside the new group, which are not there.

    Other expert-parallel groups, and other pipeline stages, build their layers at other times, or none.

    PyTorch puts the number of groups that a rank is in into the name of a group that only its members make. Ranks of
    different pipeline stages are in different numbers of groups, and would wait for each other under different names.
    Where init_process_group was given a device, it splits the new group's communicator off that of the whole world: a
    collective of NCCL over all ranks, for which the members would wait for ever. Without, the communicator is made by
    its own ranks: at its first use, or from PyTorch 2.15 on at once.
    Since 2.14 PyTorch counts these groups among those that all ranks make, by whose number it names the next: where
    ranks have made more of them than others, the next would have several names, and never be made.
    """
    number = _made[what]
    _made[what] += 1
    name = hashlib.sha1(f"{what} {number}".encode(), usedforsecurity=False).hexdigest()
    world, original = dist.group.WORLD, distributed_c10d._hash_ranks_to_str
    device, world.bound_device_id = world.bound_device_id, None
    count = distributed_c10d._world.group_count
    distributed_c10d._hash_ranks_to_str = lambda _: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original
        distributed_c10d._world.group_count = count
        world.bound_device_id = device
