"""Choosing domain sizes: the least time of all that are realisable, on any number of levels (HybridEP, sections III,
IV).

A domain size must divide its level, so that few proportions exist, p = (G - S) / (G - 1). Each choice of sizes takes
what the schedules take that run with it, with one collective a level, one level after the other (the paper's closed
form: tools/papers/formulas/hybridep_levels.py), or with tokens in chunks, which are at several levels at once. At level
l, of SF_l workers in N_l = SF_l / S_l domains, a group moves (bytes as Op.size counts them: own ones too)

    exchange     tokens * row * copies_l          copies_l: of a token, see below
    migration    P_E * S_0 * ... * S_l            experts gathered so far, from the outermost level inwards

A token goes once to each domain that has one of its experts, however many these are, and one sum comes back. With
experts drawn evenly, E in all and K different ones a token, it has copies in

    copies_l = d (1 - C(E - E / d, K) / C(E, K))     of the d = N_0 ... N_l regions of the levels down to l

K = 1 gives one copy, the paper's volumes. Where routing is uneven the busiest region decides. With f times the mean of
the (token, expert) pairs it counts for f E / d of the E experts: a popular region gets less than f times the copies,
since more of its pairs share a token. Where capacities leave room for a part r of the pairs, a token is taken to have
drawn r K experts, in the mean of the whole numbers beside it. A backward pass exchanges as much, and returns the
gradients of migrated experts to their owners by a reduce-scatter, the mirror of the all-gather; the paper leaves that
out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from types import MappingProxyType

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.equal_times import TIE
from megatron_moe_opt.planning.costs.domain_curves import Curves, curve_of
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules import expert_migration as schedules
from megatron_moe_opt.schedules.schedule import CODEC, Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Timeline, numbered, one_after_another
from megatron_moe_opt.topology.domains import ExpertDomains, realisable

SecondsOfCodec = Callable[[Kind, float], float]
"""The seconds of an op of the codec over the bytes that it encodes, or that decoding makes: of gradients in float32."""


@dataclass(frozen=True)
class StreamPass:
    """One way through a layer, forward or backward."""

    expert_bytes: int
    """Bytes of all experts of a GPU as they travel: weights, compressed or not; backward, their gradients."""
    collective: Kind = Kind.ALL_GATHER
    """The collective in which experts travel: REDUCE_SCATTER in a backward pass."""
    gathered_again: int = 0
    """Bytes of experts, as `expert_bytes`, that a backward pass gathers because they did not stay."""


def _even(domains: ExpertDomains, level: int) -> float:
    return 1.0


@dataclass(frozen=True)
class MigrationLayer:
    """A MoE layer; its experts are drawn evenly, but for `imbalance`."""

    tokens: int
    """Tokens of a GPU."""
    row_bytes: int
    """Bytes of a token as it travels."""
    topk: int
    """Experts that a token is sent to (K)."""
    local_experts: int
    """Number of experts that a GPU owns."""
    passes: tuple[StreamPass, ...]
    imbalance: Callable[[ExpertDomains, int], float] = _even
    """The (token, expert) pairs of the busiest region of the levels down to one, over the mean."""
    coded: Mapping[Kind, float] = field(default_factory=dict)
    """The collectives in which experts, or their gradients, travel compressed, and the bytes that the codec works on
    for each byte that travels.
    """
    kept: float = 1.0
    """The part of the (token, expert) pairs that experts have room for, as many of each token; others do not travel."""

    @classmethod
    def alone(
        cls,
        tokens: int,
        row_bytes: int,
        topk: int,
        local_experts: int,
        expert_bytes: int,
        gradient_bytes: int,
        imbalance: Callable[[ExpertDomains, int], float] = _even,
        gathers_again: bool = False,
        coded: Mapping[Kind, float] = MappingProxyType({}),
        kept: float = 1.0,
    ) -> MigrationLayer:
        """Returns a forward and a backward pass of the layer alone.

        Nothing is taken to hide a migration, and every pass to need one: what precedes the layer, and micro-batches
        that share one, make larger domains better than this says. Expert computation does not depend on the domains.

        Args:
            expert_bytes: of all experts of a GPU, as they travel.
            gradient_bytes: of their gradients.
            gathers_again: experts do not stay from the forward to the backward pass.
        """
        passes = (
            StreamPass(expert_bytes),
            StreamPass(gradient_bytes, Kind.REDUCE_SCATTER, expert_bytes if gathers_again else 0),
        )
        return cls(tokens, row_bytes, topk, local_experts, passes, imbalance, coded, kept)

    def exchanged(self, domains: ExpertDomains, level: int) -> float:
        """Returns the bytes of a GPU's rows in an all-to-all of a level, those included that stay."""
        regions = prod(domains.domains(outer) for outer in range(level + 1))
        experts = self.local_experts * domains.world
        others = experts * (1 - self.imbalance(domains, level) / regions)
        with_room = self.topk * self.kept
        elsewhere = 1.0  # the part of the draws in which the busiest region has none of the token's experts
        for drawn in range(ceil(with_room)):
            part = min(with_room - drawn, 1.0)
            elsewhere *= 1 - part + part * max(others - drawn, 0.0) / (experts - drawn)
        return self.tokens * self.row_bytes * regions * (1 - elsewhere)

    def gathered(self, domains: ExpertDomains, level: int, one: StreamPass) -> int:
        """Returns the bytes of experts that a GPU holds after the all-gather of a level, its own included."""
        return one.expert_bytes * prod(domains.sizes[: level + 1])

    def travels(self, domains: ExpertDomains, level: int, one: StreamPass) -> dict[Kind, int]:
        """Returns the bytes that a GPU holds after each collective of experts of a pass and
        level, as `gathered` counts.
        """
        again = one.gathered_again * prod(domains.sizes[: level + 1])
        return ({Kind.ALL_GATHER: again} if again else {}) | {one.collective: self.gathered(domains, level, one)}

    def copies(self, domains: ExpertDomains, level: int) -> float:
        """Returns the rows of a GPU in an all-to-all of a level, those included that stay."""
        return self.exchanged(domains, level) / self.row_bytes

    def sent(self, domains: ExpertDomains, level: int) -> float:
        """Returns the bytes that a GPU sends over its links of a level in all passes."""
        exchanged = self.exchanged(domains, level) * (1 - 1 / domains.domains(level))
        held = sum(sum(self.travels(domains, level, one).values()) for one in self.passes)
        migrated = held * (1 - 1 / domains.sizes[level])
        return 2 * len(self.passes) * exchanged + migrated


