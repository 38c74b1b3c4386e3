"""Dispatch, experts and combine of several partitions as one pipeline: a differentiable function around the executor.

Every partition is an exchange of its own, of a part of this rank's rows, on a way of any kind. Gradients of parameters
are summed over partitions, in their order, and returned once from the one autograd function that the layer sees, so
that whatever waits for a gradient (DDP, the distributed optimizer) gets it once and complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.offload import OffloadedTensor
from megatron_moe_opt.runtime.engine.recomputation import saved_tensors_are_hooked
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
from megatron_moe_opt.runtime.rows.row_layout import AtExperts
from megatron_moe_opt.runtime.rows.wire_rows import WireRows
from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall, Experts
from megatron_moe_opt.runtime.through_experts.partition_buffers import PartitionBuffers
from megatron_moe_opt.runtime.through_experts.saved_middle import addresses_of
from megatron_moe_opt.runtime.through_experts.shared_call import SharedCall, SharedExperts
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES, Restore
from megatron_moe_opt.schedules.mpmoe import SHARED_OUTPUT_GRADIENTS, SHARED_TOKENS
from megatron_moe_opt.schedules.partition_rows import (
    INPUT_GRADIENTS,
    INPUTS,
    OUTPUT_GRADIENTS,
    OUTPUTS,
    Moved,
    RowBytes,
    place_of,
)
from megatron_moe_opt.schedules.pipeline import Stages, base_name
from megatron_moe_opt.schedules.schedule import OF_SHARED_EXPERTS, Kind, MovingSchedule, Op, Outline

_Computed = tuple[torch.Tensor, torch.Tensor | None]
"""The rows of a partition, and what their probabilities' lanes get."""


