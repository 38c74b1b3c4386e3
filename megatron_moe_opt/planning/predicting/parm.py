"""Which of Parm's schedules: by the paper's Algorithm 1, and by playing all that could run.

Of tokens that all N_MP ranks of a TP group hold, with E T rows for experts (T = k f B L / E; dropless: k B L rows):

    S1   split of the tokens, EP&ESP-A2A, EP&ESP-A2A, AllGather of the tokens    t_D1 = 2 A2A(y / N_MP) + AG_MP(B L M)
    S2   split of the rows, EP&ESP-A2A, SAA: A2A and AllGather of the rows       t_D2 = A2A(y / N_MP) + SAA(y / N_MP)

with y = E T M N_ESP, all in bytes. (Parm, sections IV-B and V. Algorithm 1, line 2, counts M twice; eq. 13 drops N_ESP;
eq. 14 adds an AG_MP that its overlapped term already contains, since SAA is fitted on the fused collective.)

The fused all-to-all sends N_ESP copies of a row over the slow links, where MoNTA's levels send one and share it inside
nodes. Parm compares it with neither; here they are candidates of S1. With sequence parallelism tokens are split
already: nothing is gathered, and the choice is that between the fused all-to-all and MoNTA's levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.equal_times import fewest_of_equal
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.curves import AlphaBeta, CostCurve
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.monta import AS_IN_TRAINING, CHUNKS, ChoiceByRows, Pass, training_passes
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules import parm
from megatron_moe_opt.schedules.monta import LEVELS, even_chunks
from megatron_moe_opt.schedules.parm import JOINT, SCHEDULES, TP
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Timeline


@dataclass(frozen=True)
class ParmChoice:
    """A schedule, and what its four passes and the AllGathers at the layer's edge take together."""

    schedule: str
    """S1 or S2. With sequence parallelism S1, without its split and AllGather."""
    level: str | None
    """None: the fused all-to-all; else MoNTA's level."""
    chunks: int
    seconds: float

    def __str__(self) -> str:
        if self.level is None:
            return f"{self.schedule}, fused" if self.schedule == "S1" else self.schedule
        return f"{self.schedule}, {self.level}" + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


@dataclass(frozen=True)
class ParmFits:
    """The lines that Algorithm 1 goes by."""

    all_to_all: AlphaBeta
    """A2A_EP&ESP: over bytes of this rank's own rows, times expert-TP."""
    all_gather: AlphaBeta
    """AG_MP: over bytes of all gathered rows."""
    saa: AlphaBeta
    """Over the bytes that `all_to_all` would carry."""

    @classmethod
    def of(cls, cluster: Cluster) -> ParmFits:
        """Fits what was measured.

        Raises:
            ConfigurationError: it was not.
        """
        costs = cluster.costs()
        all_to_all, all_gather = (AlphaBeta.fit(costs.curve(op)) for op in (_ALL_TO_ALL, _ALL_GATHER))
        return cls(all_to_all, all_gather, AlphaBeta.fit(_saa(cluster)))

    def seconds(self, layer: LayerWorkload, tokens: int) -> tuple[float, float]:
        """t_D1 and t_D2 of a forward pass."""
        own = layer.routed_rows(tokens) * layer.row_bytes * layer.etp / layer.tp  # y / N_MP
        exchange = self.all_to_all.seconds(own)
        return 2 * exchange + self.all_gather.seconds(tokens * layer.row_bytes), exchange + self.saa.seconds(own)


def algorithm_1(layer: LayerWorkload, tokens: int, fits: ParmFits) -> str:
    """S1 or S2, by the closed forms alone (Parm, Algorithm 1)."""
    t_d1, t_d2 = fits.seconds(layer, tokens)
    return "S1" if t_d1 <= t_d2 else "S2"


def predict(
    layer: LayerWorkload,
    tokens: int,
    cluster: Cluster,
    schedules: Sequence[str] = SCHEDULES,
    levels: Sequence[str | None] = (None, *LEVELS),
    chunks: Sequence[int] = CHUNKS,
) -> tuple[ParmChoice, ...]:
    """Every schedule that could run, and the time of dispatch and combine, forward and backward.

    S1 at each level and chunk count, the fused all-to-all first; then S2. Where a TP rank has tokens of its own there
    is no S2; where all experts are whole and on this rank, neither S2 nor the fused all-to-all.

    Args:
        tokens: B L: of this rank, the same ones on all `layer.tp` ranks.
        schedules: to choose from.
        levels: of S1, to choose from; None is the fused all-to-all.
        chunks: of levels O2 and O3.

    Raises:
        ConfigurationError: a curve is missing.
        ValueError: nothing is left to choose from.
    """
    found = tuple(_candidates(layer, tokens, cluster, schedules, levels, chunks))
    if not found:
        raise ValueError(f"none of {schedules} at levels {levels} in {chunks} chunks can run in a layer {layer}")
    return found


