"""A layer's rows in partitions: how many each has, what a row takes, and what all of them hold (MPMoE, eq. 2 and 5)."""

from __future__ import annotations

from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.training.memory import expert_middle_width
from megatron_moe_opt.schedules.mpmoe import STRATEGIES, PartitionRows, RowBytes


def row_bytes(layer: LayerWorkload) -> RowBytes:
    """What a row of the layer takes on its way and in its experts, Megatron's own PyTorch ones."""
    middle = layer.element_bytes * layer.ffn * expert_middle_width(layer.gated, layer.fused)
    return RowBytes(layer.packed_row_bytes, layer.row_bytes, middle)


def partitions(layer: LayerWorkload, rows: int, count: int) -> list[PartitionRows]:
    """Equal parts of a rank's rows, where every rank has as many."""
    own = -(-rows // count)
    return [PartitionRows(own, own * layer.etp)] * count


def activation_bytes(layer: LayerWorkload, rows: int, count: int, strategy: str) -> int:
    """What forward and backward hold of T_I, T_DI, T_M, T_DO and T_O (eq. 2; less eq. 5 where memory is reused)."""
    part, row = partitions(layer, rows, count)[0], row_bytes(layer)
    own, gathered = part.own * count * row.token, part.gathered * row.token
    two, one = (min(2, count), 1) if STRATEGIES[strategy].reuses else (count, count)
    return 2 * own + 2 * two * gathered + one * part.gathered * row.middle
