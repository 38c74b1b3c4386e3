"""`--moe-opt-telemetry`: observes passes of MoE layers, whatever dispatcher moves their tokens.

The methods that MoELayer.forward calls one after another are wrapped in the layers that are watched, and its experts
have hooks while an observed pass is in them. The dispatcher is looked at anew in every pass: it may be another one than
in the last. Backward instants come from hooks on the gradients of the same tensors, on the thread and stream where
autograd is; the graph is as without. Most passes are not observed (runtime/observed/layer_pass.py), and pay for a call
or two.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from megatron_moe_opt.integration.layer.layer_passes import number_of, on_gradient
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot
from megatron_moe_opt.integration.micro_batches import follow_micro_batches, trains
from megatron_moe_opt.integration.observe.stock_traffic import StockTraffic
from megatron_moe_opt.kernels.count_tokens import count_routing_map
from megatron_moe_opt.row_format import SAME
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.observed.layer_pass import DeviceClock, Direction, HostClock, LayerPass, Samples
from megatron_moe_opt.runtime.rows.row_layout import rounding

STAGES = (LayerSlot.PREPROCESS, LayerSlot.DISPATCH, LayerSlot.COMBINE, LayerSlot.POSTPROCESS)
"""The slots around the experts, in the order in which a forward pass goes through them."""


class LayerRecord:
    """What has been observed of one layer."""

    def __init__(self, num_experts: int, group: Any, stride: int | None = None) -> None:
        self.number = 0
        """The number of the layer in the model."""
        self.num_experts, self.group = num_experts, group
        self.clock = DeviceClock() if torch.cuda.is_available() else HostClock()
        self.first, self.again = Samples(stride), Samples(stride)
        """Forward passes; and those that recomputation repeats, from which backward passes come."""


_observed: dict[int, LayerRecord] = {}
"""Records with passes that were not taken yet, by identity. They outlive their layers: ranks that ran the same passes
have the same ones, whenever Python's garbage collection finds a layer that nobody holds any more."""


def take_records() -> list[LayerRecord]:
    """Returns the records with passes since the last time, in the order in which their layers began to run."""
    records = list(_observed.values())
    _observed.clear()
    return records


def watch(layer: Any, stride: int | None = None) -> None:
    """Observes passes of a MoELayer that was just built: every `stride`-th, by default as `Samples` takes them.

    Raises:
        ConfigurationError: a Megatron whose layer has no such stages.
    """
    follow_micro_batches()  # before a training loop asks for its schedule, once
    stages = _Stages(layer, LayerRecord(layer.config.num_moe_experts, layer.token_dispatcher.tp_ep_group, stride))
    for slot in STAGES:
        LayerSeam(layer).put(slot, getattr(stages, slot.value))


