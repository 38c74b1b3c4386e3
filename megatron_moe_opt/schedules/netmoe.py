"""Tokens of samples that hop (hops.py), chunk by chunk: to their experts, and from there to their samples' new ranks.

    dispatch   [ [ copies -> all-to-all ] for each level -> a row for each expert held here ] for each chunk
    combine    [ the sum over the experts held here -> [ all-to-all -> sum ] for each level ] for each chunk

and where experts are cut, an all-gather over expert-TP before the rows of experts, a reduce-scatter behind their sum.

A chunk is on the links between nodes while the one before is on those inside them: so the copies that chunks begin with
are made for all of them before the first one's rows are sorted, which takes place in the same lane. The backward pass
of one runs the other on gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_moe_opt.schedules.hops import HopBytes, HopStages
from megatron_moe_opt.schedules.pipeline import chunk_by_chunk
from megatron_moe_opt.schedules.schedule import Schedule


def dispatch(chunks: Sequence[HopBytes], levels: int, etp_size: int = 1) -> Schedule:
    """Tokens to the experts: rows.j -> sorted.j; `levels` of the network."""
    stages = HopStages(levels, len(chunks) > 1, etp_size)
    return chunk_by_chunk(_name("dispatch", chunks), "rows", [stages.out(size) for size in chunks], ahead=1)


def combine(chunks: Sequence[HopBytes], levels: int, etp_size: int = 1) -> Schedule:
    """Sums to the tokens: sorted.j -> rows.j; `levels` of the network."""
    stages = HopStages(levels, len(chunks) > 1, etp_size)
    return chunk_by_chunk(_name("combine", chunks), "sorted", [stages.back(size) for size in chunks])


def _name(direction: str, chunks: Sequence[HopBytes]) -> str:
    return f"netmoe hops {direction}, {len(chunks)} chunk(s)"
