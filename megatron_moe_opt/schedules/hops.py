"""The stages of tokens that hop to the domains of their experts and back, level by level (HybridEP, section IV-A).

    out     [ copies -> all-to-all ] for each level, an all-gather over expert-TP, then a row for each expert held here
    back    the sum over these, a reduce-scatter over expert-TP, then [ all-to-all -> sum of the copies ] for each
            level, and an all-gather over TP

The outermost level, whose links are the slowest, is first on the way out and last on the way back. A copy of a row goes
to every domain with one of its experts: a token crosses a link once, whatever its number of experts. Where experts are
whole there is nothing to be done over expert-TP, and over TP only where its ranks have shared out tokens that all of
them hold (Parm's S2).

In chunks, one is on the links between nodes while the one before is on those inside them: so the copies that chunks
begin with are made for all of them before the first one's rows are sorted, which takes place in the same lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import ClassVar

from megatron_moe_opt.schedules.groups import EXPERT_TP, tokens_group
from megatron_moe_opt.schedules.monta import GATHERED, gathered_over_tp
from megatron_moe_opt.schedules.pipeline import Stage, chunk_by_chunk
from megatron_moe_opt.schedules.schedule import Kind, Lane, Measure, Outline


@dataclass(frozen=True)
class HopBytes:
    """Bytes of what hops together, on this rank."""

    sent: Mapping[int, int]
    """Bytes of the copies made at each level at which tokens hop, its own domain's included; outermost first."""
    computed: int = 0
    """Bytes of the rows of the experts held here."""
    gathered: int = 0
    """Bytes of what has arrived at all ranks of expert-TP: each token once."""
    returned: int = 0
    """Bytes of the tokens that this rank gets back."""


@dataclass(frozen=True)
class HopRows:
    """Rows of what hops together, on this rank."""

    own: int
    """Number of this rank's own tokens."""
    sent: Mapping[int, int]
    """Rows that this rank sends at each level, as HopBytes has their bytes."""
    gathered: int
    """Rows that the experts held here compute."""
    arrived: int = 0
    """Rows that have arrived at all ranks of expert-TP together."""
    tp_size: int = 1
    """Number of ranks that have shared out tokens all of them hold, and get back those of all."""
    tp_rank: int = 0

    @property
    def packed(self) -> int:
        """Returns the number of tokens that are packed here: its own."""
        return self.own

    @property
    def returned(self) -> int:
        """Returns the number of tokens that this rank gets back."""
        return self.own * self.tp_size

    @property
    def own_place(self) -> int:
        """Returns where its own tokens begin among those that it gets back."""
        return self.own * self.tp_rank

    def bytes(self, row_bytes: int) -> HopBytes:
        """Returns what moves of rows of so many bytes."""
        sent = {level: rows * row_bytes for level, rows in self.sent.items()}
        return HopBytes(sent, self.gathered * row_bytes, self.arrived * row_bytes, self.returned * row_bytes)


@dataclass(frozen=True)
class HopStages:
    """The stages of rows that hop over the groups of each level in turn. Buffers, L a level:

    out     rows -> copies_L -> arrived_L -> copies_NEXT -> ... [ -> gathered ] -> sorted
    back    sorted -> unsorted [ -> parts -> summed ] -> returned_L -> summed_L -> ... [ -> own ] -> rows
    """

    levels: int
    """Number of levels of the network."""
    hops: tuple[int, ...]
    """The levels at which tokens hop, outermost first."""
    is_piped: bool = False
    """Whether copies and sums are made beside experts of other rows: at both ends in the lane of copies, between two
    levels in the lane of the inner one, which they keep in order. Else they are in the lane of the experts.
    """
    etp_size: int = 1
    tp_size: int = 1
    """Number of ranks that get back each other's tokens, which all of them hold."""

    lies_in: ClassVar[Mapping[str, str]] = MappingProxyType({})
    ahead: ClassVar[int] = 2
    """The parts of rows that are on their way before the experts have had one (pipeline.Stages)."""
    chunks: ClassVar[int] = 1

    def out(self) -> list[Stage]:
        """Returns the stages to the experts, the last of which sorts by expert."""
        stages = []
        for level in self.hops:
            copied = _sent(level)
            stages.append(Stage(Kind.PERMUTE, self._lane_of_copies(level), copied, f"copies_{level}"))
            stages.append(Stage(Kind.ALL_TO_ALL, self._lane(level), copied, f"arrived_{level}", tokens_group(level)))
        if self.etp_size > 1:
            stages.append(Stage(Kind.ALL_GATHER, Lane.INTRA, GATHERED, "gathered", EXPERT_TP))
        return [*stages, Stage(Kind.PERMUTE, self._end, _COMPUTED, "sorted")]

    def back(self) -> list[Stage]:
        """Returns the stages back to the sources; the first one sums over the experts held here."""
        lane = Lane.INTRA if self.is_piped else Lane.COMPUTE
        stages = [Stage(Kind.PERMUTE, lane, _COMPUTED, "unsorted")]
        if self.etp_size > 1:
            stages.append(Stage(Kind.REDUCE_SCATTER, Lane.INTRA, GATHERED, "parts", EXPERT_TP))
            stages.append(Stage(Kind.SUM, Lane.INTRA, GATHERED, "summed", also_reads=("unsorted",)))
        for level in reversed(self.hops):
            copied = _sent(level)
            stages.append(Stage(Kind.ALL_TO_ALL, self._lane(level), copied, f"returned_{level}", tokens_group(level)))
            stages.append(Stage(Kind.PERMUTE, self._lane_of_copies(level), copied, f"summed_{level}"))
        if self.tp_size == 1:
            return [*stages[:-1], replace(stages[-1], writes="rows")]
        return gathered_over_tp(stages)

    @property
    def _end(self) -> Lane:
        return Lane.COPY if self.is_piped else Lane.COMPUTE

    def _lane_of_copies(self, level: int) -> Lane:
        return self._lane(level) if self.is_piped and level != self.hops[0] else self._end

    def _lane(self, level: int) -> Lane:
        """Returns the lane of a level's links: the innermost of several levels is inside a node."""
        return Lane.INTRA if self.levels > 1 and level == self.levels - 1 else Lane.INTER


@cache
def outline(direction: str, way: HopStages, num_chunks: int = 1) -> Outline:
    """Returns the schedule of rows to the domains of each level, and to each expert held there ("hop out": rows.j ->
    sorted.j), or of sums of the experts' rows back from these domains ("hop back": sorted.j -> rows.j), whatever moves.
    The backward pass of one runs the other on gradients.
    """
    is_out, way = direction == "hop out", replace(way, is_piped=num_chunks > 1)
    levels = ", ".join(map(str, way.hops if is_out else reversed(way.hops)))
    name = f"{direction}, level {levels}" + f", {num_chunks} chunks" * (num_chunks > 1)
    if is_out:
        return chunk_by_chunk(name, "rows", way.out(), num_chunks, ahead=1)
    return chunk_by_chunk(name, "sorted", way.back(), num_chunks)


_COMPUTED = attrgetter("computed")


def _sent(level: int) -> Measure:
    return lambda size: size.sent[level]
