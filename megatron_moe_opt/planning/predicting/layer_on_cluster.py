"""A layer on a cluster, and what predictions of all systems have in common: costs, skew, experts, rows on the rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from megatron_moe_opt.planning.costs.cluster import OURS, Cluster
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.planning.costs.domain_curves import Curves, measured_curves
from megatron_moe_opt.planning.costs.expert_costs import costs_with_experts
from megatron_moe_opt.planning.costs.link_bytes import LinkBytes
from megatron_moe_opt.planning.predicting.layer_passes import Pass, training_passes
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.partitioned_rows import activation_bytes
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction
from megatron_moe_opt.planning.predicting.simulator import lane_rate
from megatron_moe_opt.planning.predicting.skew import Skew
from megatron_moe_opt.schedules.groups import EXPERT_TP, TP
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane, Op, Schedule
from megatron_moe_opt.schedules.timeline import Timeline
from megatron_moe_opt.topology.domains import ExpertDomains, stationary

PIPELINE = "pipeline with experts"
"""The name of the term of schedules that experts are part of."""
DISPATCH = "dispatch and combine"
"""The name of the term of all other schedules."""
EXPERTS = "experts"
"""The name of the term of experts that are part of no schedule."""
_CONVERT = (Kind.COPY, Kind.PERMUTE, Kind.SUM)
CODEC_COPIES = {
    Kind.ENCODE: 1.0,  # reads experts and what others hold of them
    Kind.DECODE: 0.5,  # changes elements here and there, of which memory moves 32 bytes
    Kind.ENCODE_GRADIENT: 3.5,  # adds to what was kept, reads that, takes away what is sent, and checks it
    Kind.DECODE_GRADIENT: 2.0,  # decodes a part into zeros, and adds it to the sum of others
}
"""How often the codec is taken to copy each byte where no profile measured it; a copy reads a byte and writes one. It
is bound by memory (docs/residual-codec.md); of what travels both are little.
"""
_WITH_PROBS = (0, 3)  # of `training_passes`: dispatch, and the gradients on the way back through it


class LayerOnCluster:
    """A layer on a cluster, and what all candidates have in common. Experts that were not measured are left out."""

    def __init__(
        self,
        workload: LayerWorkload,
        cluster: Cluster,
        below: float = math.inf,
        has_room: Callable[[HeldMore], bool] = lambda more: True,
    ) -> None:
        """
        Args:
            below: seconds. Candidates that take as long, whatever they hide, are not asked for.
            has_room: whether candidates that hold so much more than stock are asked for.
        """
        self.workload, self.cluster, self.below, self.has_room = workload, cluster, below, has_room
        self._costs: dict[int, Costs] = {}
        self.costs = cluster.costs if cluster.expert_gemm is None else self.costs_with(holds=1)
        self.links = LinkBytes(cluster, stationary(workload.workers) if workload.workers else None)
        self.skew = Skew(workload.imbalance, workload.rank_rows, cluster)
        self.exchanged = workload.rows_of(self.skew.exchanged)
        """The rows of a rank in an even all-to-all that takes as long as this one."""
        self.computed = workload.rows_of(self.skew.computed())
        """The rows of every rank whose experts, evenly loaded, would take as long."""
        self._best_rates: dict[Lane, tuple[float, float]] = {}
        self.activation_bytes = activation_bytes(workload, workload.rows, 1, NONE)

    @cached_property
    def domain_curves(self) -> Curves:
        """Returns what collectives take on this layer's network levels, as far as they were measured."""
        return measured_curves(self.costs, self.workload.workers)

    def costs_with(self, holds: int) -> Costs:
        """Returns the costs of all ops, the experts' too, where a rank's rows are spread over the experts of `holds`
        ranks: 1 where no expert travels. Raises ConfigurationError where no expert was measured.
        """
        if holds not in self._costs:
            self._costs[holds] = costs_with_experts(self.workload, self.cluster, holds)
        return self._costs[holds]

    def seconds_of_experts(self, rows: int, holds: int = 1) -> tuple[float, float]:
        """Returns the seconds of `rows` of this rank, spread over the experts of `holds`
        ranks: forward, and backward.
        """
        one = self.workload
        costs = self.costs_with(holds)
        ops = (Op(kind, Lane.COMPUTE, size=rows * one.etp * one.row_bytes) for kind in (Kind.COMPUTE, Kind.GRADIENT))
        forward, backward = map(costs.alone, ops)
        return forward, backward

    def expert_timelines(self) -> list[Timeline]:
        """Returns the experts on this rank's rows, forward and backward; nothing where they were not measured."""
        if self.cluster.expert_gemm is None:
            return []
        ops = (Op(kind, Lane.COMPUTE) for kind in (Kind.COMPUTE, Kind.GRADIENT))
        with_seconds = zip(ops, self.seconds_of_experts(self.computed), strict=True)
        return [Timeline.in_turn("experts", [one]) for one in with_seconds]

    def local_timeline(self, whose: str, rows: int | None = None) -> Timeline:
        """Returns what a rank does with its rows by itself, as one op; empty where that was not measured.

        Args:
            rows: those that it computes, unless it moves fewer by itself.
        """
        points, rows = self.cluster.local_work.get(whose), self.computed if rows is None else rows
        seconds = CostCurve(points).seconds(rows * self.workload.row_bytes) if points else 0.0
        return Timeline.in_turn("rows on the rank", [(Op(Kind.PERMUTE, Lane.COMPUTE), seconds)])

    def best_rates(self, lane: Lane) -> tuple[float, float]:
        """Returns the highest rate of an op in this lane while another op computes, and that of the other op.

        Whatever other lanes are busy, neither is faster: bounds of what a layer takes at least are made of these.
        """
        if lane not in self._best_rates:
            others = [other for other in Lane if other not in (lane, Lane.COMPUTE)]
            besides = [beside for n in range(len(others) + 1) for beside in combinations(others, n)]
            slowdown = self.cluster.slowdown or {}
            self._best_rates[lane] = (
                max(lane_rate(lane, (Lane.COMPUTE, *beside), slowdown) for beside in besides),
                max(lane_rate(Lane.COMPUTE, (lane, *beside), slowdown) for beside in besides),
            )
        return self._best_rates[lane]

    def seconds_to_copy(self, num_bytes: float) -> float:
        """Returns the seconds to copy so many bytes in a rank's memory."""
        return self.costs.curve(Op(Kind.COPY, Lane.COMPUTE)).seconds(num_bytes) if num_bytes else 0.0

    def seconds_of_codec(self, kind: Kind, num_bytes: float) -> float:
        """Returns the seconds of an op that encodes or decodes so many bytes of experts, or of
        their float32 gradients.
        """
        curve = self.costs.curves.get((kind, None))
        return self.seconds_to_copy(CODEC_COPIES[kind] * num_bytes) if curve is None else curve.seconds(num_bytes)

    def held_bytes_of_others(self, domains: ExpertDomains) -> int:
        """Returns the bytes of gathered experts and of others' gradients that a rank holds on its device, and of its
        own experts as they were sent: by these it sees whether they have changed.
        """
        world = self.cluster.world
        crosses = domains.experts_cross_nodes([world.nodes[rank] for rank in world.layout.first_group("ep")])
        one, others = self.workload, math.prod(domains.sizes) - 1
        if not others:
            return 0
        gathered_again = one.resident_part * one.expert_bytes  # what is gathered has the own ones among the others'
        return int(others * one.held_bytes_of_others(crosses) + gathered_again + one.expert_bytes)

    def bytes_of_copies(self, holds: int) -> int:
        """Returns the bytes that are copied in memory of experts which travel: into the message, their gradients into
        one, and the sum to the parameters'.
        """
        return (holds + 2) * self.workload.expert_bytes if holds > 1 else 0

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Returns the passes of our dispatchers, whose rows carry their probabilities."""
        one = self.workload
        return training_passes(self.exchanged, one.outbound_bytes, one.packed_row_bytes, one.homebound_bytes)

    @cached_property
    def edge(self) -> list[Op]:
        """Returns the ops where all TP ranks hold the same tokens: output and input gradient are gathered, and the
        router's gradient is summed in float32, which takes what two gathers of it take.
        """
        one = self.workload
        if one.tp == 1:
            return []
        sizes = [one.tokens * one.row_bytes] * 2 + [one.experts * one.hidden * 4] * 2
        return [Op(Kind.ALL_GATHER, Lane.INTRA, size=size, group=TP) for size in sizes]

    def prediction(
        self,
        variant: str,
        schedules: Sequence[Schedule],
        alone: Sequence[Op] = (),
        whose: str = OURS,
        costs: Callable[[Op], float] | None = None,
        parts: int = 1,
        local_rows: int | None = None,
        links: LinkBytes | None = None,
    ) -> Prediction:
        """Returns a candidate whose schedules run one after another, and so do some more ops.

        Schedules without experts have them added. `local_rows` as in `local_timeline`; `links` as in `played`.
        """
        costs = self.converting(costs or self.costs)
        cluster = self.cluster
        timelines = [cluster.simulate(schedule, costs) for schedule in schedules]
        if alone:
            timelines.append(Timeline.in_turn("one after another", ((op, costs(op)) for op in alone)))
        return self.played(variant, timelines, whose, parts, local_rows, links)

    def converting(self, costs: Callable[[Op], float]) -> Callable[[Op], float]:
        """Returns the costs where rows travel narrower: they are converted where they are copied and summed, which is
        taken to cost what it costs to copy them as experts have them.
        """
        one = self.workload
        wider = 2 * one.row_bytes / (one.outbound_bytes + one.homebound_bytes)
        if wider == 1:
            return costs
        return lambda op: costs(replace(op, size=round(op.size * wider)) if op.kind in _CONVERT else op)

    def played(
        self,
        variant: str,
        timelines: Sequence[Timeline],
        whose: str = OURS,
        parts: int = 1,
        local_rows: int | None = None,
        links: LinkBytes | None = None,
    ) -> Prediction:
        """Returns a candidate that takes these timelines, rows on the rank, and experts where they lack them: then the
        first four are those of PASSES.

        Args:
            links: over which it sends, where experts travel.
        """
        ops = [op for timeline in timelines for op in timeline.schedule.ops]
        with_experts = any(op.kind is Kind.COMPUTE for op in ops)
        experts = [] if with_experts else self.expert_timelines()
        local = self.local_timeline(whose, local_rows)
        in_order = list(timelines)
        for place, of_pass in zip((1, 4), experts, strict=False):  # behind each dispatch, forward and backward
            in_order.insert(place, of_pass)
        terms = {
            PIPELINE if with_experts else DISPATCH: sum(one.seconds for one in timelines),
            EXPERTS: sum(one.seconds for one in experts),
            "rows on the rank": local.seconds,
        }
        inter, intra = (links or self.links).sent_by_all(ops)
        in_order = [one for one in (*in_order, local) if one.seconds]
        return Prediction(
            variant,
            sum(one.seconds for one in in_order),
            exposed=sum(timeline.exposed for timeline in timelines),
            inter_bytes=inter,
            intra_bytes=intra,
            activation_bytes=self.activation_bytes,
            terms={name: value for name, value in terms.items() if value},
            parts=parts,
            timelines=tuple(in_order),
        )

    def stock_timelines(self) -> list[Timeline]:
        """Returns stock's passes, op by op: O1's, and the probabilities in messages of their own. In their type outputs
        are summed, and their gradients gathered, over expert-TP.
        """
        one, timelines = self.workload, []
        prob_bytes = one.prob_bytes or one.element_bytes
        for number, exchanged in enumerate(training_passes(self.exchanged, one.row_bytes, one.row_bytes)):
            schedule = exchanged.schedule("O1", even_chunks(exchanged.exchanged, one.etp, 1), one.ep, one.etp)
            ops = list(schedule.ops)
            if number in _WITH_PROBS:
                collectives = [op for op in schedule.ops if op.kind in COLLECTIVES]
                ops += [replace(op, size=op.size * prob_bytes // one.row_bytes) for op in collectives]
            else:
                ops = [
                    replace(op, size=op.size * prob_bytes // one.element_bytes) if op.group == EXPERT_TP else op
                    for op in ops
                ]
            timelines.append(Timeline.in_turn(f"stock {exchanged.direction}", ((op, self.costs(op)) for op in ops)))
        return timelines
