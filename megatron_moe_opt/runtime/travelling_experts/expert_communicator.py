"""Experts that travel: gathered inside their domains ahead of use, their gradients returned to the owners.

A model is a row of layers with experts (HybridEP, section IV-B, "Asynchronous Communicator"). Each layer's weights are
gathered once and serve all passes until they change: all micro-batches of an optimizer step, recomputation and
evaluation. Gathers run in a lane of their own, in groups of their own: the first layers' when an optimizer step begins,
before its first pass, the others' while layers before them are computed. After the last step none is begun. Where not
all layers' stay, those for a backward pass come back as early: while the backward passes before it run.

Whether weights have changed is not inferred from who may have written them (an optimizer, an all-gather into a
distributed optimizer's buffer, a checkpoint): each rank compares its experts, bit for bit, with what it sent last, in
every pass, but of the micro-batches of a step in the first (step_passes.py). The answer travels with the counts of a
pass, which all ranks exchange anyway, and so all ranks do the same. What is sent ahead of need is compared as well when
its turn comes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.kernels.streams import used_here
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.engine.started import Running, advance_started, finish_started
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import ArrivedExperts, Arriving, Residents
from megatron_moe_opt.runtime.travelling_experts.expert_codec import Message, ReceivedMessages
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, WholeGradients
from megatron_moe_opt.runtime.travelling_experts.step_passes import TrainedModel
from megatron_moe_opt.schedules import expert_migration as schedules
from megatron_moe_opt.topology.domain_groups import DomainGroups

if TYPE_CHECKING:
    from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts

DECODING = "decoded experts"
"""The queue in which experts are decoded and restored: an entry whose turn comes waits for no other layer's message."""


