"""Parm's S2 as it is played, and the paper's Algorithm 1, which chooses between S1 and S2.

Of tokens that all N_MP ranks of a TP group hold, with E T rows for experts (T = k f B L / E; dropless: k B L rows):

    S1   split of the tokens, EP&ESP-A2A, EP&ESP-A2A, AllGather of the tokens    t_D1 = 2 A2A(y / N_MP) + AG_MP(B L M)
    S2   split of the rows, EP&ESP-A2A, SAA: A2A and AllGather of the rows       t_D2 = A2A(y / N_MP) + SAA(y / N_MP)

with y = E T M N_ESP, all in bytes (Parm, sections IV-B and V; its misprints: docs/papers/parm.md).

The fused all-to-all sends N_ESP copies of a row over the slow links, where MoNTA's levels send one and share it inside
nodes: `parm` chooses among them, too (dispatchers/parm_schedule.py). With sequence parallelism tokens are split
already: nothing is gathered, and the choice is that between the fused all-to-all and MoNTA's levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import AlphaBeta, CostCurve
from megatron_moe_opt.planning.predicting.layer_passes import training_passes
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules import parm
from megatron_moe_opt.schedules.groups import JOINT_GROUP, TP
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Timeline


@dataclass(frozen=True)
class ParmFits:
    """The lines that Algorithm 1 goes by."""

    all_to_all: AlphaBeta
    """The line of A2A_EP&ESP over the bytes of this rank's own rows, times expert-TP."""
    all_gather: AlphaBeta
    """The line of AG_MP over the bytes of all gathered rows."""
    saa: AlphaBeta
    """The line of combine_and_gather (SAA), over the bytes that `all_to_all` would carry."""

    @classmethod
    def of(cls, cluster: Cluster) -> ParmFits:
        """Fits the model's terms to the measured curves of a cluster.

        Raises:
            ConfigurationError: it was not.
        """
        costs = cluster.costs
        all_to_all, all_gather = (AlphaBeta.fit(costs.curve(op)) for op in (_ALL_TO_ALL, _ALL_GATHER))
        return cls(all_to_all, all_gather, AlphaBeta.fit(_saa(cluster)))

    def seconds(self, layer: LayerWorkload, tokens: int) -> tuple[float, float]:
        """Returns t_D1 and t_D2, the seconds of a forward pass under S1 and under S2."""
        own = layer.routed_rows(tokens) * layer.row_bytes * layer.etp / layer.tp  # y / N_MP
        exchange = self.all_to_all.seconds(own)
        return 2 * exchange + self.all_gather.seconds(tokens * layer.row_bytes), exchange + self.saa.seconds(own)


def algorithm_1(layer: LayerWorkload, tokens: int, fits: ParmFits) -> str:
    """Returns "S1" or "S2", chosen by the closed forms alone (Parm, Algorithm 1)."""
    t_d1, t_d2 = fits.seconds(layer, tokens)
    return "S1" if t_d1 <= t_d2 else "S2"


_ALL_TO_ALL = Op(Kind.ALL_TO_ALL, Lane.INTER, group=JOINT_GROUP)
_ALL_GATHER = Op(Kind.ALL_GATHER, Lane.INTRA, group=TP)


def s2_timelines(layer: LayerWorkload, tokens: int, cluster: Cluster, uneven: float = 1.0) -> list[Timeline]:
    """Returns the four passes of S2: dispatch as it is played, combine as SAA was measured, behind its reorder.

    Args:
        uneven: rows of a rank in an even exchange that takes as long as this one, over the mean.

    Raises:
        ConfigurationError: a curve is missing.
    """
    saa, costs, timelines = _saa(cluster), cluster.costs, []
    rows = ceil(-(-layer.routed_rows(tokens) // layer.tp) * uneven)
    for one in training_passes(rows, layer.outbound_bytes, layer.packed_row_bytes, layer.homebound_bytes):
        if one.direction == "dispatch":
            schedule = parm.outline("dispatch", 1, layer.etp).sized(even_chunks(one.exchanged, layer.etp, 1))
            timelines.append(cluster.simulate(schedule, costs))
            continue
        arrived = one.exchanged * layer.etp
        ops = (
            Op(Kind.COPY, Lane.COPY, size=arrived),
            Op(Kind.ALL_TO_ALL, Lane.INTER, size=arrived, waits_for=(0,), group=JOINT_GROUP),
            Op(Kind.ALL_GATHER, Lane.INTRA, size=one.exchanged * layer.tp, waits_for=(0,), group=TP),
        )
        begin = costs(ops[0])
        end = begin + saa.seconds(arrived)
        timelines.append(Timeline.of_times(Schedule("SAA", ops), [(0.0, begin), (begin, end), (begin, end)]))
    return timelines


def _saa(cluster: Cluster) -> CostCurve:
    if cluster.saa is None:
        raise ConfigurationError(
            "S2's all-to-all beside an AllGather over TP (SAA) was not measured: measure this cluster with moe-opt "
            "profile --tp N, N being the tensor parallelism of the training"
        )
    return CostCurve(cluster.saa)