def through_experts(
    packed: torch.Tensor,
    wire: WireRows,
    experts: Experts,
    exchanges: Sequence[Exchange],
    strategy: str,
    prob_dtype: torch.dtype,
    shared: tuple[SharedExperts, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sends rows to their experts, through them and back, partition by partition. Differentiable once.

    Args:
        packed: stands for the rows on the wire: of one partition after those of another, with their probabilities.
        exchanges: one a partition, all on ways of the same kind.
        strategy: of memory reuse, a key of schedules.memory_reuse.STRATEGIES.
        prob_dtype: dtype of the probabilities.
        shared: the shared experts that run beside, and their tokens. Not where saved tensors are hooked.

    Returns:
        What stands for the rows that have returned to where they came from, on the wire again: sums over the ranks
        that had a part of a row's outputs. Where a TP group has shared them out, all of its rows. And what the shared
        experts return.
    """
    call = None if shared is None else SharedCall(*shared)
    if not torch.is_grad_enabled():  # nothing to restore: partitions share buffers, and T_M is never saved
        wire.rows = _Pass(experts, exchanges, "S4", prob_dtype, call).forward(wire.take_rows())
        return packed, None if call is None else call.take_output()
    pass_ = _Pass(experts, exchanges, strategy, prob_dtype, call)
    return _ThroughExperts.apply(packed, wire, pass_, None if call is None else call.begin(), *experts.trained)


class _ThroughExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, wire: WireRows, pass_: _Pass, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.wire, ctx.pass_ = wire, pass_
        wire.rows = pass_.forward(wire.take_rows())
        ctx.save_for_backward(*pass_.hand_over())
        return packed.new_empty(0), None if pass_.shared is None else pass_.shared.take_output()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, stand_in: torch.Tensor, grad_shared: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.pass_ is None:
            raise RuntimeError("a layer of mpmoe frees what it saved in its backward pass, which cannot run twice")
        if ctx.pass_.shared is not None:
            ctx.pass_.shared.check_backward()
        pass_, ctx.pass_ = ctx.pass_, None
        pass_.take_back(iter(ctx.saved_tensors))  # runs the layer again, if at all, before an op of this pass does
        ctx.maybe_clear_saved_tensors()
        ctx.wire.gradients, of_parameters = pass_.backward(ctx.wire.take_gradients(), grad_shared)
        return stand_in, None, None, None if pass_.shared is None else pass_.shared.take_gradient(), *of_parameters


class _Pass:
    """One forward pass of a layer, and what its backward pass needs."""

    def __init__(
        self,
        experts: Experts,
        exchanges: Sequence[Exchange],
        strategy: str,
        prob_dtype: torch.dtype,
        shared: SharedCall | None,
    ) -> None:
        self.experts, self.strategy, self.prob_dtype, self.shared = experts, strategy, prob_dtype, shared
        self.hands_over = saved_tensors_are_hooked()
        self.exchanges, way = exchanges, exchanges[0].way
        self._stages = way.stages
        self.layouts = {
            INPUTS: way.outbound(prob_dtype),
            OUTPUTS: way.homebound(None),
            OUTPUT_GRADIENTS: way.outbound(None),
            INPUT_GRADIENTS: way.homebound(prob_dtype),
        }
        self.partitions = [one.way.rows_of(one.plan) for one in exchanges]
        self._returned = [rows.returned for rows in self.partitions]
        self.calls: list[ExpertCall] = []
        self.kept: dict[str, torch.Tensor] = {}
        """Buffers of the forward pass that backward reads."""
        self.rows: torch.Tensor | None = None
        """Packed rows, kept where they are communicated again."""
        self.host_tokens: dict[int, OffloadedTensor] = {}

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """Sends rows to the experts and returns the rows that are back where they came from."""
        self.experts.shown.use_only_their_own = False  # somebody may have begun to train something else since
        how = STRATEGIES[self.strategy]
        addresses = addresses_of((*self.experts.parameters, *self.experts.constants))
        probs = [empty((rows.gathered,), self.prob_dtype, packed.device) for rows in self.partitions]
        of_all = how.middle, addresses, self.hands_over, executor(packed.device).issue_meanwhile
        self.calls = [
            ExpertCall(self.experts, one.plan.tokens_per_expert, of_partition, *of_all)
            for one, of_partition in zip(self.exchanges, probs, strict=True)
        ]
        combined = self.layouts[OUTPUTS].at_source.empty_rows(sum(self._returned), packed)
        rows = self._named("rows", packed)
        moving = self._schedule(mpmoe.forward_outline)
        given = rows | self._returning("combined", combined)
        buffers = PartitionBuffers(self.exchanges, self.layouts, given, moving.schedule)
        outputs: dict[int, _Computed] = {}

        def compute(j: int, tokens: torch.Tensor) -> None:
            self._free_sent(outputs, j)
            if j >= how.middle_buffers:
                self.calls[j - how.middle_buffers].middle.free()
            # Rows are copied as bytes: they are sent as they came, whatever dtype a module of somebody's returns.
            outputs[j] = _of_its_own(self.calls[j].forward(tokens).to(tokens.dtype).contiguous(), tokens), None

        def bind(op: Op) -> Steps:
            j, target = op.chunk, base_name(op.writes[0])
            if op.kind in OF_SHARED_EXPERTS:
                return steps.call(self.shared.run_first if op.reads[0] == SHARED_TOKENS else self.shared.run_second)
            if op.kind is Kind.COMPUTE:
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(partial(compute, j, tokens))
            if op.kind is Kind.OFFLOAD and target == "host_tokens":
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: self.host_tokens.update({j: OffloadedTensor(tokens)}))
            if op.kind is Kind.OFFLOAD:
                return steps.call(self.calls[j].offload_middle)
            return self._move(op, buffers, probs[j], lambda: outputs[j])

        self._run(moving, bind, packed.device)
        for call in self.calls[-how.middle_buffers :]:
            call.middle.free()
        if how.inputs is Restore.KEEP:
            inputs = {f"tokens.{j}": buffers.rows(f"tokens.{j}", j) for j in range(len(self.exchanges))}
            # Autograd holds those of which experts have saved a part; experts in FP8, or frozen ones, save none.
            is_saved = how.middle is Restore.KEEP and not self.hands_over
            self.kept = {name: _without_memory(rows) for name, rows in inputs.items()} if is_saved else inputs
        elif how.inputs is Restore.COMMUNICATE:
            self.rows = packed
        return combined

    def backward(
        self, grad_combined: torch.Tensor, grad_shared: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Returns the gradients of the rows to the experts and of each parameter, from those of the rows that came back
        and of what the shared experts returned.
        """
        given = self._named("grad_combined", grad_combined) | self.kept
        home = self.layouts[INPUT_GRADIENTS].at_source
        grad_packed, self.rows = self.rows, None
        if grad_packed is not None:
            given |= self._named("rows", grad_packed)
        shape = sum(self._returned), home.width
        if grad_packed is None or (grad_packed.dtype, grad_packed.shape) != (home.wire_dtype, shape):
            grad_packed = home.blank_rows(sum(self._returned), grad_combined)
        # Else nobody wants the rows any more that have been communicated again: their gradients take their place.
        given |= self._returning("grad_rows", grad_packed, "grad_")
        moving = self._schedule(mpmoe.backward_outline)
        buffers = PartitionBuffers(self.exchanges, self.layouts, given, moving.schedule)
        beside = STRATEGIES[self.strategy].middle_buffers
        for call in self.calls[:beside]:
            call.middle.make_room()
        grads: dict[int, _Computed] = {}
        may_fuse = self.experts.fuses and self.experts.borrowed is None
        of_parameters = [_Sum(parameter, len(self.exchanges), may_fuse) for parameter in self.experts.trained]

        def take(number: int, grad: torch.Tensor | None) -> None:
            of_parameters[number].add(grad)

        def gradient(j: int, tokens: torch.Tensor, grad_output: torch.Tensor) -> None:
            self._free_sent(grads, j)
            grad_tokens, grad_probs = self.calls[j].backward(tokens, grad_output, take)
            grads[j] = _of_its_own(grad_tokens.contiguous(), grad_output), grad_probs.contiguous()
            # Now, in memory that is free by now: what the next partition frees is in use while the copy runs.
            for call in self.calls[j + beside : j + beside + 1]:
                call.middle.make_room()

        def bind(op: Op) -> Steps:
            j, target = op.chunk, base_name(op.writes[0])
            if op.kind in OF_SHARED_EXPERTS:
                if op.reads[0] == SHARED_OUTPUT_GRADIENTS:
                    return steps.call(lambda: self.shared.backward_of_second(grad_shared))
                return steps.call(self.shared.backward_of_first)
            if op.kind is Kind.GRADIENT:
                tokens, *_, grad_output = op.reads
                return steps.call(partial(gradient, j, buffers.rows(tokens, j), buffers.rows(grad_output, j)))
            if op.kind is Kind.COMPUTE:
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: self.calls[j].recompute(tokens))
            if op.kind is Kind.ACTIVATE:
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: self.calls[j].activate(tokens))
            if op.kind is Kind.PREFETCH and target == "tokens":
                tokens = buffers.rows(op.writes[0], j)
                return steps.call(lambda: self.host_tokens.pop(j).to_device(tokens))
            if op.kind is Kind.PREFETCH:
                return steps.call(self.calls[j].middle.fetch)
            return self._move(op, buffers, None, lambda: grads[j])

        self._run(moving, bind, grad_combined.device)
        return grad_packed, [total.take() for total in of_parameters]

    def hand_over(self) -> list[torch.Tensor]:
        """Returns what backward needs and is in the device's memory, for autograd to save: the pass holds it no longer.

        Nothing where saved tensors are not hooked: here they are freed partition by partition.
        """
        if not self.hands_over:
            return []
        kept, rows = self.kept, self.rows
        self.kept, self.rows = dict.fromkeys(kept), None
        middle = [tensor for call in self._keeping for tensor in call.middle.hand_over()]
        return [*kept.values(), *([] if rows is None else [rows]), *middle]

    def take_back(self, saved: Iterator[torch.Tensor]) -> None:
        """Takes from `saved` what `hand_over` has returned, in its order."""
        if not self.hands_over:
            return
        self.kept = {name: next(saved) for name in self.kept}
        if STRATEGIES[self.strategy].inputs is Restore.COMMUNICATE:
            self.rows = next(saved)
        for call in self._keeping:
            call.middle.take_back(saved)

    @property
    def _keeping(self) -> list[ExpertCall]:
        """Returns the calls whose T_M stays on the device."""
        return self.calls if STRATEGIES[self.strategy].middle is Restore.KEEP else []

    def _move(
        self, op: Op, buffers: PartitionBuffers, probs: torch.Tensor | None, computed: Callable[[], _Computed]
    ) -> Steps:
        """Returns the steps of an op of a way, for the partition that it moves.

        Args:
            probs: where the probabilities of rows that are sorted by expert go, if anywhere.
            computed: returns what is sorted by source, which is computed by then.
        """
        j, exchange, written = op.chunk, self.exchanges[op.chunk], buffers.rows(op.writes[0], op.chunk, op.part)
        move, buffer = place_of(op.writes[0])
        way, plan, layout = exchange.way, exchange.plan, self.layouts[move]
        if base_name(op.reads[0]) == move.source and not move.is_out:

            def unsort() -> None:
                tokens, of_probs = computed()
                steps.run_now(way.unsort(AtExperts(written, tokens, of_probs, None, plan, op.part, layout)))

            return steps.call(unsort)
        reads = [buffers.rows(name, j, op.part) for name in op.reads]
        of_plan = op if self._stages.chunks == 1 else replace(op, chunk=op.part)  # a partition has a plan of its own
        if not move.is_out:
            return way.step_back(of_plan, reads, written, plan, layout)
        if buffer == "sorted":
            return way.sort(AtExperts(reads[0], written, probs, None, plan, op.part, layout))
        return way.step_out(of_plan, reads[0], written, plan)

    def _free_sent(self, computed: dict[int, _Computed], j: int) -> None:
        """Frees what was computed of the partition before this one, where partition j is to be in its place.

        Who computes frees it, and has waited until it was sorted to be sent: its memory is partition j's at once. Told
        that another stream still reads it, CUDA's allocator would give more as long as the device is behind the host.
        """
        if STRATEGIES[self.strategy].reuses:
            computed.pop(j - 1, None)

    def _named(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns this rank's own rows of each partition, by the buffers' names, among those that are packed here."""
        parts = rows.split([partition.packed for partition in self.partitions])
        of_partitions = zip(self.partitions, parts, strict=True)
        own = [part if one.packed == one.own else part.narrow(0, one.own_place, one.own) for one, part in of_partitions]
        return {f"{name}.{j}": part for j, part in enumerate(own)}

    def _returning(self, name: str, rows: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
        """The rows that come back, and this rank's own among them, by the buffers' names."""
        named, parts = {}, rows.split(self._returned)
        for j, (partition, part) in enumerate(zip(self.partitions, parts, strict=True)):
            named[f"{name}.{j}"] = part
            named[f"{prefix}own.{j}"] = part.narrow(0, partition.own_place, partition.own)
        return named

    def _schedule(self, outline: Callable[[str, int, Stages, bool], Outline]) -> MovingSchedule:
        """Returns the schedule of one direction."""
        shape = self.strategy, len(self.partitions), self._stages, self.shared is not None
        return outline(*shape).moving(self._moved)

    def _run(self, moving: MovingSchedule, bind: Callable[[Op], Steps], device: torch.device) -> None:
        """Runs all ops of one direction."""
        schedule, sized = moving
        executor(device).run(schedule, [bind(op) for op in schedule.ops], sized=sized)

    def _moved(self) -> list[Moved]:
        """Returns what moves of each partition."""
        token, shown = self.layouts[INPUTS].at_experts.row_bytes, self.experts.shown
        packed, outputs, gradients, returned = (layout.row_bytes for layout in self.layouts.values())
        row = RowBytes(packed, token, shown.middle_row_bytes, returned, outputs, gradients, shown.activation_row_bytes)
        shared = 0 if self.shared is None else self.shared.num_bytes
        return [Moved(rows, row, shared) for rows in self.partitions]


def _of_its_own(rows: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Returns rows that experts have made, copied where they are in the memory of what was given to them: the next
    partition's rows may come there before these are sorted to be sent.
    """
    shares = rows.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return rows.clone() if shares else rows


def _without_memory(rows: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and type whose elements are one in memory, and mean nothing."""
    return rows.new_empty(()).expand(rows.shape)


class _Sum:
    """A parameter's gradient, summed over partitions: in float32, and rounded once.

    With gradient accumulation fusion a partition's GEMM adds to the parameter's main_grad, and autograd gets a stand-in
    without a value; or nothing, where others catch saved tensors, as checkpointing does, and give them back without the
    attributes of the parameter.
    """

    def __init__(self, parameter: torch.Tensor, partitions: int, may_fuse: bool) -> None:
        """
        Args:
            may_fuse: False: no GEMM adds to main_grad, as where experts travel.
        """
        self._parameter, self._adds, self._may_fuse = parameter, partitions > 1, may_fuse
        self._sum: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Returns what the partitions have given until now, in the parameter's dtype; None: nothing. It is not held
        here any longer, so that of many parameters the sums in float32 are gone one by one.
        """
        total, self._sum = self._sum, None
        return None if total is None else total.to(self._parameter.dtype)

    def add(self, grad: torch.Tensor | None) -> None:
        """Adds the gradients that one partition has given."""
        parameter = self._parameter
        if grad is None:
            if self._may_fuse and hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = True
                # As dense as Megatron's, or autograd would copy it; of a weight in FP8, too, whose like is quantized.
                self._sum = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        elif not self._adds or (self._may_fuse and getattr(parameter, "grad_added_to_main_grad", False)):
            self._sum = grad
        elif self._sum is None:  # copied at once: the gradient may be shared, and there would be three at the second
            self._sum = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        else:
            self._sum += grad
