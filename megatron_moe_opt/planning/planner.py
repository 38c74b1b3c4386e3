"""What every system would take for a MoE layer, in one table, and which of them to run.

None of the five papers compares itself with the others. Here each says, with its own model, what it would do with the
same layer on the same measured cluster; what is common to all, the experts and the rows' handling on the rank itself,
is added to those whose model leaves it out. So they can be ranked:

    alltoall            the ops of MoNTA's O1 one after another, and stock's own handling of rows
    monta:LEVELxCHUNKS  planning/monta.py's pipelines
    parm:S1, parm:S2    planning/parm.py: the fused all-to-all, and SAA where all TP ranks hold the same tokens
    mpmoe:N:STRATEGY    planning/mpmoe_choice.py: N partitions through the experts; expert-TP's collectives of each run
                        in a lane of their own beside the all-to-alls, as MoNTA's do
    expert-migration:S  planning/expert_migration.py, for every realisable choice of domain sizes
    netmoe              the collectives of O1, their bytes between nodes less what placing samples saves
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.schedules import parm as parm_schedules
from megatron_moe_opt.schedules.monta import LEVELS, even_chunks
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES
from megatron_moe_opt.schedules.mpmoe import backward as mpmoe_backward
from megatron_moe_opt.schedules.mpmoe import forward as mpmoe_forward
from megatron_moe_opt.schedules.parm import TP
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Op, Schedule

from . import expert_migration, parm
from .cluster import OURS, STOCK, Cluster
from .curves import CostCurve, Costs
from .expert_migration import DomainChoice
from .layer_workload import LayerWorkload
from .link_bytes import LinkBytes
from .monta import CHUNKS, Pass, training_passes
from .partition_search import PARTITIONS
from .simulator import simulate
from .skew import Skew

ALLTOALL, MIGRATION = "alltoall", "expert-migration"
WINS_BY = 0.03
"""What takes less than stock by a smaller part of stock's time cannot be told from it: stock is taken."""
PROB_BYTES = 4
_WITH_PROBS = (0, 3)  # of `training_passes`: dispatch, and the gradients on the way back through it


@dataclass(frozen=True)
class Prediction:
    """What one candidate would take for a layer, forward and backward of one micro-batch."""

    variant: str
    """As `moe-opt bench layer --dispatchers` takes it."""
    seconds: float
    exposed: float
    """Seconds in which a collective runs and no expert computes."""
    inter_bytes: float
    """That a rank sends over links between nodes."""
    intra_bytes: float
    """That it sends inside its node."""
    activation_bytes: int
    """What forward and backward hold of rows and of what experts save (MPMoE, eq. 2); and of others' experts."""
    terms: dict[str, float] = field(default_factory=dict)
    """What `seconds` is the sum of."""

    @property
    def family(self) -> str:
        """The dispatcher type."""
        return self.variant.partition(":")[0]

    @property
    def kind(self) -> str:
        """What travels: the dispatcher type, and of expert-migration at which levels experts do. Variants of a kind
        differ in how they cut the same traffic.
        """
        family, _, setting = self.variant.partition(":")
        if family != MIGRATION:
            return family
        return f"{family}:{'x'.join('1' if size == '1' else 'S' for size in setting.split('x'))}"


@dataclass(frozen=True)
class Refusal:
    """A candidate that is not one here, and why."""

    variant: str
    reason: str


