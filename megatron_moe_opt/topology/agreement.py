"""What one rank finds out for all of a group, and what all of them know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
N = TypeVar("N", int, float)


def found_by_first(find: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Returns what `find` returns on the first rank of the group, or raises what it raises there: on all of its ranks.
    A collective call.

    Args:
        find: called on the first rank alone, with an answer that can be pickled.
    """
    found: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            found[0] = find()
        except Exception as error:  # whatever it is, the others must not wait for this rank for ever
            found[1] = error
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if found[1] is not None:
        raise found[1]
    return found[0]


def largest_of_ranks(number: N, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> N:
    """Returns the largest number that a rank of these groups has. A collective call over one after the other, so that
    ranks agree that any chain of them connects.
    """
    largest = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64, device=device)
    for group in groups:
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.item()  # host synchronisation


def known_to_all(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns what each rank of the group knows, in the order of its ranks, on all of them. A collective call.

    Args:
        own: what this rank knows; it can be pickled.
        group: None: the world.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, own, group=group)
    return of_ranks
