"""Which of the tokens that all ranks of a TP group hold each of them sends (Parm's S2, of tokens rather than rows)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TokenShare:
    """A rank's share: of every block of tokens, the part of its TP rank. What comes back of a block is whole then, and
    in the tokens' order, as the ranks' parts lie one behind another.
    """

    group: ProcessGroup
    parts: tuple[int, ...]
    """Tokens of a rank in each block: the same on all ranks."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share [sum(parts), ...] of what all ranks hold, [ranks * sum(parts), ...]."""
        ranks, rank = self.group.size(), self.group.rank()
        blocks = whole.split([ranks * part for part in self.parts])
        return torch.cat([block.narrow(0, rank * part, part) for block, part in zip(blocks, self.parts, strict=True)])