def choose(
    layer: LayerWorkload,
    tokens: int,
    cluster: Cluster,
    schedules: Sequence[str] = SCHEDULES,
    levels: Sequence[str | None] = (None, *LEVELS),
    chunks: Sequence[int] = CHUNKS,
    equal_within: float = 1e-9,
    one_chunk: float = 1.0,
) -> ParmChoice:
    """The one that takes least. Arguments and errors as of `predict`.

    Times that exceed the least by up to `equal_within` of it count as equal to it; that of a single chunk is compared
    at `one_chunk` of it. Of equal ones, fewer chunks win, then the faster, then the earlier one of `predict`. The same
    inputs give the same choice on every rank.
    """
    found = predict(layer, tokens, cluster, schedules, levels, chunks)
    compared = [(one.seconds * (one_chunk if one.chunks == 1 else 1.0), one.chunks, one) for one in found]
    return fewest_of_equal(compared, equal_within)


def choices(
    layer: LayerWorkload,
    cluster: Cluster,
    schedules: Sequence[str] = SCHEDULES,
    levels: Sequence[str | None] = (None, *LEVELS),
    chunks: Sequence[int] = CHUNKS,
) -> ChoiceByRows[ParmChoice]:
    """The choice for every number of tokens; arguments as of `predict`.

    Compared as in training (AS_IN_TRAINING).
    """

    def choose_for(tokens: int) -> ParmChoice:
        return choose(layer, tokens, cluster, schedules, levels, chunks, **AS_IN_TRAINING)

    return ChoiceByRows(choose_for)


_ALL_TO_ALL = Op(Kind.ALL_TO_ALL, Lane.INTER, group=JOINT)
_ALL_GATHER = Op(Kind.ALL_GATHER, Lane.INTRA, group=TP)


def _candidates(
    layer: LayerWorkload,
    tokens: int,
    cluster: Cluster,
    schedules: Sequence[str],
    levels: Sequence[str | None],
    chunks: Sequence[int],
) -> Iterator[ParmChoice]:
    costs = cluster.costs()
    alone = layer.ep * layer.etp == 1

    def play(schedule: Schedule) -> float:
        return simulate(schedule, costs, cluster.slowdown).seconds

    def fused(one: Pass) -> Schedule:
        build = parm.dispatch if one.direction == "dispatch" else parm.combine
        return build(even_chunks(one.exchanged, layer.etp, 1), layer.etp)

    def piped(one: Pass, level: str, count: int) -> Schedule:
        return one.schedule(level, even_chunks(one.exchanged, layer.etp, count), layer.ep, layer.etp)

    if "S1" in schedules:
        passes = training_passes(layer.routed_rows(-(-tokens // layer.tp)), layer.row_bytes, layer.packed_row_bytes)
        gathers = 0.0  # of the output and, in the backward pass, of the input's gradient
        if layer.tp > 1:
            gathers = 2 * costs(Op(Kind.ALL_GATHER, Lane.INTRA, size=tokens * layer.row_bytes, group=TP))
        if None in levels and not alone:
            yield ParmChoice("S1", None, 1, sum(play(fused(one)) for one in passes) + gathers)
        for level, count in _pipelines(levels, chunks):
            yield ParmChoice("S1", level, count, sum(play(piped(one, level, count)) for one in passes) + gathers)
    if "S2" in schedules and layer.tp > 1 and not alone:
        yield ParmChoice("S2", None, 1, sum(one.seconds for one in s2_timelines(layer, tokens, cluster)))


def s2_timelines(layer: LayerWorkload, tokens: int, cluster: Cluster) -> list[Timeline]:
    """Returns the four passes of S2: dispatch as it is played, combine as SAA was measured, behind its reorder.

    Raises:
        ConfigurationError: a curve is missing.
    """
    saa, costs, timelines = _saa(cluster), cluster.costs(), []
    for one in training_passes(-(-layer.routed_rows(tokens) // layer.tp), layer.row_bytes, layer.packed_row_bytes):
        if one.direction == "dispatch":
            schedule = parm.dispatch(even_chunks(one.exchanged, layer.etp, 1), layer.etp)
            timelines.append(simulate(schedule, costs, cluster.slowdown))
            continue
        arrived = one.exchanged * layer.etp
        ops = (
            Op(Kind.COPY, Lane.COPY, size=arrived),
            Op(Kind.ALL_TO_ALL, Lane.INTER, size=arrived, waits_for=(0,), group=JOINT),
            Op(Kind.ALL_GATHER, Lane.INTRA, size=one.exchanged * layer.tp, waits_for=(0,), group=TP),
        )
        begin = costs(ops[0])
        end = begin + saa.seconds(arrived)
        timelines.append(Timeline.of_times(Schedule("SAA", ops), [(0.0, begin), (begin, end), (begin, end)]))
    return timelines


def _pipelines(levels: Sequence[str | None], chunks: Sequence[int]) -> Iterator[tuple[str, int]]:
    """MoNTA's levels and chunk counts that differ: in one chunk all levels are O1."""
    if "O1" in levels:
        yield "O1", 1
    for level in ("O2", "O3"):
        if level in levels:
            yield from ((level, count) for count in chunks if count > 1 or "O1" not in levels)


def _saa(cluster: Cluster) -> CostCurve:
    if cluster.saa is None:
        raise ConfigurationError(
            "S2's all-to-all beside an AllGather over TP (SAA) was not measured: measure this cluster with moe-opt "
            "profile --tp N, N being the tensor parallelism of the training"
        )
    return CostCurve(cluster.saa)
