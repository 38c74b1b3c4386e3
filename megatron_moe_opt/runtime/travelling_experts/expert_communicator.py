"""Experts that travel: gathered inside their domains ahead of use, their gradients returned to the owners.

A model is a row of layers with experts (HybridEP, section IV-B, "Asynchronous Communicator"). Each layer's weights are
gathered once and serve all passes until they change: all micro-batches of an optimizer step, recomputation and
evaluation. Gathers run in a lane of their own, in groups of their own: the first layers' when an optimizer step begins,
before its first pass, the others' while layers before them are computed. After the last step none is begun.

Whether weights have changed is not inferred from who may have written them (an optimizer, an all-gather into a
distributed optimizer's buffer, a checkpoint): each rank compares its experts, bit for bit, with what it sent last. The
answer travels with the counts of a pass, which all ranks exchange anyway, and so all ranks do the same. What is sent
ahead of need is compared as well when its turn comes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe_opt.kernels import empty
from megatron_moe_opt.kernels.streams import used_here
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.collectives import device_of
from megatron_moe_opt.runtime.engine.executor import executor
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing
from megatron_moe_opt.runtime.engine.started import Running, advance_started, finish_started
from megatron_moe_opt.runtime.observed.layer_place import Place, belonging_to, place
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import (
    ArrivedExperts,
    Arriving,
    BorrowedExperts,
    Residents,
    restore_part,
)
from megatron_moe_opt.runtime.travelling_experts.expert_codec import (
    LargestWeights,
    Message,
    ReceivedMessages,
    TrackedExperts,
    WholeExperts,
)
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, WholeGradients
from megatron_moe_opt.runtime.travelling_experts.expert_weights import ExpertWeights
from megatron_moe_opt.runtime.travelling_experts.step_passes import current_step
from megatron_moe_opt.schedules import expert_migration as schedules
from megatron_moe_opt.topology.domain_groups import DomainGroups

DECODING = "decoded experts"
"""The queue in which experts are decoded and restored: whose turn comes waits for no other layer's message."""


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
        self.gradients: weakref.WeakSet[WholeGradients | CompressedGradients] = weakref.WeakSet()
        """How the gradients of each layer return."""
        self._first: weakref.ref[MigratedExperts] | None = None
        self._due: weakref.ref[MigratedExperts] | None = None
        """The first layer of a step whose weights nobody has gathered since they were updated."""
        self._last: weakref.ref[MigratedExperts] | None = None

    def note_pass(self, layer: MigratedExperts) -> None:
        """Learns the order of layers from their forward passes."""
        if is_recomputing():
            return  # in another order
        last = self._last and self._last()
        if last is not None and last is not layer:
            last.next = weakref.ref(layer)
        self._last = weakref.ref(layer)
        self._first = self._first or self._last

    def following(self, first: MigratedExperts) -> Iterator[MigratedExperts]:
        """The layers that came after one in the last pass, in turn."""
        found, layer = {first}, first
        while (layer := layer.next and layer.next()) is not None and layer not in found:
            found.add(layer)
            yield layer

    def sent_at_begin(self, first: MigratedExperts) -> Iterator[MigratedExperts]:
        """The layers that are sent when a step begins: what may be ahead; of messages that are decoded later all, but
        for layers whose weights come late themselves.
        """
        yield first
        for number, layer in enumerate(self.following(first)):
            is_ahead = number < self.ahead
            if not is_ahead and (not layer.codec.is_lossy or layer.weights.come_late()):
                return
            yield layer

    def forget_passes(self) -> None:
        """Has the next pass be as the first: no layer was before it, and none is due."""
        self._first = self._due = self._last = None

    def after_step(self) -> None:
        """Weights are new: the first layers of the passes since the last step are due when the next one begins."""
        self._due, self._first = self._first, None

    def before_step(self) -> None:
        """Sends the experts of the first layers of the last step, if weights have been updated since they were sent.

        A collective call, then.
        """
        due, self._due = self._due, None
        if due is None:
            return
        first = due()
        layers = [] if first is None else [*self.sent_at_begin(first)]
        number = torch.full((), len(layers), device=device_of(self.groups.ep))
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self.groups.ep)
        self.begin_round()
        for later, layer in enumerate(layers[: int(number)]):
            layer.send(is_due=later <= self.ahead)

    def begin_round(self) -> None:
        """Experts that were sent before now are not those of the passes to come."""
        self.round += 1
        self._due = None

    def after_skipped_step(self) -> None:
        """Forgets what is left of gradients: of those that nobody has used."""
        for gradients in self.gradients:
            gradients.restart()

    def gather(self, message: Message, device: torch.device) -> Arriving:
        """Starts to gather messages of all ranks of the domain, from the outermost level inwards.

        Returns:
            What waits for them, [ranks, M], in the order of DomainTables.owners.
        """
        run, bound, sizes = executor(device), [], {}
        if message.write is not None:
            bound.append(steps.call(message.write))
        with run.memory():
            held = used_here(message.sent).view(1, -1)
            for level, group in self._groups.items():
                rows, held = held, empty((group.size() * held.size(0), held.size(1)), held.dtype, device)
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
        build, behind = schedules.restored, None
        if not received.is_begun:
            received.is_begun, build, behind = True, schedules.decoded, received.arrive.running
        experts: list[torch.Tensor] = []
        bound = [steps.call(lambda: experts.append(received.experts()))]
        return Arriving(executor(device).start(build(num_bytes), bound, DECODING, behind), experts)

    def defer(self, gradients: torch.Tensor, own: int, codec: WholeGradients | CompressedGradients) -> Running:
        """Starts to add gradients [ranks, N], of which the row `own` is zero, to what the next `reduce` returns."""

        def add() -> None:
            codec.defer(used_here(gradients), own, self.innermost)

        return executor(gradients.device).start(schedules.deferred(gradients.nbytes), [steps.call(add)])

    def reduce(
        self, gradients: torch.Tensor, codec: WholeGradients | CompressedGradients
    ) -> Callable[[], torch.Tensor]:
        """Starts to sum over the domain what its ranks have for this rank: [ranks, N]. The mirror of `gather`.

        Args:
            codec: how they travel; with them goes what it has deferred.

        Returns:
            What waits for the sum, [N].
        """
        run, bound, sizes, dtype = executor(gradients.device), [], {}, gradients.dtype
        of_owner = codec.sent_bytes(gradients.size(1), dtype)
        sums = gradients = codec.complete(gradients, self.innermost)
        with run.memory():
            for level, group in reversed(self._groups.items()):
                sizes[level] = sums.size(0) * of_owner
                of_level, sums = codec.reduce(sums, dtype, group)
                bound += of_level
        running, held = run.start(schedules.returned(sizes, codec.is_lossy), bound), [gradients]

        def arrived() -> torch.Tensor:
            running.wait()
            held.clear()  # not before: their memory would be others' while it is read
            return used_here(sums).view(-1).to(dtype)

        return arrived