def candidates(
    workload: LayerWorkload, cluster: Cluster, budget: int | None = None
) -> tuple[tuple[Prediction, ...], tuple[Refusal, ...]]:
    """Every candidate that the cluster's measurements cover, the fastest first, and what is left out.

    The same inputs give the same answer on every rank.

    Args:
        budget: bytes of activations. What holds more is refused; stock is not.

    Raises:
        ConfigurationError: the cluster has no expert measured, or lacks what all candidates need.
    """
    planner = _Planner(workload, cluster)
    found: list[Prediction] = []
    refused: list[Refusal] = []
    for name, system in _SYSTEMS.items():
        try:
            for one in system(planner):
                if isinstance(one, Refusal):
                    refused.append(one)
                elif budget is not None and one.activation_bytes > budget and one.variant != ALLTOALL:
                    reason = f"holds {one.activation_bytes} bytes of activations, more than the budget of {budget}"
                    refused.append(Refusal(one.variant, reason))
                else:
                    found.append(one)
        except ConfigurationError as error:
            refused.append(Refusal(name, str(error)))
    if not found:
        raise ConfigurationError("; ".join(f"{one.variant}: {one.reason}" for one in refused))
    return tuple(sorted(found, key=lambda one: one.seconds)), tuple(refused)


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; stock, where it is among them and nothing is faster by WINS_BY of its time."""
    fastest = min(predictions, key=lambda one: one.seconds)
    stock = next((one for one in predictions if one.variant == ALLTOALL), None)
    if stock is not None and fastest.seconds > stock.seconds * (1 - WINS_BY):
        return stock
    return fastest


def domains(workload: LayerWorkload, cluster: Cluster) -> DomainChoice:
    """The expert domains with which a layer takes least, by the same predictions as `candidates`.

    Raises:
        ConfigurationError: the cluster lacks an expert or a group that some domains need.
    """
    return expert_migration.least([choice for choice, _ in _domain_choices(_Planner(workload, cluster))])


class _Planner:
    """A layer on a cluster, and what all candidates have in common."""

    def __init__(self, workload: LayerWorkload, cluster: Cluster) -> None:
        self.workload, self.cluster = workload, cluster
        self.costs = workload.mpmoe.costs(cluster)
        of_stock = {key: CostCurve(points) for key, points in cluster.stock_curves.items()}
        self.stock_costs = Costs({**self.costs.curves, **of_stock}, self.costs.overhead)
        self.links = LinkBytes(cluster)
        self.skew = Skew(workload.imbalance, workload.rank_rows, cluster)
        self.exchanged = workload.rows_of(self.skew.exchanged)
        """Rows of an even all-to-all that takes as long as this one."""
        self.computed = workload.rows_of(self.skew.computed())
        """Rows of every rank whose experts would take as long."""
        self.expert_seconds = sum(self.seconds_of_experts(self.computed))
        self.activation_bytes = workload.mpmoe.activation_bytes(workload.rows, 1, NONE)

    def seconds_of_experts(self, rows: int, holds: int = 1) -> tuple[float, float]:
        """Of `rows` of this rank, spread over the experts of `holds` ranks: forward, and backward."""
        one = self.workload
        layer = replace(one.mpmoe, local_experts=one.mpmoe.local_experts * holds)
        costs = layer.costs(self.cluster) if holds > 1 else self.costs
        ops = (Op(kind, Lane.COMPUTE, size=rows * one.etp * one.row_bytes) for kind in (Kind.COMPUTE, Kind.GRADIENT))
        forward, backward = (costs.curve(op).seconds(op.size) for op in ops)
        return forward, backward

    def local_seconds(self, whose: str) -> float:
        """Of what a rank does with its rows by itself."""
        points = self.cluster.local_work.get(whose)
        return CostCurve(points).seconds(self.computed * self.workload.row_bytes) if points else 0.0

    def seconds_of_copies(self, holds: int) -> float:
        """Of experts that travel, in memory: into the message, their gradients into one, the sum to the parameters'."""
        copied = (holds + 2) * self.workload.expert_bytes if holds > 1 else 0
        return self.costs.curve(Op(Kind.COPY, Lane.COMPUTE)).seconds(copied) if copied else 0.0

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Of our dispatchers, whose rows carry their probabilities."""
        one = self.workload
        return training_passes(self.exchanged, one.row_bytes, one.row_bytes + one.lane_bytes)

    @cached_property
    def edge(self) -> list[Op]:
        """Where all TP ranks hold the same tokens: output and input gradient are gathered."""
        tokens, tp = self.workload.tokens, self.workload.tp
        return [Op(Kind.ALL_GATHER, Lane.INTRA, size=tokens * self.workload.row_bytes, group=TP)] * (2 * (tp > 1))

    def prediction(
        self,
        variant: str,
        schedules: Sequence[Schedule],
        alone: Sequence[Op] = (),
        whose: str = OURS,
        costs: Costs | None = None,
    ) -> Prediction:
        """A candidate whose schedules run one after another, and so do some more ops.

        Schedules without experts have them added.
        """
        costs = costs or self.costs
        timelines = [simulate(schedule, costs, self.cluster.slowdown) for schedule in schedules]
        seconds = sum(timeline.seconds for timeline in timelines)
        in_turn = sum(map(costs, alone))
        with_experts = any(op.kind is Kind.COMPUTE for schedule in schedules for op in schedule.ops)
        terms = {
            "pipeline with experts" if with_experts else "dispatch and combine": seconds + in_turn,
            "experts": 0.0 if with_experts else self.expert_seconds,
            "rows on the rank": self.local_seconds(whose),
        }
        ops = [*alone, *(op for schedule in schedules for op in schedule.ops)]
        sent = [self.links.sent(op) for op in ops if op.kind in COLLECTIVES]
        return Prediction(
            variant,
            sum(terms.values()),
            exposed=sum(timeline.exposed for timeline in timelines)
            + sum(costs(op) for op in alone if op.kind in COLLECTIVES),
            inter_bytes=sum(inter for inter, _ in sent),
            intra_bytes=sum(intra for _, intra in sent),
            activation_bytes=self.activation_bytes,
            terms={name: value for name, value in terms.items() if value},
        )

    def stock_ops(self, rows: int) -> list[Op]:
        """Stock's, one after another: O1's, and the probabilities in messages of their own."""
        one = self.workload
        ops = []
        for number, exchanged in enumerate(training_passes(rows, one.row_bytes, one.row_bytes)):
            schedule = exchanged.schedule("O1", even_chunks(exchanged.exchanged, one.etp, 1), one.ep, one.etp)
            ops += schedule.ops
            if number in _WITH_PROBS:
                collectives = [op for op in schedule.ops if op.kind in COLLECTIVES]
                ops += [replace(op, size=op.size * PROB_BYTES // one.row_bytes) for op in collectives]
        return ops


def _stock(planner: _Planner) -> Iterator[Prediction | Refusal]:
    if planner.workload.tp > 1:
        yield Refusal(ALLTOALL, "stock Megatron does not train MoE layers under TP without sequence parallelism")
        return
    # As its collectives were measured, with both directions of a link in turn; and not faster than both at once.
    both_ways = planner.workload.rows_of(planner.skew.both_ways)
    exchanges = (both_ways, planner.stock_costs), (planner.exchanged, planner.costs)
    predictions = [planner.prediction(ALLTOALL, (), planner.stock_ops(rows), STOCK, costs) for rows, costs in exchanges]
    yield max(predictions, key=lambda one: one.seconds)


def _monta(planner: _Planner) -> Iterator[Prediction | Refusal]:
    one = planner.workload
    pipelines = [("O1", 1)] + [(level, count) for level in LEVELS if level != "O1" for count in CHUNKS if count > 1]
    for level, count in pipelines:
        schedules = [
            exchanged.schedule(level, even_chunks(exchanged.exchanged, one.etp, count), one.ep, one.etp)
            for exchanged in planner.passes
        ]
        variant = f"monta:{level}" + (f"x{count}" if level != "O1" else "")
        yield planner.prediction(variant, schedules, planner.edge)


def _parm(planner: _Planner) -> Iterator[Prediction | Refusal]:
    one = planner.workload
    if one.ep * one.etp == 1 or max(one.etp, one.tp) == 1:
        yield Refusal("parm", "experts are whole and tokens split: its all-to-all is monta:O1's")
        return

    def fused(exchanged: Pass) -> Schedule:
        build = parm_schedules.dispatch if exchanged.direction == "dispatch" else parm_schedules.combine
        return build(even_chunks(exchanged.exchanged, one.etp, 1), one.etp)

    schedules = [fused(exchanged) for exchanged in planner.passes]
    yield planner.prediction("parm:S1", schedules, planner.edge)
    if one.tp > 1:
        (choice,) = parm.predict(one.parm, one.tokens, planner.cluster, ("S2",), (None,))
        of_fused = planner.prediction("parm:S2", schedules)
        gathers = [
            planner.links.sent(Op(Kind.ALL_GATHER, Lane.INTRA, size=exchanged.exchanged * one.tp, group=TP))
            for exchanged in planner.passes
            if exchanged.direction == "combine"
        ]
        yield replace(
            of_fused,
            seconds=of_fused.seconds - of_fused.terms["dispatch and combine"] + choice.seconds,
            exposed=choice.seconds,
            inter_bytes=of_fused.inter_bytes + sum(inter for inter, _ in gathers),
            intra_bytes=of_fused.intra_bytes + sum(intra for _, intra in gathers),
            terms={**of_fused.terms, "dispatch and combine": choice.seconds},
        )


def _mpmoe(planner: _Planner) -> Iterator[Prediction | Refusal]:
    one, layer = planner.workload, planner.workload.mpmoe
    for strategy in STRATEGIES:
        for count in PARTITIONS:
            if count == 1:
                continue  # nothing to overlap or share: monta:O1
            computed, exchanged = (layer.partitions(rows, count) for rows in (planner.computed, planner.exchanged))
            parts = [replace(part, own=other.own) for part, other in zip(computed, exchanged, strict=True)]
            schedules = [
                build(strategy, parts, layer.row, one.ep, one.etp) for build in (mpmoe_forward, mpmoe_backward)
            ]
            variant = f"mpmoe:{count}" + (f":{strategy}" if strategy != NONE else "")
            # Without partition_overhead, which is of a small layer: it tells mpmoe's own model that many partitions do
            # not pay there, and would make larger layers too slow beside other systems.
            held = layer.activation_bytes(one.rows, count, strategy)
            yield replace(planner.prediction(variant, schedules, planner.edge), activation_bytes=held)


def _expert_migration(planner: _Planner) -> Iterator[Prediction | Refusal]:
    one, name = planner.workload, MIGRATION
    if one.etp > 1:
        yield Refusal(name, f"expert tensor parallelism {one.etp} cuts experts, which do not travel in parts")
        return
    if not one.workers:
        yield Refusal(name, "the network levels of the expert-parallel group are not known")
        return
    layer = one.migration(planner.skew)
    for choice, terms in _domain_choices(planner):
        domains = choice.domains
        sent = [layer.sent(domains, level) for level in range(domains.levels)]
        outside = sent[:-1] if domains.levels > 1 else sent  # the innermost of several levels is inside nodes
        between = sum(outside) if planner.links.spans_nodes else 0.0
        yield Prediction(
            f"{name}:{'x'.join(map(str, domains.sizes))}",
            choice.seconds,
            exposed=terms["tokens and experts on their way"],
            inter_bytes=between,
            intra_bytes=sum(sent) - between,
            activation_bytes=planner.activation_bytes
            + int(2 * (choice.holds - 1) * one.expert_bytes * one.resident_part),
            terms={term: value for term, value in terms.items() if value},
        )


def _domain_choices(planner: _Planner) -> Iterator[tuple[DomainChoice, dict[str, float]]]:
    """All realisable domains, with what a layer takes with them, and of what that is the sum."""
    one = planner.workload
    curves = expert_migration.measured_curves(planner.costs, one.workers)
    edge = sum(map(planner.costs, planner.edge))
    layer = one.migration(planner.skew)
    for choice in expert_migration.predict(layer, one.workers, curves):
        rows = one.rows_of(planner.skew.computed(choice.domains))
        exchange = expert_migration.exchange_seconds(layer, choice.domains, curves)
        of_passes = planner.seconds_of_experts(rows, choice.holds)
        hidden = sum(planner.skew.hidden(choice.domains, exchange, experts) for experts in of_passes)
        terms = {
            "tokens and experts on their way": choice.seconds + edge,
            "experts": sum(of_passes) - hidden,
            "rows on the rank": planner.local_seconds(OURS),
            "experts copied": planner.seconds_of_copies(choice.holds),
        }
        yield replace(choice, seconds=sum(terms.values())), terms


def _netmoe(planner: _Planner) -> Iterator[Prediction | Refusal]:
    saving = planner.workload.placement_saving
    if saving is None:
        yield Refusal("netmoe", "what it saves depends on which samples use which experts: give a routing trace")
        return
    if planner.workload.tp > 1:
        yield Refusal("netmoe", "samples do not move where all TP ranks hold the same tokens")
        return
    ops = planner.stock_ops(planner.exchanged)
    of_stock = planner.prediction("netmoe", (), ops)
    collectives = [op for op in ops if op.kind in COLLECTIVES]
    saved = saving * sum(planner.costs(op) for op in collectives if planner.links.sent(op)[0] > 0)
    yield replace(
        of_stock,
        seconds=of_stock.seconds - saved,
        exposed=of_stock.exposed - saved,
        inter_bytes=of_stock.inter_bytes * (1 - saving),
        terms={**of_stock.terms, "dispatch and combine": of_stock.terms["dispatch and combine"] - saved},
    )


_SYSTEMS: dict[str, Callable[[_Planner], Iterator[Prediction | Refusal]]] = {
    ALLTOALL: _stock,
    "monta": _monta,
    "parm": _parm,
    "mpmoe": _mpmoe,
    MIGRATION: _expert_migration,
    "netmoe": _netmoe,
}
