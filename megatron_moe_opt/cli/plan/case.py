"""A MoE layer of a model on a cluster, and what could run it: what every table of `moe-opt plan` is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_moe_opt import __version__
from megatron_moe_opt.cli.plan.settings import PlanSettings, Site, workload_of
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.plan_file import Plan, facts_of_plan
from megatron_moe_opt.planning.planner import Beside, best, candidates, fastest_narrowed
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.overlapped_batches import overlapped
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, HeldMore, Prediction, Refusal
from megatron_moe_opt.planning.training.memory import (
    RECOMPUTE,
    BytesPerParameter,
    TellingStage,
    layer_activations,
    telling_stages,
)
from megatron_moe_opt.planning.training.model import ModelShape
from megatron_moe_opt.planning.training.pipeline import unpaired
from megatron_moe_opt.planning.training.step_costs import StepCosts, communication
from megatron_moe_opt.planning.training.throughput import Throughput, outside_experts, throughput
from megatron_moe_opt.row_format import Wire, narrower
from megatron_moe_opt.topology.expansion import Expansion, choose
from megatron_moe_opt.variants import split_wire

FITS, FITS_OVERLAPPED = 0.9, 0.8
"""The part of a GPU's memory that may be planned with: workspaces and buffers of NCCL are not counted. Where
micro-batches overlap, the allocator keeps what the stream for communication has freed apart, too: 64 H100 with 70 of
their 80 GB allocated so were full, and ran at a sixth of their speed (github.com/NVIDIA/Megatron-LM/pull/6429).
"""


def fits_part(overlaps: bool) -> float:
    """Returns the part of a GPU's memory that may be planned with, given whether micro-batches overlap."""
    return FITS_OVERLAPPED if overlaps else FITS


Predict = Callable[..., tuple[tuple[Prediction, ...], tuple[Refusal, ...]]]
"""A function that predicts candidates, given what planner.bound_and_stock is."""


@dataclass(frozen=True)
class _Stage:
    """What a GPU of a pipeline stage holds, in bytes."""

    stock: TellingStage
    """Under stock."""
    again: int
    """What a layer keeps while it runs again, one at a time; 0: none does."""

    def most(self, more: HeldMore) -> float:
        """Returns the most that it holds at once, where each MoE layer holds so much more."""
        stock, runs_again = self.stock, self.again > 0
        at_work = self.again + (stock.moe_layers > 0) * (more.at_work + runs_again * more.of_pass)
        passes = 0.0 if runs_again else stock.moe_layers * stock.passes
        held = stock.memory.total + passes * more.of_pass + stock.moe_layers * more.of_others
        return held + max(stock.logits, at_work)


