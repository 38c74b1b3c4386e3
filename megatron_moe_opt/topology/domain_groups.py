"""The levels and process groups of one layer's expert domains."""

from __future__ import annotations

import functools
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.domains import ExpertDomains, find_levels
from megatron_moe_opt.topology.group_cache import nodes_of
from megatron_moe_opt.topology.layouts import Groups
from megatron_moe_opt.topology.process_groups import is_destroyed, refine


@dataclass(frozen=True)
class DomainGroups:
    """The groups of this rank at every level, the outermost first; None where it would be alone.

    Tokens and experts never share a group, so that experts can travel while tokens do.
    """

    ep: ProcessGroup
    """The expert-parallel group that is cut into domains."""
    domains: ExpertDomains
    rank: int
    """This rank's number in the expert-parallel group."""
    tokens: tuple[ProcessGroup | None, ...]
    """The all-to-all groups by level: rank i of a group is in domain i of the level."""
    experts: tuple[ProcessGroup | None, ...]
    """The groups in which experts are gathered and their gradients reduced, by level."""
    all_experts: ProcessGroup | None
    """All ranks of the expert-parallel group, for what concerns all experts. None where no expert travels."""
    at_end: ExitStack = field(compare=False)
    """What is done, on all ranks alike, before the groups are destroyed."""
    when_gone: ExitStack = field(compare=False)
    """What a rank does by itself then, or once the groups are gone with all groups of the job."""

    @property
    def migrates(self) -> bool:
        """Whether any expert travels: some level has domains of more than one worker."""
        return any(size > 1 for size in self.domains.sizes)


def levels_of(ep: ProcessGroup, levels: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the levels that the user named, or those that nodes make. The latter is a collective call over the group,
    once.

    Raises:
        ConfigurationError: named levels that do not make up the group, or see find_levels.
    """
    if levels is None:
        return find_levels(nodes_of(ep).node_of)
    product = functools.reduce(int.__mul__, levels)
    if product != ep.size():
        raise ConfigurationError(
            f"--moe-opt-levels {','.join(map(str, levels))} makes {product} ranks, not the "
            f"{ep.size()} of --expert-model-parallel-size: name workers whose product is {ep.size()}"
        )
    return levels


def experts_cross_nodes(groups: DomainGroups) -> bool:
    """Whether some experts travel between nodes: the same on all ranks. A collective call over `groups.ep`, once."""
    return groups.domains.experts_cross_nodes(nodes_of(groups.ep).node_of)


class _Made:
    """Groups that this rank has made, and who uses them."""

    def __init__(self, groups: DomainGroups) -> None:
        self.groups = groups
        self.users: weakref.WeakSet[object] = weakref.WeakSet()


_made: dict[tuple[ProcessGroup, ExpertDomains], _Made] = {}
"""The groups that were made; the same on all ranks of an expert-parallel group, in the same order."""


def domain_groups(ep: ProcessGroup, domains: ExpertDomains, user: object) -> DomainGroups:
    """Returns the groups of these domains; one set for all layers of a process. A collective call over `ep`.

    Args:
        user: who uses them, for as long as it lives or until leave_domain_groups. On all ranks alike.
    """
    forget_destroyed_groups()
    release_domain_groups(ep)
    if (ep, domains) not in _made:
        _made[ep, domains] = _Made(_make(ep, domains))
    _made[ep, domains].users.add(user)
    return _made[ep, domains].groups


def forget_destroyed_groups() -> None:
    """Forgets groups that were destroyed with all groups of the job, as between two trainings in one process."""
    for key in [key for key in _made if is_destroyed(key[0])]:
        _made.pop(key).groups.when_gone.close()


def leave_domain_groups(user: object) -> None:
    """Notes that a user does not use its groups any more."""
    for made in _made.values():
        made.users.discard(user)


def release_domain_groups(ep: ProcessGroup) -> None:
    """Destroys the groups within `ep` that nobody uses any more, on any rank. A collective call over `ep`.

    Layers live until Python's garbage collection finds them, on one rank earlier than on another: so groups end where
    all ranks come by anyhow, when layers are built and when trials of dispatchers end.
    """
    made = [domains for group, domains in _made if group is ep]
    if not made:
        return
    unused = [not _made[ep, domains].users for domains in made]
    for domains, nobody in zip(made, zip(*known_to_all(unused, ep), strict=True), strict=True):
        if all(nobody):
            _made.pop((ep, domains)).groups.at_end.close()


def _make(ep: ProcessGroup, domains: ExpertDomains) -> DomainGroups:
    # In the opposite order: all ranks have done, then groups are destroyed.
    at_end, when_gone = ExitStack(), ExitStack()

    def group(groups: Groups, what: str) -> ProcessGroup | None:
        """Makes this rank's group of `groups`, which hold ranks of `ep`; None where it would be alone."""
        members = next(group for group in groups if ep.rank() in group)
        if len(members) == 1:
            return None
        made = refine(ep, members, f"expert migration: {what}")
        at_end.callback(dist.destroy_process_group, made)
        return made

    # All ranks of `ep` go through the levels in the same order: nobody waits in a ring.
    levels = range(domains.levels)
    tokens = tuple(group(domains.all_to_all_groups(level), f"tokens, level {level}") for level in levels)
    experts = tuple(group(domains.gather_groups(level), f"experts, level {level}") for level in levels)
    all_experts = group((tuple(range(ep.size())),), "all experts") if any(experts) else None
    at_end.callback(dist.barrier, ep)
    at_end.callback(when_gone.close)
    return DomainGroups(ep, domains, ep.rank(), tokens, experts, all_experts, at_end, when_gone)
