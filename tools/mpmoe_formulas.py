"""What MPMoE's paper says about memory and time, in its own symbols (eq. 1 to 6, Table II, Fig. 8).

    B   tokens of a rank          M   hidden size            n   partitions
    H   middle size of an expert  E   experts of the gate

The schedules that run are simulated for a choice (planning/predicting/mpmoe.py); the closed forms here are what
the paper states, and special cases of the simulator. Tests hold the simulator against them, bench_memory.py a measured
layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_moe_opt.planning.predicting.simulator import Slowdown, lane_rate
from megatron_moe_opt.schedules.schedule import Lane


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


Phase = Mapping[Lane, float]
"""Seconds of work that each lane has between two points at which all wait for each other."""


def paradigm_1(partitions: int, send: float, compute: float, receive: float) -> Iterator[Phase]:
    """Yields the phases of S and R in turn on the communication lane, with C beside them (Fig. 8a): no reuse, and S4.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        phase  P0 | P1 | P2    | P2    | P3 | P4

    Args:
        send, compute, receive: t_S, t_C, t_R, seconds of one partition.
    """
    yield from _phases(partitions, send, compute, receive)


def paradigm_2(
    partitions: int, send: float, compute: float, receive: float, offload: float, lane: Lane = Lane.D2H
) -> Iterator[Phase]:
    """Yields the phases of paradigm 1 with copies M to the host that follow S and C (Fig. 8b): forward of S1, S2 and
    S3.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        mem       |    | M0    | M1    | M2 | M3

    Args:
        offload: t_M of one partition.
    """
    for index, phase in enumerate(_phases(partitions, send, compute, receive)):
        yield phase if index < 2 else {**phase, lane: offload}


def paradigm_3(
    partitions: int, send: float, compute: float, receive: float, prefetch: float, lane: Lane = Lane.H2D
) -> Iterator[Phase]:
    """Yields the phases of paradigm 1 with copies M from the host that C waits for (Fig. 8c): backward of S1, S2 and
    S3.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        mem    M0 | M1 | M2    | M3    |    |

    Args:
        prefetch: t_M of one partition.
    """
    for index, phase in enumerate(_phases(partitions, send, compute, receive)):
        yield phase if index >= partitions else {lane: prefetch, **phase}


def paradigm_seconds(phases: Iterator[Phase], slowdown: Slowdown | None = None) -> float:
    """The sum of all phases, each as long as its slowest lane.

    Args:
        slowdown: alpha(y, x); a lane is slowed for a whole phase by the lanes that have work in it (section IV-B), so
            that P2 of paradigm 1 takes max((t_S + t_R) / alpha(comm, comp), t_C / alpha(comp, comm)).
    """
    total = 0.0
    for phase in phases:
        busy = [lane for lane, seconds in phase.items() if seconds]
        rates = {lane: lane_rate(lane, [one for one in busy if one is not lane], slowdown or {}) for lane in busy}
        total += max((phase[lane] / rates[lane] for lane in busy), default=0.0)
    return total


def _phases(partitions: int, send: float, compute: float, receive: float) -> Iterator[Phase]:
    """Yields P0, P1, n - 2 times P2, P3, P4; of a single partition only S, C and R."""
    comm, comp = Lane.INTER, Lane.COMPUTE
    if partitions == 1:
        yield from ({comm: send}, {comp: compute}, {comm: receive})
        return
    yield {comm: send}
    yield {comm: send, comp: compute}
    for _ in range(partitions - 2):
        yield {comm: receive + send, comp: compute}
    yield {comm: receive, comp: compute}
    yield {comm: receive}