_communicators: dict[tuple[DomainGroups, int, int | None], ExpertCommunicator] = {}


def expert_communicator(groups: DomainGroups, ahead: int, resident: int | None = None) -> ExpertCommunicator:
    """The communicator of all layers of a process that have these groups, for as long as there are these."""
    key = groups, ahead, resident
    if key not in _communicators:
        _communicators[key] = ExpertCommunicator(*key)
        groups.at_end.callback(_communicators.pop, key)
        groups.at_end.callback(finish_started)
    return _communicators[key]


def forget_passes() -> None:
    """Has no layer of this process be sent before its next pass: another one is built, and they may be of a model that
    is gone. To be called on all ranks alike.
    """
    for communicator in _communicators.values():
        communicator.forget_passes()


class MigratedExperts:
    """The experts of one layer: this rank's own, and those of the other ranks of its domains."""

    def __init__(
        self,
        weights: ExpertWeights,
        owners: tuple[int, ...],
        communicator: ExpertCommunicator,
        codec: WholeExperts | TrackedExperts | LargestWeights,
        gradients: WholeGradients | CompressedGradients,
    ) -> None:
        """
        Args:
            weights: of this rank's experts.
            owners: DomainTables.owners.
            codec: how they travel; this layer's alone.
            gradients: how their gradients return; this layer's alone.
        """
        self.weights, self.owners, self.communicator, self.codec = weights, owners, communicator, codec
        self.gradients = gradients
        communicator.gradients.add(gradients)
        self.own = owners.index(communicator.groups.rank)
        """This rank's place among the owners."""
        self.round = 0
        """The round in which the experts were last sent."""
        self.next: weakref.ref[MigratedExperts] | None = None
        """The layer whose pass came after this one's."""
        self._following: list[MigratedExperts] = []
        self._deferring: list[Running] = []
        self._sent: torch.Tensor | None = None
        self._received: ReceivedMessages | None = None
        """What was received of the last message; None: experts travel whole."""
        self._place: Place | None = None
        """The last pass of the layer, to which belongs what is gathered for it while other layers run."""
        self._arrived: ArrivedExperts | None = None

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        how, ahead = self.codec.describe(), self.communicator.ahead
        what = f"experts of {len(self.owners)} ranks on each, {how}, gathered {ahead} layer(s) ahead"
        limit = self.communicator.residents.limit
        kept = "" if limit is None else f"and kept of {limit} layer(s)"
        return "; ".join(filter(None, (" ".join(filter(None, (what, kept))), self.gradients.describe())))

    def news(self) -> torch.Tensor:
        """int64 [1 + ahead] for the other ranks: whether this rank's experts are not those that it sent last; and for
        each layer that may be sent ahead, whether it is gone.
        """
        self._following = [*islice(self.communicator.following(self), self.communicator.ahead)]
        news = torch.ones(1 + self.communicator.ahead, dtype=torch.int64, device=self.weights.parameters[0].device)
        news[1 : 1 + len(self._following)] = 0
        if self._sent is not None:
            # A pass that is repeated for its backward pass has the weights that it had.
            news[:1].zero_() if is_recomputing() else news[:1].copy_(~self.weights.equal(self._sent))
        return news

    def fetch(self, news: Sequence[int]) -> None:
        """Sees to it that the experts of this pass are here or on their way, and sends later layers'.

        Args:
            news: the greatest of all ranks' `news`: they all do the same.
        """
        advance_started()  # what runs beside has had the time of all that lies between two layers' experts
        communicator, self._place = self.communicator, place()
        communicator.note_pass(self)
        changed, *gone = news
        if changed:
            communicator.begin_round()
            self.send()
        else:
            communicator.residents.use(self._arrived)
        for layer, missing in zip(self._following, gone, strict=False):
            if missing:
                continue
            if layer.round < communicator.round:
                layer.send()
            elif not is_recomputing():  # which goes the other way
                communicator.residents.use(layer._arrived)
        self._following = []

    def forget(self) -> None:
        """Has the next pass gather again, as after an optimizer step. Every rank must forget."""
        self._sent = None

    def send(self, is_due: bool = True) -> None:
        """Starts to gather the experts as they are now.

        Args:
            is_due: False: compressed ones need not be decoded before they are used.
        """
        communicator, before = self.communicator, self._received
        self.round = communicator.round
        self._sent = sent = self.weights.current()
        message = self.codec.prepare(sent, before and before.experts)
        bring = functools.partial(self._at_my_place, communicator.gather, message, sent.device)
        if self.codec.is_lossy:
            on_host, num_bytes = communicator.residents.limit is not None, len(self.owners) * sent.nbytes
            self._received = ReceivedMessages(bring(), message.decode, self.own, on_host)
            bring = functools.partial(self._at_my_place, communicator.decode, self._received, num_bytes, sent.device)
        # Passes that still need the old ones keep them.
        communicator.residents.leave(self._arrived)
        self._arrived = ArrivedExperts(bring)
        if is_due:
            communicator.residents.use(self._arrived)

    def _at_my_place(self, start: Callable[..., Arriving], *arguments: Any) -> Arriving:
        with belonging_to(self._place):
            return start(*arguments)

    def gathered(self) -> torch.Tensor:
        """[owners, numel]: the experts of the ranks of the domains, waited for; not all codecs give the own ones."""
        return self._arrived.experts()

    def kept_as_they_came(self) -> AbstractContextManager[Any]:
        """What a forward pass in this context saves of `of_owners` for its backward pass, it does not save where it
        may be dropped.
        """
        if self.communicator.residents.limit is None:
            return nullcontext()
        return saved_tensors_hooks(self._arrived.forget_part, restore_part)

    def back_in_backward(self, outputs: torch.Tensor) -> torch.Tensor:
        """The experts' outputs as they are. When their gradient comes, the experts of this pass are gathered again if
        they were dropped: here, on all ranks alike, whatever their own rows need.
        """
        residents = self.communicator.residents
        return outputs if residents.limit is None else _ComeBack.apply(outputs, residents, self._arrived)

    def return_gradients(self, parts: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Starts to return the gradients of a backward pass, and of those before it whose gradients have waited, to
        the owners [owners, numel]; in a step's passes but the last they wait for that, as many layers' as experts stay.

        Returns:
            What waits for the sum of this rank's, [numel]; None: they wait.
        """
        step = current_step()
        limit = None if self.gradients.is_lossy else self.communicator.residents.limit
        if step is not None and step.defers(self, limit):
            self._deferring.append(self.communicator.defer(parts, self.own, self.gradients))
            return None
        for running in self._deferring:
            running.wait()
        self._deferring = []
        return self.communicator.reduce(parts, self.gradients)

    def forget_deferred(self) -> None:
        """Forgets gradients that have not been returned."""
        for running in self._deferring:
            with suppress(Exception):  # it is told that they are not returned
                running.wait()
        self._deferring = []
        self.gradients.restart()

    def lent(self) -> Lent:
        """This rank's parameters for the other ranks' use in a pass: to be called before tokens are sent.

        What is sent after this in the forward pass, is sent back in the backward pass while gradients return.
        """
        returned = _Returned()
        return Lent(returned, _Lend.apply(returned, *self.weights.parameters))

    def of_owners(self, lent: Lent) -> list[dict[str, torch.Tensor] | None]:
        """The parameters of each owner's experts by name; None for this rank's own, which the module holds.

        Differentiable: gradients return to the owner's parameters (a collective call in the backward pass).

        Args:
            lent: of this pass.
        """
        return self.by_owner(_Migrate.apply(self, lent.returned, [*self._of_others(self.gathered())], *lent.parameters))

    def by_owner(self, of_others: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor] | None]:
        """The other owners' parameters, as `BorrowedExperts` has them, as `of_owners` returns them."""
        names, tensors = [slot.name for slot in self.weights.slots], iter(of_others)
        return [
            None if place == self.own else {name: next(tensors) for name in names} for place in range(len(self.owners))
        ]

    def borrowed(self) -> BorrowedExperts:
        """The other owners' experts for a pipeline that takes them when they are needed: those of the pass that
        `fetch` has begun. Who takes them gives their gradients to `stand_ins`.
        """
        return BorrowedExperts(self._arrived, self._of_others)

    def stand_ins(self, lent: Lent) -> tuple[torch.Tensor, ...]:
        """Tensors without memory in the shapes of `borrowed`'s parameters: the gradients that autograd gets of them
        return to the owners, as those of `of_owners` do.
        """
        zero, others = self.weights.parameters[0].new_zeros(()), len(self.owners) - 1
        shapes = [slot.shape for slot in self.weights.slots] * others
        return _Migrate.apply(self, lent.returned, [zero.expand(shape) for shape in shapes], *lent.parameters)

    def _of_others(self, gathered: torch.Tensor) -> Iterator[torch.Tensor]:
        others = (place for place in range(len(self.owners)) if place != self.own)
        return (view for place in others for view in self.weights.views(gathered[place]))


@dataclass
class _Returned:
    """Gradients that other ranks return in a pass."""

    wait: Callable[[], Iterator[torch.Tensor]] | None = None
    """For this rank's sums, in the order of the parameters; None: a later pass has them."""


@dataclass(frozen=True)
class Lent:
    """A rank's own parameters in one pass, as the other ranks use them."""

    returned: _Returned
    parameters: tuple[torch.Tensor, ...]


class _Lend(Function):
    """Parameters as they are; their gradients are waited for here, which in the backward pass comes late.

    Autograd runs, of all that is ready, what the forward pass made last: between `_Migrate`, which starts the sums, and
    this, the backward pass of all that lies between them in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, returned: _Returned, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.returned = returned
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *none: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        wait, ctx.returned.wait = ctx.returned.wait, None
        return None, *([None] * len(none) if wait is None else wait())


class _ComeBack(Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, residents: Residents, arrived: ArrivedExperts) -> torch.Tensor:
        ctx.residents, ctx.arrived = residents, arrived
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.residents.use(ctx.arrived)
        return grad, None, None


class _Migrate(Function):
    """The parameters of the other ranks' experts; their gradients are summed at their owners, over the domain.

    Where experts travelled compressed, gradients are taken as those of the owner's weights (straight through).
    """

    @staticmethod
    def forward(
        ctx: Any, migrated: MigratedExperts, returned: _Returned, of_others: list[torch.Tensor], *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.migrated, ctx.returned = migrated, returned
        ctx.dtype, ctx.device, ctx.shapes = own[0].dtype, own[0].device, [parameter.shape for parameter in own]
        ctx.set_materialize_grads(False)
        return tuple(of_others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        migrated, weights = ctx.migrated, ctx.migrated.weights
        flat = empty((len(migrated.owners), weights.numel), ctx.dtype, ctx.device)
        number = len(weights.slots)
        parts = iter([grads[first : first + number] for first in range(0, len(grads), number)])
        for owner in range(len(migrated.owners)):
            weights.flatten([None] * number if owner == migrated.own else next(parts), flat[owner])
        arrived = migrated.return_gradients(flat)
        if arrived is not None:
            ctx.returned.wait = lambda: weights.views(arrived())
        stand_in = flat.new_zeros(())  # what autograd needs to go on to _Lend
        return None, None, None, *(stand_in.expand(shape) for shape in ctx.shapes)
