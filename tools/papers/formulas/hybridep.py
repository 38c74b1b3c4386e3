"""Experts or tokens: the proportion on one level of equal links, in closed form (HybridEP, section III).

A training pass is two streams. Computation: what precedes the experts (Lat_PE), then they (n Lat_Ep). Communication:
the all-gather of experts, which waits for nothing, then two all-to-alls of tokens around the experts, which wait for
what precedes them. With p, the part of the data that travels as tokens, on G GPUs:

    A2A(p) = D (G - 1) / (G B) p          D: data of a GPU,     B: bandwidth of a GPU          (eq. 3)
    AG(p)  = P_E (G - 1) / B (1 - p)      P_E: experts of a GPU                                (eq. 4)
    T(p)   = Lat_PE + max(n Lat_Ep, max(AG - Lat_PE, 0) + 2 A2A)                               (eqs. 5 to 8)

Experts compute beside communication, in arbitrarily fine pieces. Eq. 7 takes all of their time for hidden; hidden it
can only be behind communication that there is, so that here T is never less than the computation. Without expert time
T is eq. 10. Only domain sizes S that divide G realise a proportion, p = (G - S) / (G - 1): see hybridep_levels.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def gemm_seconds(rows: float, inner: float, columns: float, throughput: float) -> float:
    """Returns the seconds of a product of [rows, inner] and [inner, columns] at `throughput`
    multiply-adds a second (eq. 1).
    """
    return rows * inner * columns / throughput


def attention_seconds(tokens: float, hidden: float, sequence: float, throughput: float) -> float:
    """Returns the seconds of attention as wide as the hidden size: its four matrices, and two products over the
    causal half of a sequence.
    """
    return gemm_seconds(tokens, hidden, 4 * hidden, throughput) + gemm_seconds(tokens, sequence, hidden, throughput)


def ffn_seconds(rows: float, hidden: float, ffn: float, gated: bool, throughput: float) -> float:
    """Returns the seconds of a feed-forward block, or an expert on all its rows; gated ones have a third matrix."""
    return gemm_seconds(rows, hidden, (3 if gated else 2) * ffn, throughput)


def pre_expert_seconds(attention: float, ffn: float, dense_layers: int = 0) -> float:
    """Returns Lat_PE: the attention of a MoE layer, and `dense_layers` whole layers before it (eq. 2)."""
    return (dense_layers + 1) * attention + dense_layers * ffn


def stream_seconds(pre_expert: float, experts: float, migration: float, exchange: float) -> float:
    """Returns the time of a pass, from the seconds of its parts (eqs. 5 to 8).

    Args:
        pre_expert: Lat_PE.
        experts: n Lat_Ep, of all experts of a GPU.
        migration: of the all-gather of experts; in a backward pass, which mirrors the forward pass, of the
            reduce-scatter of their gradients.
        exchange: of one of the two all-to-alls.
    """
    return pre_expert + max(experts, max(migration - pre_expert, 0.0) + 2 * exchange)


@dataclass(frozen=True)
class Optimum:
    """The proportion that takes least among all in [0, 1]."""

    case: str
    """The case of the paper. 1: experts travel for free, all of them; 2.1: as many as do; 2.2: all,
    since tokens take longer.
    """
    p: float
    """The part of the data that travels as tokens."""
    seconds: float


@dataclass(frozen=True)
class Stream:
    """A pass of one MoE layer on one level.

    Raises:
        ValueError: fewer than two GPUs, a bandwidth that is not positive and finite, or a negative size or time.
    """

    gpus: int
    """The number of GPUs, G."""
    data: float
    """D, the bytes of this GPU's rows for all experts."""
    expert: float
    """P_E, the bytes of this GPU's experts, as they travel."""
    bandwidth: float
    """B, the bytes a second that a GPU sends."""
    pre_expert: float
    """Lat_PE, in seconds."""
    experts: float = 0.0
    """n Lat_Ep, in seconds."""

    def __post_init__(self) -> None:
        if self.gpus < 2:
            raise ValueError(f"{self.gpus} GPU(s) have nothing to send: a stream needs two")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth {self.bandwidth} is not positive and finite")
        for name in ("data", "expert", "pre_expert", "experts"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)} of a stream is negative or not finite")

    def exchange_seconds(self, p: float) -> float:
        """Returns the seconds of one all-to-all (eq. 3)."""
        return self.data * (self.gpus - 1) / self.gpus * p / self.bandwidth

    def migration_seconds(self, p: float) -> float:
        """Returns the seconds of the all-gather (eq. 4)."""
        return self.expert * (self.gpus - 1) * (1 - p) / self.bandwidth

    def seconds(self, p: float) -> float:
        """Returns T(p), the seconds of a pass."""
        return stream_seconds(self.pre_expert, self.experts, self.migration_seconds(p), self.exchange_seconds(p))

    @property
    def border(self) -> float:
        """Returns the least p at which the all-gather hides behind what precedes the experts; 0 if it always does."""
        gathered = self.expert * (self.gpus - 1)
        return max(1 - self.bandwidth * self.pre_expert / gathered, 0.0) if gathered else 0.0

    def optimum(self) -> Optimum:
        """Returns the optimum of cases 1, 2.1 and 2.2 (eqs. 11 and 12).

        At and above the border fewer tokens are better. Below it they are too, but if 2 D < G P_E. The printed summary
        does not bound its p below by 0.
        """
        if self.border == 0:
            return Optimum("1", 0.0, self.seconds(0.0))
        if 2 * self.data < self.gpus * self.expert:
            return Optimum("2.1", self.border, self.seconds(self.border))
        return Optimum("2.2", 0.0, self.seconds(0.0))
