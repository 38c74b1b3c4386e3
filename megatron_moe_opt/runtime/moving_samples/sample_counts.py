"""What all ranks of a layer's groups know of the samples of a pass, gathered in one collective a layer.

A rank's message is a header (samples, tokens of a sample, whether its samples are masked unlike, tokens with too many
experts to hop) and its rows by sample and expert. Ranks may have different numbers of samples, as in a last, incomplete
batch, but must send messages of one size: there is room for as many samples as any of them was seen to have. Where one
has more, the header says so to all, and they gather again, with room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_moe_opt.runtime.engine.collectives import all_gather_rows
from megatron_moe_opt.runtime.engine.host_copy import HostCopy
from megatron_moe_opt.topology.expert_groups import ExpertGroups

_HEADER = 4


@dataclass(frozen=True)
class SampleCounts:
    """The counts of all samples, on the CPU and the same on all ranks."""

    rows: torch.Tensor
    """The rows of each part of a sample for each expert, int64 [ep_size, etp_size, B, experts]. B is the most samples
    that a rank has; others have zeros behind their own.
    """
    parts: torch.Tensor
    """The tokens of each part of a sample, int64 [ep_size, etp_size, B]; 0: the rank has no such sample."""
    unlike: torch.Tensor
    """Whether a rank's samples are masked in another way than all others, bool [ep_size, etp_size]."""
    overfull: torch.Tensor
    """How many tokens of a rank have more experts than one that hops takes along, int64 [ep_size, etp_size]."""

    @property
    def differ(self) -> bool:
        """Whether ranks have different numbers of samples, or samples of different lengths."""
        return not bool((self.parts == self.parts[0, 0, 0]).all())

    @property
    def equal(self) -> bool:
        """Whether all ranks have equally many samples, equally long and masked alike, which can change places."""
        return not self.differ and not bool(self.unlike.any())


@dataclass
class Room:
    """How many samples of a rank messages have room for; shared by layers whose passes have the same samples."""

    samples: int = 0


class SampleCountsGather:
    """The counts of one layer's pass on their way to all ranks of its joint group."""

    def __init__(
        self,
        own: torch.Tensor,
        sequence: int,
        unlike: torch.Tensor | bool | None,
        overfull: torch.Tensor | None,
        groups: ExpertGroups,
        room: Room,
    ) -> None:
        """Starts the collective that tells all ranks the counts.

        Args:
            own: int64 [samples, experts] rows of this rank.
            sequence: tokens of each of its samples here.
            unlike: a bool, or bool [], see SampleCounts; None: false.
            overfull: int64 [1], see SampleCounts; None: it does not matter.
        """
        self._own, self._sequence, self._unlike, self._overfull = own, sequence, unlike, overfull
        self._groups, self._room = groups, room
        self._gathered = self._gather()

    def wait(self) -> SampleCounts:
        """Blocks the host until the counts are there; a collective call over the joint group where room was lacking."""
        # host synchronisation: for the counts
        gathered, room = self._gathered.wait(), self._room
        most = int(gathered[:, 0].max())
        if most > room.samples:
            room.samples = most
            gathered = self._gather().wait()  # host synchronisation: again, where more samples came than ever
        groups = self._groups
        shape = groups.ep_size, groups.etp_size
        samples, sequence, unlike, overfull = (field.view(shape) for field in gathered[:, :_HEADER].unbind(1))
        rows = gathered[:, _HEADER:].view(*shape, room.samples, -1)[:, :, :most].contiguous()
        parts = (torch.arange(most) < samples.unsqueeze(2)) * sequence.unsqueeze(2)
        return SampleCounts(rows, parts, unlike.bool(), overfull)

    def _gather(self) -> HostCopy:
        samples, experts = self._own.shape
        message = self._own.new_zeros(_HEADER + self._room.samples * experts)
        message[0].fill_(samples)
        message[1].fill_(self._sequence)
        if self._unlike is not None:
            message[2].fill_(self._unlike)
        if self._overfull is not None:
            message[3:_HEADER] = self._overfull
        if samples <= self._room.samples:
            message[_HEADER : _HEADER + self._own.numel()] = self._own.flatten()
        return HostCopy(all_gather_rows(message, self._groups.joint).view(self._groups.joint_size, -1))
