"""The process groups one MoE layer communicates over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ExpertGroups:
    """Expert-parallel and expert-tensor-parallel groups of this rank.

    `joint` holds the ranks of both, expert-tensor-parallel rank fastest: joint rank = ep_rank * etp_size + etp_rank.
    """

    ep: ProcessGroup
    etp: ProcessGroup | None
    """None where experts are whole."""
    joint: ProcessGroup

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
    """int64 [ep_size, etp_size]: TP rank of each rank of the joint group."""
    ep_ranks: tuple[int, ...]
    """[tp_size] EP rank of each rank of the TP group."""

    @classmethod
    def of(cls, tp: ProcessGroup, groups: ExpertGroups) -> TokenCopies:
        """A collective call over both groups."""
        tp_ranks: list[int] = [0] * groups.joint_size
        dist.all_gather_object(tp_ranks, tp.rank(), group=groups.joint)
        ep_ranks: list[int] = [0] * tp.size()
        dist.all_gather_object(ep_ranks, groups.ep_rank, group=tp)
        return cls(tp, torch.tensor(tp_ranks).view(groups.ep_size, groups.etp_size), tuple(ep_ranks))
