"""Dispatch, experts and combine of several partitions as one pipeline: a differentiable function around the executor.

Every partition is an exchange of its own, of a part of each expert's rows. Gradients of the experts' parameters are
summed over partitions, in their order, and returned once from the one autograd function that the layer sees, so that
whatever waits for a gradient (DDP, the distributed optimizer) gets it once and complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.kernels.streams import has_streams
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.offload import HostCopyOf
from megatron_moe_opt.runtime.engine.recomputation import saved_tensors_are_hooked
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.runtime.rows.exchange_plan import ExchangePlan
from megatron_moe_opt.runtime.rows.row_layout import RowLayout
from megatron_moe_opt.runtime.rows.ways import Way
from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall, Experts
from megatron_moe_opt.runtime.through_experts.partition_buffers import PartitionBuffers
from megatron_moe_opt.schedules import mpmoe
from megatron_moe_opt.schedules.mpmoe import STRATEGIES, PartitionRows, Restore, RowBytes
from megatron_moe_opt.schedules.pipeline import base_name
from megatron_moe_opt.schedules.schedule import Kind, Op

_Computed = tuple[torch.Tensor, torch.Tensor | None]
"""Rows of a partition, and what their probabilities' lanes get."""


def through_experts(
    packed: torch.Tensor,
    experts: Experts,
    way: Way,
    plans: Sequence[ExchangePlan],
    strategy: str,
    prob_dtype: torch.dtype,
) -> torch.Tensor:
    """Rows to their experts, through them and back, partition by partition. Differentiable once.

    Args:
        packed: [R, H + lane], in the order of a row map cut into the partitions.
        plans: one a partition, in one chunk each.
        strategy: of memory reuse, a key of schedules.mpmoe.STRATEGIES.
        prob_dtype: dtype of the probabilities in the lane.

    Returns:
        [R, H]: sums over the expert-tensor-parallel ranks, where `packed` came from.
    """
    if not torch.is_grad_enabled():  # nothing to restore: partitions share buffers, and T_M is never saved
        return _Pass(packed, experts, way, plans, "S4", prob_dtype).forward(packed)
    pass_ = _Pass(packed, experts, way, plans, strategy, prob_dtype)
    return _ThroughExperts.apply(packed, pass_, *experts.parameters)


class _ThroughExperts(Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, pass_: _Pass, *_: torch.Tensor) -> torch.Tensor:
        ctx.pass_ = pass_
        combined = pass_.forward(packed.detach())
        ctx.save_for_backward(*pass_.hand_over())
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.pass_ is None:
            raise RuntimeError("a layer of mpmoe frees what it saved in its backward pass, which cannot run twice")
        pass_, ctx.pass_ = ctx.pass_, None
        pass_.take_back(iter(ctx.saved_tensors))  # runs the layer again, if at all, before an op of this pass does
        ctx.maybe_clear_saved_tensors()
        return pass_.backward(grad.contiguous())


