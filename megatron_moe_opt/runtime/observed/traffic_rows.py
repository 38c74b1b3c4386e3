"""What was sent, by collective and link: plain numbers, which are read where there is no PyTorch too."""

from __future__ import annotations

from dataclasses import dataclass

INTRA_NODE = "intra-node"
INTER_NODE = "inter-node"


@dataclass(frozen=True)
class TrafficRow:
    """What one collective sent over one kind of link."""

    collective: str
    link: str
    """The kind of link: INTRA_NODE or INTER_NODE."""
    messages: int
    bytes: int
