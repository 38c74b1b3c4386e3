"""What MPMoE's paper says about memory, in its own symbols (eq. 1 to 6).

    B   tokens of a rank          M   hidden size            n   partitions
    H   middle size of an expert  E   experts of the gate

Tests and tools/bench/memory_reuse.py compare what layers measure with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerElements:
    """Elements that one MoE layer keeps on a rank with one expert of two matrices, and with Adam."""

    tokens: int
    """The tokens B. With top-k routing without drops, T_DI, T_M and T_DO have k rows a token: the paper has k = 1."""
    hidden: int
    """The model dimension M."""
    ffn: int
    """The middle size H."""
    experts: int = 0
    """The number of experts E."""

    @property
    def model_states(self) -> int:
        """Returns M_ms: parameters, gradients and Adam's two moments of gate and expert (eq. 1)."""
        return 4 * (self.experts * self.hidden + 2 * self.hidden * self.ffn)

    @property
    def activations(self) -> int:
        """Returns M_act: T_I, T_DI, T_DO, T_O of [B, M] and T_M of [B, H] (eq. 2)."""
        return 4 * self.tokens * self.hidden + self.tokens * self.ffn

    @property
    def buffers(self) -> int:
        """Returns M_buf: gradients of two neighbouring tensors, where nothing is pipelined (eq. 3)."""
        return self.tokens * self.hidden + self.tokens * self.ffn

    @property
    def pipelined(self) -> int:
        """Returns M_act^pipe, and M_buf^pipe: the gradients of all partitions are under way as well (eq. 4)."""
        return self.activations

    def saving(self, partitions: int) -> float:
        """Returns Delta M_act, and Delta M_buf: T_DI and T_DO in two partitions' buffers each, T_M in one's (eq. 5).

        A single partition has nothing to share; the printed formula would be negative.
        """
        n = partitions
        return self.tokens * (2 * self.hidden * max(0, n - 2) / n + self.ffn * (n - 1) / n)

    def reused(self, partitions: int) -> float:
        """Returns activations and temporary buffers together with memory reuse: eq. 4 less eq. 5, twice."""
        return 2 * (self.pipelined - self.saving(partitions))

    def saving_ratio(self, partitions: int) -> float:
        """Returns phi: the part of all memory that reuse saves (eq. 6)."""
        return 2 * self.saving(partitions) / (self.model_states + 2 * self.pipelined)