@dataclass(frozen=True)
class DomainChoice:
    """Domain sizes and chunks of tokens, and what all passes of a layer take with them."""

    domains: ExpertDomains
    seconds: float
    chunks: int = 1

    @property
    def holds(self) -> int:
        """Returns the number of GPUs whose experts a GPU then holds."""
        return prod(self.domains.sizes)


def all_domains(layer: MigrationLayer, workers: tuple[int, ...]) -> tuple[ExpertDomains, ...]:
    """Returns all realisable domains of a layer, in the order of `realisable`.

    Args:
        workers: of each level, the outermost first, as in ExpertDomains.

    Raises:
        ConfigurationError: a level has no worker, or a token has more experts than there are.
    """
    experts = layer.local_experts * prod(workers)
    if layer.topk > experts:
        raise ConfigurationError(f"a token cannot have {layer.topk} of {experts} experts: take a smaller top-k")
    return tuple(realisable(workers))


def least(choices: Sequence[DomainChoice]) -> DomainChoice:
    """Returns the fastest; of equal ones that which holds fewest experts, then the first. The same on every rank."""
    fastest = min(one.seconds for one in choices)
    return min((one for one in choices if one.seconds <= fastest * TIE), key=lambda one: one.holds)


def exchange_seconds(layer: MigrationLayer, domains: ExpertDomains, curves: Curves) -> float:
    """Returns the seconds of one way of the tokens, to their experts or back, over all levels."""
    return sum(
        curve_of(curves, Kind.ALL_TO_ALL, level, domains.domains(level)).seconds(layer.exchanged(domains, level))
        for level in domains.hops
    )


