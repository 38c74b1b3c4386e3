"""The shared expert: the mean of all experts of an expert-parallel group (HybridEP, section IV-B).

All ranks need the very same bits of it, at the same messages: what owners think that others hold moves with it, and
nobody would notice a difference. So it is renewed on all ranks between the same two messages, and summed by a
reduce-scatter and an all-gather, where one rank adds up an element and the others copy it. An all-reduce sends the same
bytes, but its backends do not promise that its ranks agree on the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.schedules.expert_migration import RENEWED

QUEUE = "shared expert"
"""A queue of the shared expert's own, so that no layer's experts wait for a renewal."""


class MeanExpert:
    """The shared expert of one layer, renewed every so many messages beside everything else."""

    def __init__(self, num_local: int, group: dist.ProcessGroup, interval: int) -> None:
        """
        Args:
            num_local: experts of a rank.
            group: the expert-parallel ranks; used by shared experts alone.
            interval: messages from one renewal to the next.
        """
        self.num_local, self.group, self.interval = num_local, group, interval
        self._messages = 0
        self._mean: torch.Tensor | None = None
        self._renewed: Callable[[], torch.Tensor] | None = None

    def restart(self) -> None:
        """Has the next message be the first. Every rank must restart."""
        if self._renewed is not None:
            self._renewed()  # all ranks have begun it; before its memory serves others
        self._messages, self._mean, self._renewed = 0, None, None

    def move(self, experts: torch.Tensor) -> torch.Tensor | None:
        """Returns how far it has moved since the message before this one, of this rank's `experts` [num_local, N].

        At the first message it is the mean of the experts, waited for, and has moved there from zero. A renewal begins
        with a message, from its experts, and serves from the next one on. A collective call over the group.

        Returns:
            [N] of the experts' dtype, to which what moves with it is rounded anyway; None where it was not renewed.
        """
        before, move = self._mean, None
        if before is None:
            self._mean = move = self._renew(experts)()
        elif self._renewed is not None:
            self._mean, self._renewed = self._renewed(), None
            move = self._mean - before
        if self._messages and self._messages % self.interval == 0:
            self._renewed = self._renew(experts)
        self._messages += 1
        return None if move is None else move.to(experts.dtype)

    def _renew(self, experts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to average the experts of all ranks; what waits for the mean, float32 [N]."""
        ranks, numel, run = self.group.size(), experts.size(1), executor(experts.device)
        shares = torch.zeros(ranks, -(-numel // ranks), device=experts.device)
        total = shares.view(-1)[:numel]
        for expert in experts:  # a sum over all would convert them first: twice their bytes and more, on a CPU
            total += expert
        total /= self.num_local * ranks
        with run.memory(QUEUE):
            mean = empty((1, shares.size(1)), shares.dtype, shares.device)
            reduce = steps.reduce_scatter(shares, mean, self.group)
            gather = steps.all_gather(mean, shares, [1] * ranks, self.group)  # which live until they are waited for
        running = run.start(RENEWED.sized([shares.nbytes]), [*reduce, gather], QUEUE)

        def arrived() -> torch.Tensor:
            running.wait()
            return shares.view(-1)[:numel]

        return arrived
