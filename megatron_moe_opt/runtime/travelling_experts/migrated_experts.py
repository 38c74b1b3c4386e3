"""One layer's experts that travel: what its passes see of them, forward and backward.

The experts of a layer are sent, arrive and are dropped by a communicator that it shares with other layers
(expert_communicator.py); here are the layer's own part of that, and the functions by which autograd returns the
gradients of other ranks' experts to their owners.
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
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import empty
from megatron_moe_opt.runtime.engine.recomputation import is_recomputing, outer_hooks
from megatron_moe_opt.runtime.engine.started import Running, advance_started
from megatron_moe_opt.runtime.observed.layer_place import Place, belonging_to, place
from megatron_moe_opt.runtime.rows.linear import linear
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import (
    ArrivedExperts,
    Arriving,
    BorrowedExperts,
)
from megatron_moe_opt.runtime.travelling_experts.expert_codec import (
    LargestWeights,
    ReceivedMessages,
    TrackedExperts,
    WholeExperts,
)
from megatron_moe_opt.runtime.travelling_experts.expert_communicator import ExpertCommunicator
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, WholeGradients
from megatron_moe_opt.runtime.travelling_experts.expert_weights import ExpertWeights
from megatron_moe_opt.runtime.travelling_experts.step_passes import current_step


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
        communicator.layers.add(self)
        self.model: int | None = None
        """The number of the model that it is a part of; None: no optimizer has told yet."""
        self.own = owners.index(communicator.groups.rank)
        """This rank's place among the owners."""
        self.round = 0
        """The round in which the experts were last sent."""
        self.stay = False
        """Whether an optimizer's step leaves the experts as they were sent: no rank trains them, and they travel whole.
        Compressed ones come nearer to their owners' with each message.
        """
        self.next: weakref.ref[MigratedExperts] | None = None
        """The layer whose pass came after this one's."""
        self.before: weakref.ref[MigratedExperts] | None = None
        """The layer whose pass of the same micro-batch came before this one's; None: it is the first."""
        self.number = 0
        """Of the last forward pass, in its step, counted from 1; 0: nobody has said how many passes a step has."""
        self.lost_after: set[int] = set()
        """The numbers of passes after which backward passes dropped the experts of `next` before its turn came."""
        self._following: list[MigratedExperts] = []
        self._preceding: list[MigratedExperts] = []
        self._back: list[ArrivedExperts] = []
        """What backward needs of the pass that `fetch` has begun, and then what the backward passes after it need."""
        self._deferring: list[Running] = []
        self._sent: torch.Tensor | None = None
        self._received: ReceivedMessages | None = None
        """What has arrived of the last message; None: experts travel whole."""
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
        """Returns what the other ranks have to know, int64 [3 + 2 * ahead]: whether this rank's experts are not
        those that it sent last, or (2) its messages begin anew; whether some of them are trained, and whether none is;
        and for each layer that may be sent ahead, then for each that may be brought back ahead, whether it is gone, or
        its messages begin anew.
        """
        communicator, ahead = self.communicator, self.communicator.ahead
        may_have_changed = self._begin_pass()
        communicator.note_pass(self)
        self._following = [*islice(communicator.following(self), ahead)]
        self._preceding = [*islice(communicator.preceding(self), ahead)]
        parameters = self.weights.parameters
        news = torch.ones(3 + 2 * ahead, dtype=torch.int64, device=parameters[0].device)
        is_trained = any(one.requires_grad for one in parameters)
        news[1 + is_trained : 2 + is_trained] = 0
        news[3 : 3 + len(self._following)] = 0
        for number, layer in enumerate(self._following, start=3):
            if layer.codec.begins:
                news[number] = 1
        news[3 + ahead : 3 + ahead + len(self._preceding)] = 0
        if self.codec.begins:
            news[0] = 2
        elif self._sent is not None:
            news[:1].copy_(~self.weights.equal(self._sent)) if may_have_changed else news[:1].zero_()
        return news

    def _begin_pass(self) -> bool:
        """Counts a forward pass. Returns whether the experts may have changed since the last one."""
        if is_recomputing():  # a pass that is repeated for its backward pass has the weights that it had
            return False
        step = current_step()
        self.number = 0 if step is None else step.begin(self)
        return self.number <= 1

    def fetch(self, news: Sequence[int]) -> None:
        """Sees to it that the experts of this pass are here or on their way, and sends later layers'.

        Args:
            news: the greatest of all ranks' `news`: they all do the same.

        Raises:
            ConfigurationError: on all ranks, where only some ranks' experts are trained: in backward the others would
                not take part in returning gradients.
        """
        changed, some_trained, some_frozen, *gone = news
        if some_trained and some_frozen:
            raise ConfigurationError(
                "--moe-opt-domain-sizes: experts travel, and all experts of some ranks are frozen (requires_grad), but "
                "not those of others: freeze experts alike on all ranks, or use monta"
            )
        self.stay = not some_trained and not self.codec.is_lossy
        advance_started()  # what runs beside has had the time of all that lies between two layers' experts
        communicator, self._place = self.communicator, place()
        if changed > 1:  # a rank may have loaded its experts alone
            self.codec.restart()
        if changed:
            communicator.begin_round()
            self.send()
        else:
            communicator.residents.use(self._arrived)
        step, following = current_step(), zip(self._following, gone, strict=False)
        for layer, missing in () if is_recomputing() else following:  # which goes the other way
            if missing:
                continue
            # The first passes of several layers may each find changes. What has been sent in this step is as it is: a
            # pass that is recomputed needs what it had.
            is_old = layer.round < communicator.round and not layer.stay
            if is_old and (step is None or not step.has_begun(layer)):
                layer.send()
            else:
                communicator.residents.use(layer._arrived)
        before = zip(self._preceding, gone[communicator.ahead :], strict=False)
        self._back = [self._arrived, *(layer._arrived for layer, missing in before if not missing)]
        self._following = self._preceding = []

    def are_here(self) -> bool:
        """Whether the experts that were gathered last are in memory, or on their way."""
        return self._arrived is not None and self._arrived.arrive is not None

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
        message = self.codec.prepare(sent, before and before.to_be_changed)
        bring = functools.partial(self._at_my_place, communicator.gather, message, sent)
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
        """Returns the experts of the domains' ranks, [owners, numel], waited for; not all codecs give the own ones."""
        return self._arrived.experts()

    def kept_as_they_came(self) -> AbstractContextManager[Any]:
        """Returns a context in which a forward pass does not save for its backward pass what it uses of `of_owners`,
        where that may be dropped.
        """
        if self.communicator.residents.limit is None:
            return nullcontext()
        return self._arrived.hooks(outer_hooks())

    def back_in_backward(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the experts' outputs as they are. When their gradient comes, the experts of this pass are gathered
        again if they were dropped, and so are, behind this backward pass, those of as many layers as are gathered
        ahead: here, on all ranks alike, whatever their own rows need.
        """
        communicator, (back, self._back) = self.communicator, (self._back, [])
        if communicator.residents.limit is None:
            return outputs

        def come_back(grad: torch.Tensor) -> torch.Tensor:
            communicator.come_back(back)
            return grad

        return linear(outputs, lambda outputs: outputs.view_as(outputs), come_back)

    def return_gradients(self, parts: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Starts to return the gradients of a backward pass, and of those before it whose gradients have waited, to
        the owners [owners, numel]; in a step's passes but the last they wait for that, where that takes memory of the
        device as many layers' as experts stay. Whole ones in float16 never wait.

        Returns:
            What waits for the sum of this rank's, [numel]; None: they wait.
        """
        step = current_step()
        limit = self.communicator.residents.limit if self.gradients.takes_memory else None
        waits = step is not None and step.defers(self, limit)
        if waits and (self.gradients.is_lossy or parts.dtype != torch.float16):  # whose range a step's sum may exceed
            self._deferring.append(self.communicator.defer(parts, self.own, self.gradients))
            return None
        for running in self._deferring:
            running.wait()
        self._deferring = []
        return self.communicator.reduce(parts, self.own, self.gradients)

    def forget_deferred(self) -> None:
        """Forgets gradients that have not been returned."""
        for running in self._deferring:
            with suppress(Exception):  # it is told that they are not returned
                running.wait()
        self._deferring = []
        self.gradients.restart()

    def lent(self) -> Lent:
        """Returns this rank's parameters for the other ranks' use in a pass: to be called before tokens are sent.

        What is sent after this in the forward pass, is sent back in the backward pass while gradients return.
        """
        returned = _Returned()
        return Lent(returned, _Lend.apply(returned, *self.weights.parameters))

    def of_owners(self, lent: Lent) -> list[dict[str, torch.Tensor] | None]:
        """Returns the parameters of each owner's experts by name; None for this rank's own, which the module holds.

        Differentiable: gradients return to the owner's parameters (a collective call in the backward pass).

        Args:
            lent: of this pass.
        """
        return self.by_owner(_Migrate.apply(self, lent.returned, [*self._of_others(self.gathered())], *lent.parameters))

    def by_owner(self, of_others: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor] | None]:
        """Returns the other owners' parameters, given as `BorrowedExperts` has them, as `of_owners` returns them."""
        names, tensors = [slot.name for slot in self.weights.slots], iter(of_others)
        return [
            None if place == self.own else {name: next(tensors) for name in names} for place in range(len(self.owners))
        ]

    def borrowed(self) -> BorrowedExperts:
        """Returns the other owners' experts for a pipeline that takes them when they are needed: those of the pass that
        `fetch` has begun. Whoever takes them gives their gradients to `stand_ins`.
        """
        return BorrowedExperts(self._arrived, self._of_others)

    def stand_ins(self, lent: Lent) -> tuple[torch.Tensor, ...]:
        """Returns tensors without memory in the shapes of `borrowed`'s parameters: the gradients that autograd gets of
        them return to the owners, as those of `of_owners` do.
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
    """Waits for this rank's sums, which come in the order of the parameters; None: a later pass has them."""


@dataclass(frozen=True)
class Lent:
    """A rank's own parameters in one pass, as the other ranks use them."""

    returned: _Returned
    parameters: tuple[torch.Tensor, ...]


class _Lend(Function):
    """Returns parameters as they are, and waits for their gradients here, which in the backward pass comes late.

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


class _Migrate(Function):
    """Returns the parameters of the other ranks' experts, and sums their gradients at their owners, over the domain.

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
        stand_in = torch.zeros((), dtype=ctx.dtype, device=ctx.device)  # what autograd needs to go on to _Lend
        return None, None, None, *(stand_in.expand(shape) for shape in ctx.shapes)
