"""What travels of a rank's experts: all of them, or their largest differences from a shared expert (lossy).

Compressed experts are value-index lists of the residual codec (kernels/residual_codec.py; HybridEP, section IV-B). The
shared expert is the mean of all experts of the expert-parallel group. Encoding and decoding need the same one: it is
renewed on all ranks between the same two messages, by an all-reduce beside everything else, from the weights of the
message before them. Errors do not add up: every message starts from the owner's weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import LANE_BYTES, empty, sr_decode, sr_encode, sr_wire_bytes
from megatron_moe_opt.kernels.residual_codec import BLOCK_ELEMENTS
from megatron_moe_opt.runtime.collectives import named_errors
from megatron_moe_opt.runtime.communication_lane import communication_lane
from megatron_moe_opt.runtime.traffic import count_sent

Decode = Callable[[torch.Tensor, int], torch.Tensor]
"""(messages [owners, M], place of the own one, which is not needed) -> experts [owners, numel]."""


class WholeExperts:
    """Experts as they are."""

    is_lossy = False

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, Decode]:
        """A message of `flat` [numel], and what reads such messages of all owners."""
        return flat, lambda messages, own: messages

    def describe(self) -> str:
        """For the line at start."""
        return "whole"


def kept_entries(numel: int, dtype: torch.dtype, ratio: float) -> int:
    """Entries of an expert of `numel` elements that fit in 1 / ratio of its bytes, at least one."""
    size = dtype.itemsize
    blocks = -(-numel // BLOCK_ELEMENTS)
    return min(max(int((numel * size / ratio - 4 * blocks) / (size + 2)), 1), numel)


class ResidualExperts:
    """Experts as residuals from the shared expert."""

    is_lossy = True

    def __init__(self, num_local: int, group: dist.ProcessGroup, ratio: float, interval: int) -> None:
        """
        Args:
            num_local: experts of a rank, consecutive and alike in its flat tensor.
            group: the expert-parallel ranks; used by this class alone.
            ratio: bytes of an expert over bytes that travel.
            interval: messages from one renewal of the shared expert to the next; 0: there is none, residuals are the
                weights themselves.
        """
        self.num_local, self.group, self.ratio, self.interval = num_local, group, ratio, interval
        self._messages = 0
        self._shared: torch.Tensor | None = None
        self._renewed: Callable[[], torch.Tensor] | None = None

    def describe(self) -> str:
        """For the line at start."""
        shared = f"shared expert renewed every {self.interval} messages" if self.interval else "no shared expert"
        return f"LOSSY, compressed {self.ratio:g}-fold, {shared}"

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, Decode]:
        """As WholeExperts.encode. A collective call: all ranks of the group encode equally often."""
        experts = flat.view(self.num_local, -1)
        shared = self._shared_expert(experts)
        numel = experts.size(1)
        kept = kept_entries(numel, flat.dtype, self.ratio)
        ends = kept * flat.element_size(), sr_wire_bytes(numel, kept, flat.dtype)
        message = empty((self.num_local, -(-ends[1] // LANE_BYTES) * LANE_BYTES), torch.uint8, flat.device)
        for expert, place in zip(experts, message, strict=True):
            values, indices = sr_encode(expert, shared, kept)
            place[: ends[0]] = values.view(torch.uint8)
            place[ends[0] : ends[1]] = indices.view(torch.uint8)
            place[ends[1] :] = 0

        def decode(messages: torch.Tensor, own: int) -> torch.Tensor:
            decoded = empty((messages.size(0), flat.numel()), flat.dtype, flat.device)
            for owner, (received, out) in enumerate(zip(messages, decoded, strict=True)):
                if owner == own:
                    continue
                for place, expert in zip(received.view(self.num_local, -1), out.view(self.num_local, -1), strict=True):
                    values, indices = place[: ends[0]].view(flat.dtype), place[ends[0] : ends[1]].view(torch.uint16)
                    sr_decode(values, indices, shared, out=expert)
            return decoded

        return message.view(-1), decode

    def _shared_expert(self, experts: torch.Tensor) -> torch.Tensor:
        if self.interval == 0:
            if self._shared is None:
                self._shared = torch.zeros_like(experts[0])
            return self._shared
        if self._shared is None:
            self._shared = self._renew(experts)()
        elif self._renewed is not None:
            self._shared, self._renewed = self._renewed(), None
        if self._messages % self.interval == 0 and self._messages > 0:
            self._renewed = self._renew(experts)
        self._messages += 1
        return self._shared

    def _renew(self, experts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to average the experts of all ranks; what waits for the mean."""
        mean = experts.float().sum(0) / (self.num_local * self.group.size())
        part = mean.nbytes // self.group.size()  # of a reduce-scatter and an all-gather, as traffic.py counts them
        count_sent("all_reduce", self.group, [2 * part] * self.group.size())

        def reduce() -> torch.Tensor:
            with named_errors("all_reduce of the shared expert", self.group):
                dist.all_reduce(mean, group=self.group)
            return mean.to(experts.dtype)

        return communication_lane("shared expert", experts.device).submit(reduce)