def codec_seconds(layer: MigrationLayer, domains: ExpertDomains, op: Op, codec: SecondsOfCodec) -> float:
    """Returns the seconds of an op that encodes or decodes what travels compressed; 0 for any other op.

    A sum of what travels whole is in the curve of its reduce-scatter.
    """
    if op.kind not in CODEC:
        return 0.0
    if op.kind is Kind.ENCODE:
        part = 1 / next(size for size in domains.sizes if size > 1)  # its own, of what the first collective brings
    elif op.kind is Kind.DECODE:
        part = 1 - 1 / prod(domains.sizes)
    else:
        level = int(op.writes[0].rpartition(".")[2])
        part = 1 - 1 / domains.sizes[level]  # what is for other ranks, or from them
    collective = Kind.ALL_GATHER if op.kind in (Kind.ENCODE, Kind.DECODE) else Kind.REDUCE_SCATTER
    return codec(op.kind, layer.coded[collective] * part * op.size)


def timelines(
    layer: MigrationLayer,
    domains: ExpertDomains,
    ways: Sequence[tuple[Schedule, Schedule]],
    expert_seconds: Sequence[float],
    cost: Callable[[Op], float],
    play: Callable[[Schedule, Callable[[Op], float]], Timeline] = simulate,
) -> list[Timeline]:
    """Returns each pass of the layer alone as the schedules that run it, one after another.

    Args:
        ways: of each pass, how tokens hop to the experts, and back.
        expert_seconds: of the experts in each pass, as much as does not hide.
        cost: seconds of an op that runs alone.
        play: plays a schedule, given what its ops take alone.
    """
    found = []
    for one, way, seconds in zip(layer.passes, ways, expert_seconds, strict=True):
        forward = one.collective is Kind.ALL_GATHER
        out, back = (play(schedule, cost) for schedule in way)
        before, after = ([play(schedule, cost) for schedule in part if schedule.ops]
                         for part in _of_experts(layer, domains, one))  # fmt: skip
        computes = Op(Kind.COMPUTE if forward else Kind.GRADIENT, Lane.COMPUTE)
        experts = Timeline.in_turn("experts", [(computes, seconds)])
        parts = [part for part in (*before, out, experts, back, *after) if part.schedule.ops]
        found.append(one_after_another("forward" if forward else "backward", numbered(parts)))
    return found


def travelling(layer: MigrationLayer, domains: ExpertDomains, forward: Schedule, backward: Schedule) -> list[Schedule]:
    """Returns the schedules of a layer's two passes with those of its experts' way before and after each."""
    found = []
    for one, of_tokens in zip(layer.passes, (forward, backward), strict=True):
        before, after = _of_experts(layer, domains, one)
        found += [schedule for schedule in (*before, of_tokens, *after) if schedule.ops]
    return found


def _of_experts(
    layer: MigrationLayer, domains: ExpertDomains, one: StreamPass
) -> tuple[list[Schedule], list[Schedule]]:
    """Returns what brings the experts of a pass here, and what returns their gradients."""
    travels = {level: layer.travels(domains, level, one) for level in range(domains.levels) if domains.sizes[level] > 1}
    gathered, returned = (
        build({level: sizes[kind] for level, sizes in travels.items() if kind in sizes}, kind in layer.coded)
        for build, kind in ((schedules.gathered, Kind.ALL_GATHER), (schedules.returned, Kind.REDUCE_SCATTER))
    )
    is_decoded = gathered.ops and Kind.ALL_GATHER in layer.coded
    decoded = [schedules.DECODED.sized([gathered.ops[-1].size])] if is_decoded else []
    return [gathered, *decoded], [returned]
