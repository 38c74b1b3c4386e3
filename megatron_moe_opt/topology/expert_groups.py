"""The process groups one MoE layer communicates over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import RoutingError
from megatron_moe_opt.topology.agreement import known_to_all


@dataclass(frozen=True)
class ExpertGroups:
    """Expert-parallel and expert-tensor-parallel groups of this rank.

    `joint` holds the ranks of both, expert-tensor-parallel rank fastest: joint rank = ep_rank * etp_size + etp_rank.
    """

    ep: ProcessGroup
    etp: ProcessGroup | None
    """The expert-TP group; None where experts are whole."""
    joint: ProcessGroup
    replicas: ProcessGroup | None = None
    """The ranks that hold the same experts as this one, whose gradients are summed; None where there are no others."""

    @property
    def ep_size(self) -> int:
        return self.ep.size()

    @property
    def ep_rank(self) -> int:
        return self.ep.rank()

    @property
    def etp_size(self) -> int:
        return 1 if self.etp is None else self.etp.size()

    @property
    def etp_rank(self) -> int:
        return 0 if self.etp is None else self.etp.rank()

    @property
    def joint_size(self) -> int:
        return self.joint.size()


@dataclass(frozen=True)
class TokenCopies:
    """A TP group whose ranks all hold the same tokens (no sequence parallelism), and where they stand among experts."""

    group: ProcessGroup
    tp_ranks: torch.Tensor
    """The TP rank of each rank of the joint group, int64 [ep_size, etp_size]."""
    ep_ranks: tuple[int, ...]
    """The EP rank of each rank of the TP group, [tp_size]."""
    like: torch.Tensor
    """The first rank of the joint group that holds the same tokens as each, int64 [joint size]."""
    ranks: tuple[int, ...]
    """The global rank of each rank of the joint group, [joint size]."""
    inside: bool
    """Whether all ranks of the TP group are in the joint group."""
    flag: str
    """The flag by which the TP group shares out its tokens behind the router, and its value."""
    way_out: str
    """The one by which it would before."""

    @classmethod
    def of(
        cls,
        tp: ProcessGroup,
        groups: ExpertGroups,
        flag: str = "--moe-opt-parm-schedule S2",
        way_out: str = "--moe-opt-parm-schedule S1",
    ) -> TokenCopies:
        """Returns the groups of a layer. A collective call over both of them."""
        holders = dist.get_process_group_ranks(tp)
        tp_ranks, first_holders = zip(*known_to_all((tp.rank(), holders[0]), groups.joint), strict=True)
        ep_ranks = known_to_all(groups.ep_rank, tp)
        joint = dist.get_process_group_ranks(groups.joint)
        like = torch.tensor([first_holders.index(first) for first in first_holders])
        shape = groups.ep_size, groups.etp_size
        inside = set(holders) <= set(joint)
        return cls(tp, torch.tensor(tp_ranks).view(shape), tuple(ep_ranks), like, tuple(joint), inside, flag, way_out)

    def check_alike(self, counts: torch.Tensor, beyond: torch.Tensor | None) -> None:
        """Compares what ranks that hold the same tokens have for each expert.

        Args:
            counts: int64 [ep_size, etp_size, experts] on the CPU.
            beyond: int64 [tp_size, experts], the counts of the TP group, where it is not inside the joint group.

        Raises:
            RoutingError: on all ranks of the groups whose counts tell.
        """
        compared = []
        if beyond is not None:
            holders = dist.get_process_group_ranks(self.group)
            compared.append((beyond, torch.zeros(len(holders), dtype=torch.int64), holders))
        compared.append((counts.flatten(0, 1), self.like, self.ranks))
        for own, like, ranks in compared:
            others = own[like]
            if not torch.equal(own, others):
                rank, expert = (own != others).nonzero()[0].tolist()
                raise RoutingError(
                    f"{self.flag} takes all ranks of a TP group to route their tokens alike, but ranks "
                    f"{ranks[like[rank]]} and {ranks[rank]}, which hold the same tokens, have "
                    f"{int(others[rank, expert])} and {int(own[rank, expert])} of them for expert {expert}: use "
                    f"{self.way_out}, or add --sequence-parallel"
                )