class ExpertCommunicator:
    """The layers of a process whose experts travel over the same groups.

    Their order is that of their passes since a layer was built last. Layers of a model that nobody holds any more live
    on until Python's garbage collection finds them, on one rank earlier than on another, or for ever: Megatron's DDP
    leaves hooks in autograd's nodes that hold the model. So nothing is sent ahead for a layer before all ranks have
    said that they still have it, and of models that were there before another one was built, before it is used again.
    """

    def __init__(self, groups: DomainGroups, ahead: int, resident: int | None = None) -> None:
        """
        Args:
            ahead: layers whose experts are gathered before their turn.
            resident: the most gathers whose experts stay, above `ahead`; None: no limit.
        """
        self.groups, self.ahead, self.residents = groups, ahead, Residents(resident)
        self._groups = {level: group for level, group in enumerate(groups.experts) if group is not None}
        self.innermost = [*self._groups.values()][-1]
        """The group in which gradients begin to return."""
        self.round = 0
        """Counts the changes of weights that were noticed."""
        self.layers: weakref.WeakSet[MigratedExperts] = weakref.WeakSet()
        self._first: weakref.ref[MigratedExperts] | None = None
        self._first_in: int | None = None
        """The number of its model; None: not known yet when it had its pass."""
        self._due: weakref.ref[MigratedExperts] | None = None
        """The first layer of a step whose weights nobody has gathered since they were updated."""
        self._due_in: int | None = None
        """The number of its model; None: not known."""
        self._last: weakref.ref[MigratedExperts] | None = None
        self._on_the_way: weakref.WeakSet[MigratedExperts] = weakref.WeakSet()
        """The layers that the present micro-batch has passed: until one comes again, or a backward pass."""
        self._lost_next = False
        """Whether backward passes since the last forward pass have dropped the experts of the layer that is next."""
        self._returning: weakref.WeakSet[WholeGradients | CompressedGradients] = weakref.WeakSet()
        """Those whose gradients have begun to return, and no optimizer step has used."""

    def note_pass(self, layer: MigratedExperts) -> None:
        """Learns the order of layers from their forward passes."""
        if is_recomputing():
            return  # in another order
        last = self._last and self._last()
        follows = last is not None and last.model == layer.model
        if last is not None and last is not layer:
            last.next = weakref.ref(layer) if follows else None
            (last.lost_after.add if self._lost_next else last.lost_after.discard)(last.number)
        self._lost_next = False
        if layer in self._on_the_way:
            self._on_the_way.clear()
        layer.before = self._last if self._on_the_way and follows else None
        self._on_the_way.add(layer)
        self._last = weakref.ref(layer)
        if self._first is None:
            self._first, self._first_in = self._last, layer.model

    def following(self, first: MigratedExperts) -> Iterator[MigratedExperts]:
        """Yields the layers whose experts may be gathered in one's pass: those that came after it in the last one, in
        turn, up to the first whose experts backward passes dropped before its turn came.
        """
        return _in_turn(first, lambda layer: None if first.number in layer.lost_after else layer.next)

    def preceding(self, first: MigratedExperts) -> Iterator[MigratedExperts]:
        """Yields the layers whose backward passes come after one's in those of its last micro-batch, in turn."""
        return _in_turn(first, lambda layer: layer.before)

    def come_back(self, arrived: Sequence[ArrivedExperts]) -> None:
        """Sees to it that experts are here for a backward pass, and those for the ones after it on their way.

        A collective call, where they are not. Whatever their own rows need, all ranks bring the same.
        """
        advance_started()  # as when a forward pass fetches them
        self._on_the_way.clear()
        for one in arrived:
            self.residents.use(one)
        last = self._last and self._last()
        if last is not None and last.next is not None and (following := last.next()) is not None:
            self._lost_next |= not following.are_here()

    def sent_at_begin(self, first: MigratedExperts) -> Iterator[MigratedExperts]:
        """Yields the layers that are sent when a step begins: what may be ahead; of messages that are decoded later
        all, but for layers whose weights come late themselves.
        """
        yield first
        for number, layer in enumerate(_in_turn(first, lambda layer: layer.next)):
            is_ahead = number < self.ahead
            if not is_ahead and (not layer.codec.is_lossy or layer.weights.come_late()):
                return
            yield layer

    def forget_passes(self) -> None:
        """Has the next pass be as the first: no layer was before it, and none is due."""
        self._first = self._due = self._last = None
        self._on_the_way.clear()

    def after_step(self, model: TrainedModel | None = None) -> None:
        """Notes that weights are new: the first layers of the passes since the last step are due
        when the next one begins.

        Args:
            model: whose step it was; None: not known, and taken to be that of all layers.
        """
        for layer in self._layers_of(model):
            self._returning.discard(layer.gradients)
        # What all ranks know alike: of a model that nobody holds any more, some still have the layers.
        first = self._first and self._first()
        first_in = self._first_in if first is None or self._first_in is not None else first.model
        if model is None or first_in == model.number:
            self._due, self._due_in, self._first = self._first, first_in, None

    def before_step(self, model: TrainedModel | None = None) -> None:
        """Sends the experts of the first layers of the last step, if weights have been updated since they were sent.

        A collective call, then. Where gradients have returned since and no step has used them, they are forgotten, as
        after a step that is skipped: it is run again.

        Args:
            model: as in `after_step`.
        """
        if any(layer.gradients in self._returning for layer in self._layers_of(model)):
            self.after_skipped_step(model)
        if self._due is None or not (model is None or self._due_in in (None, model.number)):
            return
        due, self._due = self._due, None
        first = due()
        due_first = () if first is None else self.sent_at_begin(first)
        layers = [*itertools.takewhile(lambda layer: not layer.codec.begins, due_first)]
        number = torch.full((), len(layers), device=device_of(self.groups.ep))
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self.groups.ep)
        self.begin_round()
        for later, layer in enumerate(layers[: int(number)]):
            if not layer.stay:
                layer.send(is_due=later <= self.ahead)

    def after_skipped_step(self, model: TrainedModel | None = None) -> None:
        """Forgets what is left of gradients: of those that nobody has used. `model` as in `after_step`."""
        for layer in self._layers_of(model):
            self._returning.discard(layer.gradients)
            layer.gradients.restart()

    def _layers_of(self, model: TrainedModel | None) -> list[MigratedExperts]:
        """Returns the layers that are a part of a model, having noted it; all of them, where it is not known."""
        if model is None:
            return list(self.layers)
        for layer in self.layers:
            if layer.model != model.number and model.has(layer.weights.experts):
                layer.model = model.number
        return [layer for layer in self.layers if layer.model == model.number]

    def begin_round(self) -> None:
        """Begins a round: experts that were sent before now are not those of the passes to come."""
        self.round += 1
        self._due = None

    def gather(self, message: Message, experts: torch.Tensor) -> Arriving:
        """Starts to gather messages of all ranks of the domain, from the outermost level inwards.

        Args:
            experts: which the message is made of, [numel].

        Returns:
            What waits for them, [ranks, M], in the order of DomainTables.owners.
        """
        run, bound, sizes = executor(experts.device), [], {}
        if message.write is not None:
            bound.append(steps.call(message.write))
        with run.memory():
            used_here(experts)
            held = used_here(message.sent).view(1, -1)
            for level, group in self._groups.items():
                rows, held = held, empty((group.size() * held.size(0), held.size(1)), held.dtype, held.device)
                bound.append(steps.all_gather(rows, held, [rows.size(0)] * group.size(), group))
                sizes[level] = held.nbytes
        return Arriving(run.start(schedules.gathered(sizes, is_coded=message.write is not None), bound), [held])

    def decode(self, received: ReceivedMessages, num_bytes: int, device: torch.device) -> Arriving:
        """Starts to decode the messages of all ranks of the domain, or to restore what they were decoded to.

        Args:
            num_bytes: of the experts.

        Returns:
            What waits for the experts, [ranks, numel].
        """
        outline, behind = schedules.RESTORED, None
        if not received.is_begun:
            received.is_begun, outline, behind = True, schedules.DECODED, received.arrive.running
        experts: list[torch.Tensor] = []
        bound = [steps.call(lambda: experts.append(received.experts()))]
        return Arriving(executor(device).start(outline.sized([num_bytes]), bound, DECODING, behind), experts)

    def defer(self, gradients: torch.Tensor, own: int, codec: WholeGradients | CompressedGradients) -> Running:
        """Starts to add gradients [ranks, N], of which the row `own` is zero, to what the next `reduce` returns."""

        def add() -> None:
            codec.defer(used_here(gradients), own, self.innermost)

        self._returning.add(codec)
        return executor(gradients.device).start(schedules.DEFERRED.sized([gradients.nbytes]), [steps.call(add)])

    def reduce(
        self, gradients: torch.Tensor, own: int, codec: WholeGradients | CompressedGradients
    ) -> Callable[[], torch.Tensor]:
        """Starts to sum over the domain what its ranks have for this rank: [ranks, N]. The mirror of `gather`.

        Args:
            own, codec: as in `defer`; with the gradients goes what it has deferred.

        Returns:
            What waits for the sum, [N].
        """
        run, sizes, dtype = executor(gradients.device), {}, gradients.dtype
        of_owner = codec.sent_bytes(gradients.size(1), dtype)
        self._returning.add(codec)
        with run.memory():
            bound, sums = codec.complete(gradients, own, self.innermost)
            deferred = gradients.nbytes if bound else 0
            for level, group in reversed(self._groups.items()):
                sizes[level] = sums.size(0) * of_owner
                of_level, sums = codec.reduce(sums, dtype, group)
                bound += of_level
        running, held = run.start(schedules.returned(sizes, codec.is_lossy, deferred), bound), [gradients]

        def arrived() -> torch.Tensor:
            running.wait()
            held.clear()  # not before: their memory would be others' while it is read
            return used_here(sums).view(-1).to(dtype)

        return arrived


def _in_turn(
    first: MigratedExperts, link: Callable[[MigratedExperts], weakref.ref[MigratedExperts] | None]
) -> Iterator[MigratedExperts]:
    """Yields the layers to which links lead from one, until one is gone or comes again."""
    found, layer = {first}, first
    while (linked := link(layer)) is not None and (layer := linked()) is not None and layer not in found:
        found.add(layer)
        yield layer


_communicators: dict[tuple[DomainGroups, int, int | None], ExpertCommunicator] = {}


def expert_communicator(groups: DomainGroups, ahead: int, resident: int | None = None) -> ExpertCommunicator:
    """Returns the communicator of all layers of a process that have these groups, for as long as there are these."""
    key = groups, ahead, resident
    if key not in _communicators:
        _communicators[key] = ExpertCommunicator(*key)
        groups.when_gone.callback(_communicators.pop, key)
        groups.at_end.callback(finish_started)
    return _communicators[key]


def forget_passes() -> None:
    """Has no layer of this process be sent before its next pass: another one is built, and they may be of a model that
    is gone. To be called on all ranks alike.
    """
    for communicator in _communicators.values():
        communicator.forget_passes()
