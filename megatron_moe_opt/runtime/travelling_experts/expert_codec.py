"""What travels of a rank's experts: all of them, or their largest differences from other ones (lossy).

Compressed experts are value-index lists of the residual codec (kernels/residual_codec.py; HybridEP, section IV-B), of
residuals from what the receivers hold of them already. The paper takes them from a shared expert, the mean of all
experts, and forgets at every message what the one before said: what experts learn apart, and is not among the largest,
never arrives. Here what has arrived stays, and the shared expert is where it begins, or whole experts are.

What a message is told from is settled where it is prepared, beside the layer's own work. It is encoded in the lane in
which it travels, and decoded in another one, when its layer's turn comes; in both a layer's messages come one after
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_moe_opt.kernels import LANE_BYTES, empty, sr_decode, sr_encode, sr_wire_bytes
from megatron_moe_opt.kernels.residual_codec import BLOCK_ELEMENTS
from megatron_moe_opt.kernels.streams import used_here
from megatron_moe_opt.runtime.engine.offload import Kept
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import Arriving
from megatron_moe_opt.runtime.travelling_experts.mean_expert import MeanExpert

Decode = Callable[[torch.Tensor, int], torch.Tensor]
"""A function that decodes messages [owners, M] to experts [owners, numel]; given the place of the own message,
too, which is not needed.
"""

Previous = Callable[[], torch.Tensor]
"""A function that returns the experts [owners, numel] of the message before, to be changed, in the lane of decoding."""


def as_they_are(messages: torch.Tensor, own: int) -> torch.Tensor:
    """Decodes messages of whole experts."""
    return messages


@dataclass(frozen=True)
class Message:
    """A rank's experts on their way: to be encoded, and the messages of all owners decoded."""

    sent: torch.Tensor
    """What travels; of compressed experts, once `write` has run."""
    write: Callable[[], None] | None = None
    """Encodes into `sent`; None: experts travel whole."""
    decode: Decode = as_they_are


class ReceivedMessages:
    """Holds the messages of all owners until they are decoded; then the experts that they say, from
    which the next messages are told.
    """

    def __init__(self, arrive: Arriving, decode: Decode, own: int, on_host: bool) -> None:
        """
        Args:
            on_host: experts are kept there; see Kept.
        """
        self._decode, self._own = decode, own
        self.arrive: Arriving | None = arrive
        """Waits for the messages, [owners, M]; None: they were decoded."""
        self.is_begun = False
        """Whether decoding them was started."""
        self._experts = Kept(on_host)

    def experts(self) -> torch.Tensor:
        """Returns the experts [owners, numel], decoded or as they are kept. To be called in the lane of decoding."""
        if self.arrive is None:
            return self._experts.get()
        experts = self._decode(self.arrive(), self._own)
        self.arrive = self._decode = None
        self._experts.put(experts)
        return experts

    def to_be_changed(self) -> torch.Tensor:
        """Returns the experts as nobody else has them, all but this rank's own: on the device passes may still use
        those that are kept.
        """
        experts = self.experts()
        if self._experts.on_host:
            return experts
        changed = empty(experts.shape, experts.dtype, experts.device)
        for kept, copy in _of_others(experts, self._own, changed):
            copy.copy_(kept)
        return changed


class WholeExperts:
    """Messages of experts that travel uncompressed, bit for bit."""

    is_lossy = begins = False

    def prepare(self, flat: torch.Tensor, previous: Previous | None) -> Message:
        """Returns a message of `flat` [numel]."""
        return Message(flat)

    def describe(self) -> str:
        """Returns how experts travel, in words, for the line that is logged at start."""
        return "whole"


def kept_entries(numel: int, dtype: torch.dtype, ratio: float) -> int:
    """Returns how many entries of an expert of `numel` elements fit in 1 / ratio of its bytes, at least one."""
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
        """How many bytes a message with all experts of a rank takes."""
        return self.num_local * self._of_expert

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns a message, uint8 [num_bytes], that says nothing yet."""
        return empty((self.num_bytes,), torch.uint8, device)

    def places(self, message: torch.Tensor) -> torch.Tensor:
        """Returns where a message says each expert, uint8 [num_local, bytes], in its memory."""
        return message.view(self.num_local, -1)

    def encode(self, experts: torch.Tensor, bases: Iterable[torch.Tensor], message: torch.Tensor) -> None:
        """Encodes experts [numel] into a message, told from one base for each expert."""
        for one in zip(experts.view(self.num_local, -1), bases, self.places(message), strict=True):
            self.encode_expert(*one)

    def encode_expert(self, expert: torch.Tensor, base: torch.Tensor, place: torch.Tensor) -> None:
        """Encodes one expert, told from its base, at its place in a message."""
        values, indices = sr_encode(expert, base, self.kept)
        place[: self._values_end] = values.to(self.dtype).view(torch.uint8)
        place[self._values_end : self._end] = indices.view(torch.uint8)
        place[self._end :] = 0

    def decode(self, message: torch.Tensor, experts: torch.Tensor) -> None:
        """Turns experts [numel], which hold what a message was told from, into what it says."""
        for one in zip(self.places(message), experts.view(self.num_local, -1), strict=True):
            self.decode_expert(*one)

    def decode_expert(self, place: torch.Tensor, expert: torch.Tensor) -> None:
        """Turns one expert into what the message at its place says."""
        values, indices = self.entries(place)
        sr_decode(values.to(expert.dtype), indices, expert)

    def entries(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values and indices of the expert at a place (see kernels/residual_codec.py), in the same memory."""
        return place[: self._values_end].view(self.dtype), place[self._values_end : self._end].view(torch.uint16)


