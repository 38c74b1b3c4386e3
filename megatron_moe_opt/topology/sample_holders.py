"""Which ranks hold a sample together, and which places are alike to it.

A sample lies on a TP group, or with context parallelism on a TP x CP group: each of its ranks has a part of the
sequence. It can move to any such group among the ranks that share experts (the joint group), part by part, to the rank
with the same rank in the group. Below, TP stands for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.agreement import known_to_all
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.nodes import node_name, number_nodes


@dataclass(frozen=True)
class SampleHolders:
    """The TP groups of a joint group.

    A device, to the placement of samples, is what holds whole samples and whole experts: a TP group, or where experts
    are cut into more parts than samples, the TP groups that hold one.
    """

    ranks: np.ndarray
    """Joint ranks of each TP group, [holders, tp]."""
    rank_device: np.ndarray
    """Device of each joint rank, [joint size]."""
    rank_node: np.ndarray
    """Node of each joint rank, [joint size]."""
    etp_size: int

    @classmethod
    def of(cls, tp: ProcessGroup, groups: ExpertGroups) -> SampleHolders:
        """Finds out which ranks hold a sample together. A collective call over the joint group.

        Raises:
            ConfigurationError: on all ranks, if a TP group has ranks outside the joint group.
        """
        joint = dist.get_process_group_ranks(groups.joint)
        known = known_to_all((dist.get_process_group_ranks(tp), node_name()), groups.joint)
        return cls.from_ranks(joint, *zip(*known, strict=True), groups.etp_size)

    @classmethod
    def from_ranks(
        cls, joint: list[int], tp_groups: tuple[list[int], ...], nodes: tuple[str, ...], etp_size: int
    ) -> SampleHolders:
        """Builds it from the global ranks of the joint group, and the TP group and the node of each of them."""
        place = {rank: index for index, rank in enumerate(joint)}
        holders = list(dict.fromkeys(tuple(group) for group in tp_groups))
        if any(rank not in place for group in holders for rank in group):
            raise ConfigurationError(
                f"--tensor-model-parallel-size x --context-parallel-size = {len(holders[0])} cuts each sample over "
                "ranks of which only some share experts, so that netmoe cannot move samples: let it divide EP x "
                "expert-TP, or use --moe-token-dispatcher-type monta"
            )
        ranks = np.array([[place[rank] for rank in group] for group in holders])
        device = np.arange(len(joint))
        blocks = [*ranks.tolist(), *np.arange(len(joint)).reshape(-1, etp_size).tolist()]
        for _ in range(len(joint)):  # the smallest unions of TP groups and expert-TP groups
            for block in blocks:
                device[block] = device[block].min()
        return cls(ranks, np.unique(device, return_inverse=True)[1], np.array(number_nodes(nodes)), etp_size)

    @property
    def num_devices(self) -> int:
        return int(self.rank_device.max()) + 1

    @property
    def holder_device(self) -> np.ndarray:
        """Returns the device of each TP group, [holders]."""
        return self.rank_device[self.ranks[:, 0]]

    @property
    def device_node(self) -> np.ndarray:
        """Returns the node of each device, [J], counted among those of devices; should a device lie on several, that of
        its first rank.
        """
        nodes = self.rank_node[np.unique(self.rank_device, return_index=True)[1]]
        return np.unique(nodes, return_inverse=True)[1]

    @property
    def ep_device(self) -> np.ndarray:
        """Returns the device of each EP rank's experts, [ep_size]."""
        return self.rank_device[:: self.etp_size]

    def by_position(self, parts: np.ndarray) -> np.ndarray:
        """Returns the sums over the parts of each sample: parts [joint ranks, B, ...] -> [positions, ...]."""
        sums = parts[self.ranks].sum(axis=1)
        return sums.reshape(-1, *sums.shape[2:])

    def items(self, move: np.ndarray) -> np.ndarray:
        """Returns where the parts of samples go, which lie on single ranks.

        Args:
            move: [holders * B] new position of the sample at each position; that of holder h, slot b is h * B + b.

        Returns:
            int64 [joint size * B], the same for parts; the position of joint rank r, slot b is r * B + b.
        """
        holders, tp = self.ranks.shape
        batch = len(move) // holders
        to_holder, slot = np.divmod(move.reshape(holders, batch), batch)
        items = np.empty((holders * tp, batch), np.int64)
        for part in range(tp):
            items[self.ranks[:, part]] = self.ranks[to_holder, part] * batch + slot
        return items.reshape(-1)
