"""What tokens that hop take: the schedules of a layer's passes, with the bytes that move, and what their ops cost."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moe_opt.planning.costs.curves import Costs
from megatron_moe_opt.planning.costs.domain_curves import curve_of
from megatron_moe_opt.planning.predicting.expert_migration import codec_seconds
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import hop_row_bytes
from megatron_moe_opt.schedules.groups import level_of
from megatron_moe_opt.schedules.hops import HopRows, HopStages, outline
from megatron_moe_opt.schedules.partition_rows import INPUT_GRADIENTS, INPUTS, OUTPUT_GRADIENTS, OUTPUTS
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.topology.domains import ExpertDomains, stationary

Ways = tuple[Schedule, Schedule]
"""The schedules of a pass: to the experts, and back."""


def hop_passes(one: LayerWorkload, chunks: Sequence[HopRows], notes: bool = False, keys_bytes: int = 0) -> list[Ways]:
    """Returns the schedules in which chunks of tokens hop to their experts and back, forward and backward.

    Args:
        chunks: all alike in the levels at which they hop.
        notes: whether a note is behind each row on its way out in the forward pass.
        keys_bytes: of a key behind each row on its way back then.
    """
    way = HopStages(len(one.workers), tuple(chunks[0].sent), etp_size=one.etp)
    row = hop_row_bytes(one, notes)

    def sized(direction: str, row_bytes: int) -> Schedule:
        return outline(direction, way, len(chunks)).sized([chunk.bytes(row_bytes) for chunk in chunks])

    forward = sized("hop out", row.of(INPUTS)), sized("hop back", row.of(OUTPUTS) + keys_bytes)
    return [forward, (sized("hop out", row.of(OUTPUT_GRADIENTS)), sized("hop back", row.of(INPUT_GRADIENTS)))]


class HopSeconds:
    """The costs of ops where tokens hop: all-to-alls, and experts that travel, by their level; copies and sums of rows
    as copies. What is done with travelling experts on a rank is counted elsewhere.
    """

    def __init__(self, layer: LayerOnCluster, costs: Costs, domains: ExpertDomains | None = None) -> None:
        self._costs, self._domains = costs, domains or stationary(layer.workload.workers)
        self._curves = layer.domain_curves
        self._copies = costs.curve(Op(Kind.COPY, Lane.COPY))
        self._migration, self._codec = layer.workload.migration(layer.skew), layer.seconds_of_codec

    def __call__(self, op: Op) -> float:
        travels = op.lane is Lane.EXPERTS
        if op.kind is Kind.PERMUTE and not travels:
            return self._costs.overhead + self._copies.seconds(op.size)
        if op.kind is not Kind.ALL_TO_ALL and not travels:
            return self._costs(op)
        if op.group is None:
            return codec_seconds(self._migration, self._domains, op, self._codec)
        level = level_of(op.group)
        ranks = self._domains.sizes[level] if travels else self._domains.domains(level)
        return self._costs.overhead + curve_of(self._curves, op.kind, level, ranks).seconds(op.size)