class _Pass:
    """One forward pass of a layer, and what its backward pass needs."""

    def __init__(
        self,
        packed: torch.Tensor,
        experts: Experts,
        way: Way,
        plans: Sequence[ExchangePlan],
        strategy: str,
        prob_dtype: torch.dtype,
    ) -> None:
        self.experts, self.strategy = experts, strategy
        self.hands_over = saved_tensors_are_hooked()
        self.way, self.plans = way, plans
        self.packed = RowLayout(packed.size(1), packed.dtype, prob_dtype)
        self.token = RowLayout(self.packed.hidden, packed.dtype, None)
        self.partitions = [PartitionRows(plan.num_sent, plan.num_gathered) for plan in self.plans]
        self.calls: list[ExpertCall] = []
        self.kept: dict[str, torch.Tensor] = {}
        """Buffers of the forward pass that backward reads."""
        self.rows: torch.Tensor | None = None
        """Packed rows, kept where they are communicated again."""
        self.host_tokens: dict[int, HostCopyOf] = {}

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """[R, H + lane] -> [R, H]."""
        how = STRATEGIES[self.strategy]
        held = (*self.experts.parameters, *self.experts.constants)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in held}
        probs = [empty((rows.gathered,), self.packed.prob_dtype, packed.device) for rows in self.partitions]
        self.calls = [
            ExpertCall(self.experts, plan.tokens_per_expert, of_partition, how.middle, addresses, self.hands_over)
            for plan, of_partition in zip(self.plans, probs, strict=True)
        ]
        combined = self.token.empty_rows(packed.size(0), packed)
        rows = self._named("rows", packed)
        buffers = self._buffers(rows | self._named("combined", combined))
        outputs: dict[int, _Computed] = {}

        def bind(op: Op) -> Steps:
            j, target = op.chunk, base_name(op.writes[0])
            if op.kind is Kind.COMPUTE:
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: outputs.update({j: (self.calls[j].forward(tokens).contiguous(), None)}))
            if op.kind is Kind.OFFLOAD and target == "host_tokens":
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: self.host_tokens.update({j: HostCopyOf(tokens)}))
            if op.kind is Kind.OFFLOAD:
                return steps.call(self.calls[j].offload_middle)
            if target in ("arrived", "tokens"):
                return self._arrive(op, buffers, self.packed, probs[j])
            return self._return(op, buffers, self.token, lambda: self._take(outputs, j))

        schedule = mpmoe.forward(self.strategy, self.partitions, *self._widths())
        executor(packed.device).run(schedule, [bind(op) for op in schedule.ops])
        if how.inputs is Restore.KEEP:
            self.kept = {f"tokens.{j}": buffers.rows(f"tokens.{j}", j) for j in range(len(self.plans))}
        elif how.inputs is Restore.COMMUNICATE:
            self.rows = packed
        return combined

    def backward(self, grad_combined: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the outputs [R, H] -> gradients of the packed rows, the pass, and each parameter."""
        given = self._named("grad_combined", grad_combined) | self.kept
        if self.rows is not None:  # nobody else wants them: their gradients take their place
            grad_packed = self.rows
            given |= self._named("rows", grad_packed)
        else:
            grad_packed = self.packed.blank_rows(grad_combined.size(0), grad_combined)
            given |= self._named("grad_rows", grad_packed)
        buffers = self._buffers(given)
        compute = torch.cuda.current_stream(grad_combined.device) if has_streams(grad_combined.device) else None
        grads: dict[int, _Computed] = {}
        of_parameters = [_Sum(parameter, len(self.plans)) for parameter in self.experts.parameters]

        def take(number: int, grad: torch.Tensor | None) -> None:
            of_parameters[number].add(grad)

        def gradient(j: int, tokens: torch.Tensor, grad_output: torch.Tensor) -> None:
            grad_tokens, grad_probs = self.calls[j].backward(tokens, grad_output, take)
            grads[j] = grad_tokens.contiguous(), grad_probs.contiguous()

        def bind(op: Op) -> Steps:
            j, target = op.chunk, base_name(op.writes[0])
            if op.kind is Kind.GRADIENT:
                tokens, _, grad_output = op.reads
                arguments = buffers.rows(tokens, j), buffers.rows(grad_output, j)
                return steps.call(lambda: gradient(j, *arguments))
            if op.kind is Kind.COMPUTE:
                tokens = buffers.rows(op.reads[0], j)
                return steps.call(lambda: self.calls[j].recompute(tokens))
            if op.kind is Kind.PREFETCH and target == "tokens":
                tokens = buffers.rows(op.writes[0], j)
                return steps.call(lambda: self.host_tokens.pop(j).to_device(tokens))
            if op.kind is Kind.PREFETCH:
                return steps.call(lambda: self.calls[j].fetch_middle(compute))
            if target in ("arrived", "tokens"):
                return self._arrive(op, buffers, self.packed, None)
            if target in ("grad_arrived", "grad_output"):
                return self._arrive(op, buffers, self.token, None)
            return self._return(op, buffers, self.packed, lambda: self._take(grads, j))

        schedule = mpmoe.backward(self.strategy, self.partitions, *self._widths())
        executor(grad_combined.device).run(schedule, [bind(op) for op in schedule.ops])
        return grad_packed, None, *(total.value for total in of_parameters)

    def hand_over(self) -> list[torch.Tensor]:
        """What backward needs and is in the device's memory, for autograd to save: the pass holds it no longer.

        Nothing where saved tensors are not hooked: here they are freed partition by partition.
        """
        if not self.hands_over:
            return []
        kept, rows = self.kept, self.rows
        self.kept, self.rows = dict.fromkeys(kept), None
        middle = [tensor for call in self._keeping for tensor in call.hand_over_middle()]
        return [*kept.values(), *([] if rows is None else [rows]), *middle]

    def take_back(self, saved: Iterator[torch.Tensor]) -> None:
        """Takes from `saved` what `hand_over` has returned, in its order."""
        if not self.hands_over:
            return
        self.kept = {name: next(saved) for name in self.kept}
        if STRATEGIES[self.strategy].inputs is Restore.COMMUNICATE:
            self.rows = next(saved)
        for call in self._keeping:
            call.take_back_middle(saved)

    @property
    def _keeping(self) -> list[ExpertCall]:
        """The calls whose T_M stays on the device."""
        return self.calls if STRATEGIES[self.strategy].middle is Restore.KEEP else []

    def _arrive(self, op: Op, buffers: PartitionBuffers, layout: RowLayout, probs: torch.Tensor | None) -> Steps:
        """A hop to the experts, or the sort by expert."""
        source, target = buffers.rows(op.reads[0], op.chunk), buffers.rows(op.writes[0], op.chunk)
        plan = self.plans[op.chunk]
        if op.group is not None:
            return self.way.step_out(op, source, target, plan)
        return layout.split(source, target, probs, None, plan.chunk(op.chunk))

    def _return(
        self,
        op: Op,
        buffers: PartitionBuffers,
        layout: RowLayout,
        computed: Callable[[], _Computed],
    ) -> Steps:
        """The sort by source of what is computed by then, a hop to the sources, or the sum of what it brings."""
        plan, j = self.plans[op.chunk], op.chunk
        target = buffers.rows(op.writes[0], j)
        if op.kind is Kind.COPY:
            return steps.call(lambda: steps.run_now(layout.join(*computed(), target, plan.chunk(j))))
        return self.way.step_back(op, [buffers.rows(name, j) for name in op.reads], target, plan, layout)

    def _take(self, computed: dict[int, _Computed], j: int) -> _Computed:
        """What a compute op has left for the op that sends it; no longer held where partitions share memory."""
        if not STRATEGIES[self.strategy].reuses:
            return computed[j]
        for tensor in computed[j]:
            if tensor is not None and has_streams(tensor.device):  # recomputing does not wait until it is sent
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return computed.pop(j)

    def _buffers(self, given: dict[str, torch.Tensor]) -> PartitionBuffers:
        return PartitionBuffers(self.way, self.plans, self.token, self.packed, given)

    def _named(self, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's own rows, by the buffers' names."""
        parts = rows.split([partition.own for partition in self.partitions])
        return {f"{name}.{j}": part for j, part in enumerate(parts)}

    def _widths(self) -> tuple[RowBytes, int, int]:
        row = RowBytes(self.packed.row_bytes, self.token.row_bytes, self.experts.middle_row_bytes)
        return row, self.way.groups.ep_size, self.way.groups.etp_size


class _Sum:
    """A parameter's gradient, summed over partitions: in float32, and rounded once.

    With gradient accumulation fusion a partition's GEMM adds to the parameter's main_grad, and autograd gets a stand-in
    without a value, or nothing where saved tensors are caught: they come back without the attributes of the parameter.
    """

    def __init__(self, parameter: torch.Tensor, partitions: int) -> None:
        self._parameter, self._adds = parameter, partitions > 1
        self._sum: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor | None:
        """What the partitions have given until now, in the parameter's dtype; None: nothing."""
        return None if self._sum is None else self._sum.to(self._parameter.dtype)

    def add(self, grad: torch.Tensor | None) -> None:
        """Adds what one partition has given."""
        if grad is None:
            if hasattr(self._parameter, "grad_added_to_main_grad"):
                self._parameter.grad_added_to_main_grad = True
                self._sum = self._parameter.new_zeros(()).expand_as(self._parameter)
        elif getattr(self._parameter, "grad_added_to_main_grad", False) or not self._adds:
            self._sum = grad
        elif self._sum is None:  # copied at once: the gradient may be shared, and there would be three at the second
            self._sum = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        else:
            self._sum += grad
