"""The process groups one MoE layer communicates over."""

from __future__ import annotations

from dataclasses import dataclass

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
