"""Megatron's process groups, and what training moves in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_moe_opt.integration.measuring import loads
from megatron_moe_opt.integration.measuring.loads import Rows
from megatron_moe_opt.integration.measuring.meter import Load
from megatron_moe_opt.planning.costs.bus_bandwidth import EVERY_RANK, INSIDE, ONE_RANK
from megatron_moe_opt.schedules.groups import EP, EXPERT_TP, JOINT_GROUP, TP
from megatron_moe_opt.schedules.schedule import Kind, Lane
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.nodes import NodeMap
from megatron_moe_opt.topology.process_groups import refine, temporary_groups

# What training issues in the groups of a role. EP comes last (but for experts): it gets the time that others have left.
_INTRA: tuple[tuple[str, tuple[Callable[..., Load], ...]], ...] = (
    (EXPERT_TP, (loads.reduce_scatter, loads.all_gather)),
    (TP, (loads.reduce_scatter, loads.all_gather)),
)
_INTER: tuple[tuple[str, tuple[Callable[..., Load], ...]], ...] = (
    ("dp", (loads.reduce_scatter, loads.all_gather)),
    ("cp", (loads.reduce_scatter, loads.all_gather)),
    (JOINT_GROUP, (loads.all_to_all,)),
    (EP, (loads.all_to_all,)),
)


def megatron_groups() -> dict[str, ProcessGroup]:
    """Returns Megatron's process group of this rank for each role that has more than one rank; EP's too, where EP and
    expert-TP have a joint one, which is where Parm has a choice: expert-TP, or TP to split tokens over.
    """
    groups = {
        EXPERT_TP: parallel_state.get_expert_tensor_parallel_group(),
        TP: parallel_state.get_tensor_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "cp": parallel_state.get_context_parallel_group(),
        JOINT_GROUP: parallel_state.get_expert_tensor_and_model_parallel_group(),
        EP: parallel_state.get_expert_model_parallel_group(),
    }
    if max(groups[TP].size(), groups[EXPERT_TP].size()) == 1:
        del groups[JOINT_GROUP]
    several = {role for role, group in groups.items() if group.size() > 1}
    return {role: group for role, group in groups.items() if role in several or (role == EP and JOINT_GROUP in several)}


def expert_groups(groups: Mapping[str, ProcessGroup]) -> ExpertGroups:
    """Returns those of `megatron_groups` that a MoE layer communicates over. Without a joint one EP's is it."""
    return ExpertGroups(groups[EP], groups.get(EXPERT_TP), groups.get(JOINT_GROUP, groups[EP]))


@contextmanager
def groups_of_one_rank() -> Iterator[ProcessGroupCollection]:
    """Yields Megatron's groups for a layer that a rank has by itself. A collective call over the world."""
    alone = refine(dist.group.WORLD, [dist.get_rank()], "profile")
    collection = ProcessGroupCollection()
    for role in ("tp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep"):
        setattr(collection, role, alone)
    with temporary_groups([alone]):
        yield collection


def moves_of_groups(rows: Rows, groups: Mapping[str, ProcessGroup], nodes: NodeMap) -> list[Load]:
    """Returns every move that these groups, nodes and devices have."""
    moves = [loads.copy(rows), *(loads.host_transfer(rows, kind) for kind in (Kind.OFFLOAD, Kind.PREFETCH))]
    for lane, roles, link, rings in (
        (Lane.INTRA, _INTRA, INSIDE, loads.rings_inside(nodes)),
        (Lane.INTER, _INTER, EVERY_RANK, loads.rings_between(nodes)),
    ):
        if rings:
            moves.append(loads.ring(rows, dist.group.WORLD, rings, link, lane))
        if link == EVERY_RANK and len(rings) > 1:
            moves.append(loads.ring(rows, dist.group.WORLD, rings[:1], ONE_RANK, lane))
        for role, collectives in roles:
            if role in groups and groups[role].size() > 1:
                moves += [collective(rows, groups[role], role, lane) for collective in collectives]
    return moves
