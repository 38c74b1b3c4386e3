"""The imitated cluster that is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Nodes, their ranks, and the rates of their links in bits/s, each node's."""

    nodes: int
    ranks_per_node: int
    inter_bits: int
    intra_bits: int
    peak: float | None = None
    """How many times its rate a link between nodes reaches at most, after a pause; None: what a bucket holds passes at
    once.
    """

    def address(self, node: int) -> str:
        """Returns the node's address on its link, a private one that only exists inside the namespaces."""
        return f"10.77.0.{node + 1}"

    def describe(self, inter: float | None, intra: float) -> str:
        """Returns the line that a run starts with, given the measured bits/s; `inter` is None for a single node."""
        links = [("inter", self.inter_bits, inter), ("intra", self.intra_bits, intra)]
        rates = [
            f"{link} {asked / 1e6:g} Mbit/s (measured {measured / 1e6:.0f})"
            for link, asked, measured in links
            if measured is not None
        ]
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.ranks_per_node} ranks, {', '.join(rates)}"
