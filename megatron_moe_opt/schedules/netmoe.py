"""Tokens of samples that hop (hops.py), chunk by chunk: to their experts, and from there to their samples' new ranks.

    dispatch   [ [ copies -> all-to-all ] for each level -> a row for each expert held here ] for each chunk
    combine    [ the sum over the experts held here -> [ all-to-all -> sum ] for each level ] for each chunk

and where experts are cut, an all-gather over expert-TP before the rows of experts, a reduce-scatter behind their sum.

A chunk is on the links between nodes while the one before is on those inside them: so the copies that chunks begin with
are made for all of them before the first one's rows are sorted, which takes place in the same lane. The backward pass
of one runs the other on gradients.
"""

from __future__ import annotations

from functools import cache

from megatron_moe_opt.schedules.hops import HopStages
from megatron_moe_opt.schedules.pipeline import chunk_by_chunk
from megatron_moe_opt.schedules.schedule import Outline


@cache
def outline(direction: str, num_chunks: int, levels: int, hops: tuple[int, ...], etp_size: int) -> Outline:
    """Returns the schedule that sends tokens to the experts ("dispatch": rows.j -> sorted.j) or sums to the tokens
    ("combine": sorted.j -> rows.j), whatever moves.

    Args:
        levels: number of levels of the network.
        hops: the levels at which tokens hop.
    """
    stages = HopStages(levels, hops, num_chunks > 1, etp_size)
    name = f"netmoe hops {direction}, {num_chunks} chunk(s)"
    if direction == "dispatch":
        return chunk_by_chunk(name, "rows", stages.out(), num_chunks, ahead=1)
    return chunk_by_chunk(name, "sorted", stages.back(), num_chunks)
