"""A layer's rows in partitions: how many each has, what a row takes, and what all of them hold (MPMoE, eq. 2 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import HeldMore
from megatron_moe_opt.planning.predicting.skew import Skew
from megatron_moe_opt.planning.training.memory import expert_middle_width, first_product_width
from megatron_moe_opt.schedules.hops import HopRows
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES, Restore
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.topology.domains import ExpertDomains, stationary

FACT_BYTES = 4
"""The bytes of a token's probability for an expert, or of the expert's number."""


def row_bytes(layer: LayerWorkload) -> RowBytes:
    """Returns the bytes of a row of the layer on its way and in its experts, Megatron's own PyTorch ones."""
    each, first = layer.element_bytes * layer.ffn, first_product_width(layer.gated)
    activations = each * (expert_middle_width(layer.gated, layer.fused) - first)
    out, back = layer.outbound_bytes, layer.homebound_bytes
    packed, returned = layer.packed_row_bytes, back + layer.lane_bytes
    return RowBytes(packed, layer.row_bytes, each * first, returned, back, out, activations)


def partitions(layer: LayerWorkload, rows: int, count: int, sharers: int = 1) -> list[PartitionRows]:
    """Returns equal parts of a rank's rows, where every rank has as many.

    Args:
        sharers: TP ranks that have shared out their rows; 1: every rank has rows of its own.
    """
    own = -(-rows // count)
    return [PartitionRows(own, own * layer.etp, (own,) * sharers if sharers > 1 else ())] * count


def hop_row_bytes(layer: LayerWorkload, notes: bool = False) -> RowBytes:
    """Returns what `row_bytes` returns, but for tokens with the facts of all of their experts behind them
    (runtime/hops/row_facts.py).

    Args:
        notes: whether facts have one of 8 bytes.
    """
    row, lane = row_bytes(layer), layer.lane_bytes or 1
    sizes = layer.topk * 2 * FACT_BYTES + 8 * notes, layer.topk * FACT_BYTES
    facts, gradients = (-(-size // lane) * lane for size in sizes)
    return replace(row, packed=layer.outbound_bytes + facts, returned=layer.homebound_bytes + gradients)


def hop_partitions(
    layer: LayerWorkload, skew: Skew, rows: int, shares: Sequence[int], domains: ExpertDomains | None = None
) -> list[HopRows]:
    """Returns parts of a rank's tokens, and of the `rows` that the experts held here compute.

    Args:
        shares: of all, that each part has.
        domains: in which experts travel; None: none does.
    """
    domains, migration = domains or stationary(layer.workers), layer.migration(skew)
    copies, whole = {level: migration.copies(domains, level) for level in domains.hops}, sum(shares)

    def part(share: int) -> HopRows:
        own, computed = (-(-share * number // whole) for number in (migration.tokens, rows))
        sent = {level: ceil(share * number / whole) for level, number in copies.items()}
        arrived = layer.etp * (sent[max(sent)] if sent else own) if layer.etp > 1 else 0
        return HopRows(own, sent, computed * layer.etp, arrived, layer.sharers)

    alike = {share: part(share) for share in set(shares)}
    return [alike[share] for share in shares]


def held_more(layer: LayerWorkload, count: int, strategy: str, own_rows: int | None = None) -> HeldMore:
    """Returns what a layer whose partitions share memory holds besides stock's, which keeps T_DI and T_M.

    Args:
        own_rows: a rank's own, where it is not each of its rows that it sends.
    """
    how = STRATEGIES[strategy]
    if not how.reuses:
        return HeldMore()
    part, row = partitions(layer, layer.rows, count)[0], row_bytes(layer)
    own = part.own * count if own_rows is None else own_rows
    sent_again = own * row.packed if how.inputs is Restore.COMMUNICATE else 0
    kept = part.gathered * count * (row.token + row.middle + row.activations)
    inputs, middle, activations = _buffers(count, strategy)
    at_work = part.gathered * (inputs * row.token + middle * row.middle + activations * row.activations)
    return HeldMore(sent_again - kept, at_work)


def activation_bytes(layer: LayerWorkload, rows: int, count: int, strategy: str, own_rows: int | None = None) -> int:
    """Returns the bytes that forward and backward hold of T_I, T_DI, T_M, T_DO and T_O (eq. 2; less eq. 5 where memory
    is reused).

    An offloaded T_M has a second buffer, for what is offloaded of it: what is computed again is there once.

    Args:
        own_rows: a rank's own, where it is not each of `rows` that it sends.
    """
    part, row = partitions(layer, rows, count)[0], row_bytes(layer)
    part = part if own_rows is None else replace(part, own=-(-own_rows // count))
    own, gathered = part.own * count * row.token, part.gathered * row.token
    inputs, middle, activations = _buffers(count, strategy)
    return 2 * own + 2 * inputs * gathered + part.gathered * (middle * row.middle + activations * row.activations)


def _buffers(count: int, strategy: str) -> tuple[int, int, int]:
    """Returns of how many partitions T_DI (and T_DO), T_M, and what is computed again of it are there at once."""
    how = STRATEGIES[strategy]
    return (min(2, count), min(how.middle_buffers, count), 1) if how.reuses else (count, count, count)