class _Held:
    """What receivers hold of a rank's experts since the last restart; from the first message on it is the lane's."""

    def __init__(self, on_host: bool) -> None:
        self.begun, self._experts = False, Kept(on_host)

    @property
    def experts(self) -> torch.Tensor:
        """Returns the flat experts [numel], to be changed and put back; not before the first message was encoded."""
        return self._experts.get()

    @experts.setter
    def experts(self, experts: torch.Tensor) -> None:
        self._experts.put(experts)


class TrackedExperts:
    """Sends experts as residuals from what the receivers hold of them: from what has arrived so far, which all can
    decode.

    What a message leaves out is part of the next one's residual: no difference is lost, it waits until it is among the
    largest. At first, and after a checkpoint was loaded, receivers are sent whole experts. With a shared expert nothing
    whole is ever sent: they hold that one of every expert, and what they hold moves with it.
    """

    is_lossy = True

    def __init__(self, num_local: int, ratio: float, shared: MeanExpert | None = None, on_host: bool = False) -> None:
        """
        Args:
            num_local: experts of a rank, consecutive and alike in its flat tensor.
            ratio: bytes of an expert over bytes that travel.
            shared: of this layer alone; all ranks of its group encode equally often.
            on_host: what receivers hold is kept there; see Kept.
        """
        self.num_local, self.ratio, self._shared, self._on_host = num_local, ratio, shared, on_host
        self._held = _Held(on_host)

    def describe(self) -> str:
        """Returns how experts travel, in words, for the line that is logged at start."""
        how = f"LOSSY, compressed {self.ratio:g}-fold as residuals from the last ones"
        if self._shared is None:
            return how
        return f"{how}, which begin as a shared expert renewed every {self._shared.interval} message(s)"

    @property
    def begins(self) -> bool:
        """Whether the next message is as the first: on all ranks or on none."""
        return not self._held.begun

    def restart(self) -> None:
        """Has the next message be as the first. Every rank must restart before it."""
        self._held = _Held(self._on_host)  # messages that are still to be encoded know the one before
        if self._shared is not None:
            self._shared.restart()

    def prepare(self, flat: torch.Tensor, previous: Previous | None) -> Message:
        """Prepares a message as WholeExperts.prepare does; `flat` may be kept, and changed with later messages. A
        collective call with a shared expert.
        """
        held, move = self._held, None
        is_first, held.begun = not held.begun, True
        if self._shared is not None:
            move = self._shared.move(flat.view(self.num_local, -1))
        elif is_first:
            held.experts = flat
            return Message(flat)

        residuals = ResidualMessages(self.num_local, flat.numel(), flat.dtype, self.ratio)
        message, before = residuals.empty(flat.device), [previous]

        def moved_on(experts: torch.Tensor) -> torch.Tensor:
            """Returns a rank's experts [numel] after the shared expert's move: all ranks hold the same bits of them."""
            if move is not None:
                experts.view(-1, move.numel()).add_(used_here(move))
            return experts

        def encode() -> None:
            experts = moved_on(torch.zeros_like(flat) if is_first else held.experts)
            residuals.encode(flat, experts.view(self.num_local, -1), message)
            residuals.decode(message, experts)
            held.experts = experts

        def decode(messages: torch.Tensor, own: int) -> torch.Tensor:
            # Once: who kept what went before would keep all that ever went.
            experts = flat.new_zeros(messages.size(0), flat.numel()) if is_first else before.pop()()
            for message, of_owner in _of_others(messages, own, experts):
                residuals.decode(message, moved_on(of_owner))
            return experts

        return Message(message, encode, decode)


class LargestWeights:
    """Sends the largest entries of experts, with zeros in the place of the others. A message is all that is known of an
    expert.

    The paper's compression without a shared expert, with which it compares (Fig. 14).
    """

    is_lossy, begins = True, False

    def __init__(self, num_local: int, ratio: float) -> None:
        """
        Args:
            num_local, ratio: as in TrackedExperts.
        """
        self.num_local, self.ratio = num_local, ratio

    def describe(self) -> str:
        """Returns how experts travel, in words, for the line that is logged at start."""
        return f"LOSSY, compressed {self.ratio:g}-fold to the largest weights alone"

    def restart(self) -> None:
        """Does nothing: nothing is carried from one message to the next."""

    def prepare(self, flat: torch.Tensor, previous: Previous | None) -> Message:
        """Returns a message of the largest weights of `flat` [numel], the others zero."""
        residuals = ResidualMessages(self.num_local, flat.numel(), flat.dtype, self.ratio)
        message = residuals.empty(flat.device)

        def encode() -> None:
            zeros = flat.new_zeros(flat.numel() // self.num_local)
            residuals.encode(flat, [zeros] * self.num_local, message)

        def decode(messages: torch.Tensor, own: int) -> torch.Tensor:
            experts = flat.new_zeros(messages.size(0), flat.numel())
            for message, of_owner in _of_others(messages, own, experts):
                residuals.decode(message, of_owner)
            return experts

        return Message(message, encode, decode)


def _of_others(given: torch.Tensor, own: int, experts: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields what is given of each owner, such as its message [M], and its experts [numel]: but of this rank, which has
    its own.
    """
    for owner, pair in enumerate(zip(given, experts, strict=True)):
        if owner != own:
            yield pair