@dataclass(frozen=True)
class Case:
    """The MoE layer of a model on a cluster, for one length of sequences, and what could run it."""

    settings: PlanSettings
    model: ModelShape
    site: Site
    sequence: int
    workload: LayerWorkload
    candidates: tuple[Prediction, ...]
    """All that the cluster's costs cover, the fastest first."""
    refused: tuple[Refusal, ...]

    @classmethod
    def of(
        cls, settings: PlanSettings, model: ModelShape, site: Site, sequence: int, predict: Predict | None = None
    ) -> Case:
        """Predicts one MoE layer, which stands for all of the model: they are alike.

        Args:
            predict: which candidates; None: all (planner.candidates).
        """
        workload = workload_of(settings, model, site, sequence)
        empty = cls(settings, model, site, sequence, workload, (), ())
        found, refused = (predict or candidates)(
            workload, site.cluster, settings.activation_budget, beside=empty.beside
        )
        return replace(empty, candidates=found, refused=refused)

    def predicted(self, predict: Predict | None = None) -> Case:
        """Returns the same layer with other candidates, as `of` has them."""
        return Case.of(self.settings, self.model, self.site, self.sequence, predict)

    @cached_property
    def chosen(self) -> Prediction:
        """Returns the candidate to run in all MoE layers: the best of those that fit, or of all where none does."""
        alone = self._alone
        fitting = [one for one in self.candidates if self.fits(one)] or self.candidates
        return best(fitting, lambda one: one.seconds + alone * one.hidden)

    @property
    def _alone(self) -> float:
        """Returns the part of a step's passes that run beside no other where micro-batches overlap."""
        layout, micro_batches = self.site.layout, self.settings.micro_batches
        return unpaired(layout, micro_batches, self.settings.overlaps) / (micro_batches * layout.vpp)

    @cached_property
    def stock(self) -> Prediction | None:
        """Returns the candidate that stock Megatron is; None where stock does not train."""
        return next((one for one in self.candidates if one.variant == ALLTOALL), None)

    @cached_property
    def narrowed(self) -> dict[Wire, Prediction]:
        """Returns the fastest candidate with each format in which rows would be narrower on the wire."""
        wires = narrower(self.workload.element_bytes)
        budget = self.settings.activation_budget
        return fastest_narrowed(self.workload, self.site.cluster, budget, wires, self.beside)

    @property
    def beside(self) -> Beside | None:
        """Returns what makes of a prediction one of a layer whose micro-batches overlap; None: they do not."""
        settings, site = self.settings, self.site
        if not settings.overlaps:
            return None
        outside = outside_experts(
            self.model, site.layout, site.device, settings.micro_batch, self.sequence, self._besides
        )
        return lambda one: overlapped(one, outside, site.cluster.slowdown)

    @property
    def expansion(self) -> Expansion | None:
        """Returns how MoNTA would lay CP to EP; None where TP, CP and EP leave no choice, or its rule has no layout.

        The rule is for TP, and expert-TP as much, over whole nodes: elsewhere vertical groups may lie inside one.
        """
        layout, nodes = self.site.layout, self.site.cluster.world.nodes
        over_nodes = layout.tp == layout.expert_tp and layout.tp % nodes.count(nodes[0]) == 0
        return choose(layout) if over_nodes and min(layout.cp, layout.ep) > 1 else None

    @property
    def families(self) -> list[str]:
        """Returns the systems that have candidates, the one of the fastest candidate first."""
        return list(dict.fromkeys(one.family for one in self.candidates))

    def candidate(self, variant: str) -> Prediction:
        """Returns the candidate of this name. Raises ConfigurationError where there is none."""
        for one in self.candidates:
            if one.variant == variant:
                return one
        reasons, family = {one.variant: one.reason for one in self.refused}, variant.partition(":")[0]
        why = reasons.get(variant) or reasons.get(family)
        if why is None and split_wire(variant)[1] is not None:
            why = "formats of the wire are lossy, and no candidate has one: leave it out"
        if why is None:
            alike = [one.variant for one in self.candidates if one.family == family]
            known = alike or [self.best_of(family).variant for family in self.families]
            why = f"choose one of {', '.join(known)}" + (", or of the others in the table of --all" * (not alike))
        raise ConfigurationError(f"--draw {variant} is not a candidate here: {why}")

    def best_of(self, family: str) -> Prediction | None:
        """Returns the fastest candidate of a system; None where it has none."""
        return next((one for one in self.candidates if one.family == family), None)

    def memory(self, one: Prediction) -> float:
        """Returns bytes of a GPU of the pipeline stage that holds most: stock's, and what the candidate's layers hold
        more, or less.
        """
        return self._memory(one.held_more)

    def _memory(self, more: HeldMore) -> float:
        return max(one.most(more) for one in self._stages)

    @cached_property
    def _stages(self) -> list[_Stage]:
        """Returns what a GPU of each telling stage holds."""
        settings, model, layout = self.settings, self.model, self.site.layout
        batch, element_bytes = (settings.micro_batch, self.sequence), settings.element_bytes
        rows, runs_again = self.workload.rows * layout.expert_tp, settings.recompute == RECOMPUTE[-1]
        stages = telling_stages(
            model, layout, *batch, settings.micro_batches, settings.recompute, BytesPerParameter.of(element_bytes),
            rows, settings.overlaps,
        )  # fmt: skip

        def again(stage: TellingStage) -> int:
            of_layer = layer_activations(
                model, layout, *batch, rows=rows, moe=stage.moe_layers > 0, element_bytes=element_bytes
            )
            return sum(of_layer.values())

        return [_Stage(stage, again(stage) if runs_again else 0) for stage in stages]

    def fits(self, one: Prediction) -> bool:
        """Whether a GPU can hold the candidate in what may be planned with; True where its memory is not known."""
        return self.has_room(one.held_more)

    def has_room(self, more: HeldMore) -> bool:
        """Whether a GPU can hold so much more of each MoE layer than stock's, by the same rule as `fits`."""
        return self.site.memory is None or self._memory(more) <= fits_part(self.settings.overlaps) * self.site.memory

    def step(self, one: Prediction) -> Throughput | None:
        """Returns what a training step takes under a candidate; None where the speed of a GPU is not known."""
        settings, model, site = self.settings, self.model, self.site
        if site.device is None:
            return None
        sizes = model, site.layout, site.device, settings.micro_batch, self.sequence, settings.micro_batches
        again = (one.seconds - one.exposed) / 3 + one.exposed / 2
        return throughput(
            *sizes, one.seconds, with_experts=True, besides=self._besides, recompute=settings.recompute,
            exchange_again=again, hidden=one.hidden,
        )  # fmt: skip

    @cached_property
    def _besides(self) -> StepCosts:
        settings, site = self.settings, self.site
        tokens = settings.micro_batch * self.sequence // site.layout.cp
        return communication(
            self.model, site.layout, site.cluster, tokens, settings.element_bytes, settings.sequence_parallel
        )

    def plan(self) -> Plan:
        """Returns the plan that runs the chosen candidate in all MoE layers, the others as runners-up."""
        layout, model = self.site.layout, self.model
        layers = range(model.dense_layers + 1, model.layers + 1)  # Megatron counts from 1
        made_for = facts_of_plan(
            hidden=model.hidden, ffn=model.ffn, topk=model.topk, dtype=self.settings.dtype, ranks=layout.world,
            tokens=self.workload.tokens, version=__version__, overlaps=self.settings.overlaps,
        )  # fmt: skip
        lies = self.expansion
        expansion = lies and {"direction": lies.direction, "reason": lies.reason, "order": lies.chosen.order,
                              "switch_ranks": lies.network}  # fmt: skip
        return Plan(
            dict.fromkeys(layers, self.chosen.variant), self.candidates, self.settings.cluster, layout.ep,
            layout.expert_tp, model.experts, self.site.cluster.gpu_settings, made_for, expansion or {},
        )  # fmt: skip
