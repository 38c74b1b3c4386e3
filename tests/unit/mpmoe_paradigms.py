"""The closed forms of MPMoE's three paradigms (Fig. 8): phases at whose ends all lanes wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_moe_opt.planning.costs.curves import Slowdown
from megatron_moe_opt.planning.predicting.simulator import lane_rate
from megatron_moe_opt.schedules.schedule import Lane

Phase = Mapping[Lane, float]
"""Seconds of work that each lane has in a phase."""


def paradigm_1(partitions: int, send: float, compute: float, receive: float) -> list[Phase]:
    """Returns the phases of S and R in turn on the communication lane, with C beside them (Fig. 8a): no reuse, and S4.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        phase  P0 | P1 | P2    | P2    | P3 | P4

    Args:
        send, compute, receive: t_S, t_C, t_R, seconds of one partition.
    """
    comm, comp = Lane.INTER, Lane.COMPUTE
    if partitions == 1:
        return [{comm: send}, {comp: compute}, {comm: receive}]
    middle = [{comm: receive + send, comp: compute}] * (partitions - 2)
    return [{comm: send}, {comm: send, comp: compute}, *middle, {comm: receive, comp: compute}, {comm: receive}]


def paradigm_2(partitions: int, send: float, compute: float, receive: float, offload: float) -> list[Phase]:
    """Returns the phases of paradigm 1 with copies M to the host, of t_M seconds each, that follow S and C (Fig. 8b):
    forward of S1, S2 and S3.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        mem       |    | M0    | M1    | M2 | M3
    """
    phases = paradigm_1(partitions, send, compute, receive)
    return [*phases[:2], *({**phase, Lane.D2H: offload} for phase in phases[2:])]


def paradigm_3(partitions: int, send: float, compute: float, receive: float, prefetch: float) -> list[Phase]:
    """Returns the phases of paradigm 1 with copies M from the host, of t_M seconds each, that C waits for (Fig. 8c):
    backward of S1, S2 and S3.

        comm   S0 | S1 | R0 S2 | R1 S3 | R2 | R3
        comp      | C0 | C1    | C2    | C3 |
        mem    M0 | M1 | M2    | M3    |    |
    """
    phases = paradigm_1(partitions, send, compute, receive)
    return [*({Lane.H2D: prefetch, **phase} for phase in phases[:partitions]), *phases[partitions:]]


def paradigm_seconds(phases: Sequence[Phase], slowdown: Slowdown | None = None) -> float:
    """Returns the sum of all phases, each as long as its slowest lane.

    Args:
        slowdown: alpha(y, x); a lane is slowed for a whole phase by the lanes that have work in it (section IV-B), so
            that P2 of paradigm 1 takes max((t_S + t_R) / alpha(comm, comp), t_C / alpha(comp, comm)).
    """
    total = 0.0
    for phase in phases:
        rates = {lane: lane_rate(lane, [one for one in phase if one is not lane], slowdown or {}) for lane in phase}
        total += max(seconds / rates[lane] for lane, seconds in phase.items())
    return total
