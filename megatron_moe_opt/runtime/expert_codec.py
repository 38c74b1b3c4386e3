"""What travels of a rank's experts: all of them, or their largest differences from other ones (lossy).

Compressed experts are value-index lists of the residual codec (kernels/residual_codec.py; HybridEP, section IV-B), of
residuals from what the receivers hold of them already or, as in the paper, from a shared expert, the mean of all
experts of the expert-parallel group. Encoding and decoding need the same shared expert: it is renewed on all ranks
between the same two messages, by an all-reduce beside everything else, from the weights of the message before them.
Errors do not add up: every message starts from the owner's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import LANE_BYTES, empty, sr_decode, sr_encode, sr_wire_bytes
from megatron_moe_opt.kernels.residual_codec import BLOCK_ELEMENTS
from megatron_moe_opt.runtime.collectives import named_errors
from megatron_moe_opt.runtime.communication_lane import communication_lane
from megatron_moe_opt.runtime.traffic import count_sent

Decode = Callable[[torch.Tensor, int], torch.Tensor]
"""(messages [owners, M], place of the own one, which is not needed) -> experts [owners, numel]."""


Previous = Callable[[], torch.Tensor]
"""Gives the experts [owners, numel] of the message before."""


class WholeExperts:
    """Experts as they are."""

    is_transient = False
    """Whether decoded experts can be dropped and decoded again from a message."""

    def encode(self, flat: torch.Tensor, previous: Previous | None) -> tuple[torch.Tensor, Decode]:
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


class ResidualMessages:
    """Messages of the residuals of a rank's experts from other ones, which sender and receivers have."""

    def __init__(self, num_local: int, numel: int, dtype: torch.dtype, ratio: float) -> None:
        """
        Args:
            numel: of all `num_local` experts of a rank, which are alike.
            dtype: of values on the wire. What is encoded and what is decoded may be of float32.
        """
        self.num_local, self.dtype = num_local, dtype
        of_expert = numel // num_local
        self.kept = kept_entries(of_expert, dtype, ratio)
        self._values_end = self.kept * dtype.itemsize
        self._end = sr_wire_bytes(of_expert, self.kept, dtype)
        self._of_expert = -(-self._end // LANE_BYTES) * LANE_BYTES

    @property
    def num_bytes(self) -> int:
        """Of a message."""
        return self.num_local * self._of_expert

    def encode(
        self, experts: torch.Tensor, bases: Iterable[torch.Tensor], message: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Experts [numel] -> message, uint8 [num_bytes]; one base for each expert."""
        if message is None:
            message = empty((self.num_bytes,), torch.uint8, experts.device)
        places = message.view(self.num_local, -1)
        for expert, base, place in zip(experts.view(self.num_local, -1), bases, places, strict=True):
            values, indices = sr_encode(expert, base, self.kept)
            place[: self._values_end] = values.to(self.dtype).view(torch.uint8)
            place[self._values_end : self._end] = indices.view(torch.uint8)
            place[self._end :] = 0
        return message

    def decode(self, message: torch.Tensor, bases: Iterable[torch.Tensor], out: torch.Tensor) -> None:
        """Bases and what a message says of them: experts, out [numel]."""
        parts = zip(self.entries(message), bases, out.view(self.num_local, -1), strict=True)
        for (values, indices), base, expert in parts:
            sr_decode(values.to(base.dtype), indices, base, out=expert)

    def entries(self, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Values and indices of each expert (see kernels/residual_codec.py), in the message's memory."""
        for place in message.view(self.num_local, -1):
            yield place[: self._values_end].view(self.dtype), place[self._values_end : self._end].view(torch.uint16)


class TrackedExperts:
    """Experts as residuals from what the receivers hold of them: from the message before, which all can decode.

    What a message leaves out is part of the next one's residual: no difference is lost, it waits until it is among the
    largest. The first message, and the first after a checkpoint was loaded, has whole experts.
    """

    is_transient = False

    def __init__(self, num_local: int, ratio: float) -> None:
        """
        Args:
            num_local: experts of a rank, consecutive and alike in its flat tensor.
            ratio: bytes of an expert over bytes that travel.
        """
        self.num_local, self.ratio = num_local, ratio
        self._held: torch.Tensor | None = None  # by the receivers, of this rank's experts

    def describe(self) -> str:
        """For the line at start."""
        return f"LOSSY, compressed {self.ratio:g}-fold as residuals from the last ones"

    def restart(self) -> None:
        """Has the next message be whole. Every rank must restart."""
        self._held = None

    def encode(self, flat: torch.Tensor, previous: Previous | None) -> tuple[torch.Tensor, Decode]:
        """As WholeExperts.encode."""
        if self._held is None or previous is None:
            self._held = flat
            return flat, lambda messages, own: messages
        residuals, held = ResidualMessages(self.num_local, flat.numel(), flat.dtype, self.ratio), self._held
        message = residuals.encode(flat, held.view(self.num_local, -1))
        self._held = torch.empty_like(held)
        residuals.decode(message, held.view(self.num_local, -1), self._held)
        before = [previous]

        def decode(messages: torch.Tensor, own: int) -> torch.Tensor:
            bases = before.pop()()  # and nobody keeps them for this message's sake
            decoded = empty((messages.size(0), flat.numel()), flat.dtype, flat.device)
            for owner, (received, base, out) in enumerate(zip(messages, bases, decoded, strict=True)):
                if owner != own:
                    residuals.decode(received, base.view(self.num_local, -1), out)
            return decoded

        return message, decode


class ResidualExperts:
    """Experts as residuals from the shared expert (the paper's SR compression)."""

    is_transient = True

    def __init__(self, num_local: int, group: dist.ProcessGroup, ratio: float, interval: int) -> None:
        """
        Args:
            num_local, ratio: as in TrackedExperts.
            group: the expert-parallel ranks; used by this class alone.
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

    def restart(self) -> None:
        """Nothing is carried from one message to the next but the shared expert, which is renewed in its time."""

    def encode(self, flat: torch.Tensor, previous: Previous | None) -> tuple[torch.Tensor, Decode]:
        """As WholeExperts.encode. A collective call: all ranks of the group encode equally often."""
        residuals = ResidualMessages(self.num_local, flat.numel(), flat.dtype, self.ratio)
        shared = [self._shared_expert(flat.view(self.num_local, -1))] * self.num_local

        def decode(messages: torch.Tensor, own: int) -> torch.Tensor:
            decoded = empty((messages.size(0), flat.numel()), flat.dtype, flat.device)
            for owner, (received, out) in enumerate(zip(messages, decoded, strict=True)):
                if owner != own:
                    residuals.decode(received, shared, out)
            return decoded

        return residuals.encode(flat, shared), decode

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
