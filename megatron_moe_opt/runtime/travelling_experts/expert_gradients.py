"""How gradients of migrated experts return to their owners: whole, or their largest entries (lossy).

They return once a step, with the last backward pass of a layer in it (step_passes.py); those of the passes before are
summed where they are, and wait there or on the host. The domain's sum is taken level by level, innermost first, the
mirror of the gather (expert_communicator.py), so that a slow outermost link carries one sum for each of its own peers,
and not one part for each rank behind it.

Compressed, a rank sends to each peer the largest entries of what it has for it, in the residual codec's format with
zero in the place of the shared expert. What does not travel is kept, and added to what it has for that peer next time
(error feedback): it waits until it is among the largest. So the sum of all that has arrived, and of what is kept, is
the sum of all gradients. At every level the sums of the level inside are encoded again, with what is kept of them:
forwarding entries as they came would take as many bytes on the slow link as there are ranks behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import empty, sr_decode
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.offload import Kept
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.travelling_experts.expert_codec import ResidualMessages


class WholeGradients:
    """Gradients of experts that travelled, returned uncompressed and summed in rank order. One object a layer."""

    is_lossy = False

    def __init__(self, on_host: bool = False) -> None:
        """
        Args:
            on_host: what is deferred, waits there.
        """
        self.on_host = on_host
        self.restart()

    @property
    def takes_memory(self) -> bool:
        """Whether what is deferred takes memory of the device while it waits."""
        return not self.on_host

    def restart(self) -> None:
        """Drops the gradients that were deferred."""
        self._deferred = Kept(self.on_host)
        """The sums that wait for the other ranks, [ranks - 1, numel]."""

    def defer(self, parts: torch.Tensor, own: int, group: dist.ProcessGroup) -> None:
        """Adds `parts` [ranks, numel] to what goes with the next ones: in float32, which takes the memory of
        (ranks - 1) * numel elements until then.

        Args:
            own: the row of this rank, which is zero.
            group: of the innermost level.
        """
        if self._deferred:
            sums = self._deferred.get()
        else:
            dtype = torch.promote_types(parts.dtype, torch.float32)
            sums = empty((parts.size(0) - 1, parts.size(1)), dtype, parts.device).zero_()
        for deferred, added in _of_others(sums, own, parts):
            deferred.add_(added)
        self._deferred.put(sums)

    def complete(self, parts: torch.Tensor, own: int, group: dist.ProcessGroup) -> tuple[list[Steps], torch.Tensor]:
        """Returns the op that adds what was deferred to `parts`, rounded to their dtype once, none where nothing was
        deferred; and where it leaves the sums. Memory for these is made in that of the lane.
        """
        if not self._deferred:
            return [], parts
        waited, self._deferred = self._deferred, Kept(self.on_host)

        def add() -> None:
            for deferred, added in _of_others(waited.get(), own, parts):
                added.copy_(deferred.add_(added))

        return [steps.call(add)], parts

    def sent_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Returns the bytes of the gradients of a rank's experts, which have `numel` elements."""
        return numel * dtype.itemsize

    def reduce(
        self, parts: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> tuple[Sequence[Steps], torch.Tensor]:
        """Returns ops that sum over a group in rank order, [ranks * N, numel] to [N, numel] of this rank, and where
        they leave the sum: a level of schedules.expert_migration.returned.

        Args:
            dtype: of gradients, which is that of what travels.
        """
        summed = empty((parts.size(0) // group.size(), parts.size(1)), parts.dtype, parts.device)
        return steps.reduce_scatter(parts, summed, group), summed

    def describe(self) -> str:
        """Returns where gradients wait, in words, for the line that is logged at start."""
        return "their gradients wait for a step's last pass on the host" if self.on_host else ""


def _of_others(sums: torch.Tensor, own: int, parts: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns rows of sums [ranks - 1, numel] with the rows of parts [ranks, numel] that belong to them."""
    return [(sums[:own], parts[:own]), (sums[own:], parts[own + 1 :])]


class CompressedGradients:
    """Gradients of which only the largest entries return to the owners, with error feedback. One object a layer."""

    is_lossy = True
    takes_memory = False
    """Whether what is deferred takes memory: it is in that of what was not sent."""

    def __init__(self, num_local: int, ratio: float, on_host: bool = False) -> None:
        """
        Args:
            num_local: experts of a rank, consecutive and alike in its flat gradient.
            ratio: bytes of a gradient over bytes that travel.
            on_host: what is kept, is kept there.
        """
        self.num_local, self.ratio, self._on_host = num_local, ratio, on_host
        self.restart()

    def restart(self) -> None:
        """Forgets what has not been sent. Ranks need not do so together."""
        self._kept: dict[dist.ProcessGroup, Kept] = {}
        """What has not been sent of each level, float32 [peers, owners, numel]."""
        self._deferred = Kept(self._on_host)
        """What waits for this rank at the innermost level, of which nothing is sent, float32 [owners, numel]."""

    def defer(self, parts: torch.Tensor, own: int, group: dist.ProcessGroup) -> None:
        """Does what WholeGradients.defer does. What is for peers waits in the memory of what was not sent to them."""
        parts = parts.view(group.size(), -1, parts.size(1))
        kept = self._kept_of(group)
        of_group = kept.get() if kept else _nothing_kept(group, parts)
        for of_peer, peer in zip(of_group, _peers(group), strict=True):
            of_peer.add_(parts[peer])
        kept.put(of_group)
        if parts.size(1) > 1:  # more owners than this rank
            mine = parts[group.rank()].float()
            self._deferred.put(mine.add_(self._deferred.get()) if self._deferred else mine)

    def complete(self, parts: torch.Tensor, own: int, group: dist.ProcessGroup) -> tuple[list[Steps], torch.Tensor]:
        """Does what WholeGradients.complete does for this rank's deferred part of the
        innermost level; sums in float32.
        """
        if not self._deferred:
            return [], parts
        waited, self._deferred = self._deferred, Kept(self._on_host)
        sums = empty(parts.shape, torch.float32, parts.device)

        def add() -> None:
            sums.copy_(parts)
            deferred = waited.get()
            sums.view(-1, *deferred.shape)[group.rank()] += deferred

        return [steps.call(add)], sums

    def _kept_of(self, group: dist.ProcessGroup) -> Kept:
        return self._kept.setdefault(group, Kept(self._on_host))

    def describe(self) -> str:
        """Returns how gradients travel, in words, for the line that is logged at start."""
        return f"their gradients LOSSY, compressed {self.ratio:g}-fold, the rest sent later"

    def messages(self, numel: int, dtype: torch.dtype) -> ResidualMessages:
        """Returns the messages of gradients of `numel` elements."""
        return ResidualMessages(self.num_local, numel, dtype, self.ratio)

    def sent_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a message with the largest entries of `numel` elements."""
        return self.messages(numel, dtype).num_bytes

    def reduce(
        self, parts: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> tuple[Sequence[Steps], torch.Tensor]:
        """Does what WholeGradients.reduce does, in float32. What this rank has for itself stays whole."""
        size, rank, numel = group.size(), group.rank(), parts.size(1)
        messages = self.messages(numel, dtype)
        parts = parts.view(size, -1, numel)
        owners = parts.size(1)  # of this level's sums, on each of its ranks
        sent, received = (empty((size - 1, owners * messages.num_bytes), torch.uint8, parts.device) for _ in range(2))
        sums = empty((owners, numel), torch.float32, parts.device)

        def encode_parts() -> None:
            of_level = self._kept_of(group)
            of_group = of_level.get() if of_level else _nothing_kept(group, parts)
            for peer, kept, message in zip(_peers(group), of_group, sent.view(size - 1, owners, -1), strict=True):
                for of_owner in zip(parts[peer], kept, message, strict=True):
                    encode(messages, *of_owner)
            of_level.put(of_group)

        def sum_parts() -> None:
            for owner, total in enumerate(sums):
                of_ranks = [*received.view(size - 1, owners, -1)[:, owner]]
                of_ranks.insert(rank, parts[rank, owner])
                sum_messages(messages, of_ranks, rank, total)

        blocks = steps.blocks_of([int(peer != rank) for peer in range(size)])
        exchange = steps.exchange(sent, blocks, received, blocks, group, "reduce_scatter")
        return (steps.call(encode_parts), exchange, steps.call(sum_parts)), sums


def _nothing_kept(group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
    """Returns zeros for each peer and owner, of the size of parts [ranks, owners, numel]: nothing was kept."""
    return torch.zeros(group.size() - 1, *parts.shape[1:], dtype=torch.float32, device=parts.device)


def _peers(group: dist.ProcessGroup) -> list[int]:
    return [peer for peer in range(group.size()) if peer != group.rank()]


def encode(messages: ResidualMessages, gradient: torch.Tensor, kept: torch.Tensor, message: torch.Tensor) -> None:
    """Writes the largest entries of gradient + kept into `message`, and leaves the rest in `kept`.

    An expert whose entries are not all finite leaves nothing: the receiver, and so the whole step, hears of it, and the
    next step begins anew. Entries that are not finite are the largest of all, and always sent.

    Args:
        gradient: [numel] of all experts of an owner, any floating dtype.
        kept: float32 [numel], before and afterwards; the rounding of what is sent is in it too.
        message: uint8 [messages.num_bytes].
    """
    zeros = kept.new_zeros(kept.numel() // messages.num_local)
    of_experts = (kept.view(messages.num_local, -1), gradient.view(messages.num_local, -1), messages.places(message))
    for left, added, place in zip(*of_experts, strict=True):  # each once, while it is in a processor's cache
        left += added
        messages.encode_expert(left, zeros, place)
        values, indices = messages.entries(place)
        sr_decode(-values.float(), indices, left)
        is_finite = values.isfinite().all()
        if has_streams(left.device):
            left.masked_fill_(~is_finite, 0)  # the host does not wait for what it is
        elif not is_finite:
            left.zero_()


def sum_messages(messages: ResidualMessages, of_ranks: list[torch.Tensor], rank: int, total: torch.Tensor) -> None:
    """Writes the sum in rank order to `total`.

    Args:
        of_ranks: a message of each rank; of `rank`, the gradient itself, of any floating dtype.
        total: float32 [numel].
    """
    decoded = total.new_empty(total.numel() // messages.num_local)
    experts = zip(total.view(messages.num_local, -1), of_ranks[rank].view(messages.num_local, -1), strict=True)
    for number, (expert, own) in enumerate(experts):
        for source, part in enumerate(of_ranks):
            added = own
            if source != rank:
                added = decoded.zero_()
                messages.decode_expert(messages.places(part)[number], decoded)
            # Not decoded on top: that takes what is not finite for something to replace, see residual_codec.
            if source == 0:
                expert.copy_(added)
            else:
                expert += added
