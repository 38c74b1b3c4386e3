"""What has been found out about process groups, for as long as they exist."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.nodes import NodeMap, discover_nodes

Function = TypeVar("Function", bound=Callable)


def cached_by_group(function: Function) -> Function:
    """Caches like functools.cache a function whose first argument is a ProcessGroup or ExpertGroups: what it returned
    is forgotten when nobody has the group any more, whereas functools.cache would keep destroyed groups, their threads
    and their connections. What it returns must not hold groups.
    """
    of_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def cached(groups: ProcessGroup | ExpertGroups, *arguments: Hashable) -> Any:
        known = of_groups.setdefault(groups.joint if isinstance(groups, ExpertGroups) else groups, {})
        key = tuple(map(_without_groups, (groups, *arguments)))
        if key not in known:
            known[key] = function(groups, *arguments)
        return known[key]

    cached.cache_clear = of_groups.clear
    return cached


def _without_groups(argument: Hashable) -> Hashable:
    if isinstance(argument, ProcessGroup):
        return weakref.ref(argument)
    if isinstance(argument, ExpertGroups):
        return tuple(map(_without_groups, (argument.ep, argument.etp, argument.joint)))
    return argument


@cached_by_group
def nodes_of(group: ProcessGroup) -> NodeMap:
    """Returns the nodes of a group's ranks, by their number in it. A collective call over the group, once."""
    return discover_nodes(group)
