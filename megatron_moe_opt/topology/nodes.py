"""The node that each rank sits on."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class NodeMap:
    """The node of every rank of the world; the default is one rank on one node."""

    node_of: tuple[int, ...] = (0,)
    """The node of each global rank, [world size]; nodes are numbered from 0 in the order of their first rank."""

    @property
    def num_nodes(self) -> int:
        """How many different nodes the ranks are on."""
        return len(set(self.node_of))

    def same_node(self, a: int, b: int) -> bool:
        """Whether global ranks `a` and `b` sit on one node."""
        return self.node_of[a] == self.node_of[b]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Returns the global ranks on `node`, ascending."""
        return tuple(rank for rank, its_node in enumerate(self.node_of) if its_node == node)


def discover_nodes(group: dist.ProcessGroup | None = None) -> NodeMap:
    """Returns the node map of the ranks of a group (None: of all ranks of the job), the same on every one of them.

    A rank's node is named by torchrun (GROUP_RANK), else by Slurm (SLURM_NODEID), else by its host name: two torchrun
    agents on one machine count as two nodes, which is how a cluster is imitated on one machine. Costs one
    all_gather_object over them; without torch.distributed the answer is one rank on one node.
    """
    import torch.distributed as dist

    from megatron_moe_opt.topology.agreement import known_to_all

    if not dist.is_initialized():
        return NodeMap()
    return NodeMap(number_nodes(known_to_all(node_name(), group)))


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """Returns the node of each rank, from its nodes' names; numbered from 0 in the order of their first rank."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def node_name() -> str:
    """Returns the name of this rank's node, see discover_nodes."""
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if variable in os.environ:
            return f"{variable}={os.environ[variable]}"
    return socket.gethostname()