class _Stages:
    """Replaces the stages of one layer to observe them. It holds no reference to the layer, which holds it."""

    def __init__(self, layer: Any, record: LayerRecord) -> None:
        self._layer, self._record, self._now = weakref.proxy(layer), record, record.clock.now
        self._stock = {slot: LayerSeam(layer).stock(slot) for slot in STAGES}
        self._observed: LayerPass | None = None
        """The forward pass under way, if it is observed."""
        self._has_backward = False
        self._traffic: StockTraffic | None = None
        self._outputs: torch.Tensor | None = None
        """The experts' outputs in the pass under way, until it has been timed."""
        self._hooks: list[Any] = []
        self._running: tuple[LayerPass, Direction] | None = None
        """The pass and the direction that the hooks of the experts write to."""

    def preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        """Runs stock's step that permutes tokens; a pass that is observed begins here."""
        self._abandon()
        observed = self._next_pass(routing_map)
        if observed is None:
            return self._stock[LayerSlot.PREPROCESS](self._layer, hidden_states, probs, routing_map)
        last = next((tensor for tensor in (probs, hidden_states) if tensor.requires_grad), None)
        if last is not None:
            last.register_hook(functools.partial(self._end_backward, observed))
        self._has_backward = last is not None
        dispatcher = self._layer.token_dispatcher
        self._note_rounding(observed, hidden_states, "dispatch")
        self._traffic = StockTraffic.of(dispatcher, probs.dtype)
        if self._traffic is None and not _tells_what_it_sends(dispatcher):
            observed.forward.is_counted = observed.backward.is_counted = False
        observed.forward.sent.start()
        observed.forward.begin = self._now()
        return self._stock[LayerSlot.PREPROCESS](self._layer, hidden_states, probs, routing_map)

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Runs stock's step that sends rows to their experts, and notes when it begins."""
        observed = self._observed
        if observed is not None:
            on_gradient(hidden_states, functools.partial(self._mark, observed.backward, "exchange_end"))
            if self._traffic is not None:
                self._traffic.note_dispatched(hidden_states, probs)
            self._watch_experts(observed, observed.forward)
            observed.forward.exchange_begin = self._now()
        return self._stock[LayerSlot.DISPATCH](self._layer, hidden_states, probs)

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Runs stock's step that sends rows back, and notes when it ends and what was sent."""
        observed = self._observed
        if observed is None:
            return self._stock[LayerSlot.COMBINE](self._layer, output)
        self._leave_experts()
        result = self._stock[LayerSlot.COMBINE](self._layer, output)
        self._outputs = output.detach()
        observed.forward.exchange_end = self._now()
        on_gradient(result, functools.partial(self._mark, observed.backward, "exchange_begin"))
        if self._traffic is not None:
            forward, backward = self._traffic.sent(output)
            observed.forward.sent.by_peer.update(forward)
            observed.backward.sent.by_peer.update(backward)
        return result

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Runs stock's step that sums each token's rows; a pass that is observed ends here."""
        result = self._stock[LayerSlot.POSTPROCESS](self._layer, output, shared_expert_output)
        observed, self._observed = self._observed, None
        if observed is not None:
            observed.forward.end = self._now()
            observed.forward.sent.stop()
            self._note_rounding(observed, self._outputs, "combine")
            self._outputs = None
            if self._has_backward:  # what begins must end
                on_gradient(result, functools.partial(self._begin_backward, observed))
            record = self._record
            record.number = number_of(self._layer)
            (record.again if observed.recomputed else record.first).add(observed)
            _observed[id(record)] = record
        return result

    def _note_rounding(self, observed: LayerPass, rows: torch.Tensor, direction: str) -> None:
        """Notes what a dispatcher of ours loses of rows that travel narrower; where none does, nothing."""
        dispatcher = getattr(self._layer.token_dispatcher, "dispatcher", None)
        wire = getattr(dispatcher, "wire", SAME).of_rows(rows.dtype is torch.bfloat16)
        if wire == SAME:
            return
        with torch.no_grad():
            if rows.numel():
                squares = rounding(rows.reshape(-1, rows.size(-1)), getattr(wire, direction))
            else:  # mpmoe's outputs are back already
                squares = rows.new_zeros(2, dtype=torch.float64)
        observed.rounding.append(squares)

    def _next_pass(self, routing_map: torch.Tensor) -> LayerPass | None:
        if not trains(self._layer):
            return None
        recomputed = is_recomputing()
        if not (self._record.again if recomputed else self._record.first).is_next():
            return None
        with torch.no_grad():
            counts = count_routing_map(routing_map.bool().contiguous(), 1)[0]
        self._observed = LayerPass(counts, recomputed)
        return self._observed

    def _abandon(self) -> None:
        """Forgets a forward pass that did not come to its end."""
        if self._observed is not None:
            self._observed.forward.sent.stop()
            self._leave_experts()
            self._observed = self._outputs = None

    def _mark(self, direction: Direction, instant: str, _: torch.Tensor) -> None:
        setattr(direction, instant, self._now())

    def _begin_backward(self, observed: LayerPass, _: torch.Tensor) -> None:
        backward = observed.backward
        self._watch_experts(observed, backward)
        backward.sent.start()
        backward.begin = self._now()

    def _end_backward(self, observed: LayerPass, _: torch.Tensor) -> None:
        observed.backward.end = self._now()
        observed.backward.sent.stop()
        self._leave_experts()

    def _watch_experts(self, observed: LayerPass, direction: Direction) -> None:
        self._leave_experts()
        experts = self._layer.experts
        self._running = observed, direction
        self._hooks = [experts.register_forward_pre_hook(self._enter), experts.register_forward_hook(self._leave)]

    def _leave_experts(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._running = [], None

    def _enter(self, module: Any, arguments: tuple[Any, ...] | None) -> None:
        if arguments is None:
            return  # a hook called to have weights gathered, not a call of the experts
        observed, direction = self._running
        tokens = arguments[0]
        if direction is observed.forward:
            observed.rows += tokens.size(0)
        on_gradient(tokens, functools.partial(self._call, observed.backward, -1))
        direction.calls.append((1, self._now()))

    def _leave(self, module: Any, arguments: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> None:
        observed, direction = self._running
        direction.calls.append((-1, self._now()))
        on_gradient(output[0], functools.partial(self._call, observed.backward, 1))

    def _call(self, backward: Direction, step: int, _: torch.Tensor) -> None:
        backward.calls.append((step, self._now()))


def _tells_what_it_sends(dispatcher: Any) -> bool:
    """Whether a dispatcher is one of ours, which report what they send with `count_sent`."""
    from megatron_moe_opt.integration.layer.token_dispatcher import PluggedTokenDispatcher

    return isinstance(dispatcher, PluggedTokenDispatcher)
