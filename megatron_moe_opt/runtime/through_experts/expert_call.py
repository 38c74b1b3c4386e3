"""One call of the experts on one partition, and its backward pass, which comes later and may need its tensors back.

The experts are a module that is not ours. What its operations save for backward is caught as autograd's saved tensors:
those that lie in the partition's input are T_DI and stay with whoever owns that; parameters, frozen ones too, and
buffers stay where they are; the rest is T_M (MPMoE, Fig. 1), which is kept, offloaded but for what activations make of
it (saved_middle.py), or not saved at all and recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.runtime.engine.random_states import RandomStates
from megatron_moe_opt.runtime.through_experts.own_graph import Enter, Gradients, Leave
from megatron_moe_opt.runtime.through_experts.products import Products, ProductsRun, telling_halfway
from megatron_moe_opt.runtime.through_experts.saved_middle import SavedMiddle
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import BorrowedExperts
from megatron_moe_opt.schedules.memory_reuse import Restore

TakeGradient = Callable[[int, torch.Tensor | None], None]
"""A function that takes the number of a parameter and its gradient. None: an operation has used the parameter and has
no gradient for autograd, because it adds to the parameter's main_grad itself.
"""


@dataclass
class Shown:
    """What calls have shown of a layer's experts."""

    middle_row_bytes: int = 0
    """The bytes of T_M of a row that are offloaded, as far as an offload has shown them."""
    activation_row_bytes: int = 0
    """The bytes of a row that are computed again, as far as an offload has shown them."""
    use_only_their_own: bool = False
    """Whether a graph of this pass was looked through, and all that is trained in it is the experts' own."""
    products_run: ProductsRun = field(default_factory=ProductsRun)


@dataclass
class Experts:
    """The experts of one rank and layer."""

    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    """Runs the experts: takes tokens [R, H], rows of each expert held here (int64, CPU), probabilities [R] and
    parameters of other ranks' experts, and returns outputs [R, H].
    """
    parameters: tuple[torch.Tensor, ...]
    """The parameters that get a gradient."""
    constants: tuple[torch.Tensor, ...] = ()
    """What the experts have besides, and no call of theirs makes: frozen parameters and buffers."""
    borrowed: BorrowedExperts | None = None
    """The experts of other ranks that are held here in this pass; None: no expert travels."""
    stand_ins: tuple[torch.Tensor, ...] = ()
    """Stand-ins for the borrowed experts' parameters, through which autograd hands over
    gradients: no call uses them.
    """
    products: tuple[Products, ...] = ()
    """The pairs of matrix products between which nothing but an activation is saved, in any order."""
    fuses: bool = True
    """Whether matrix products may add gradients of weights to their main_grad (gradient accumulation fusion)."""
    random_states: Callable[[], RandomStates] = RandomStates
    """Returns the present states of all random generators that the experts may draw from."""
    shown: Shown = field(default_factory=Shown)
    """What calls have shown of the experts, in all passes of the layer."""

    @property
    def trained(self) -> tuple[torch.Tensor, ...]:
        """Returns all that gets a gradient, in the order of the numbers that TakeGradient gets."""
        return *self.parameters, *self.stand_ins

    def borrow(self) -> list[torch.Tensor]:
        """Returns the borrowed experts' parameters, once they have arrived."""
        return [] if self.borrowed is None else self.borrowed.parameters()


class ExpertCall:
    """A partition on its way through the experts."""

    def __init__(
        self,
        experts: Experts,
        tokens_per_expert: torch.Tensor,
        probs: torch.Tensor,
        middle: Restore,
        kept: set[int],
        hands_over: bool = False,
        halfway: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            probs: [R]; kept until backward: they are as small as routing data.
            middle: how T_M is restored.
            kept: addresses of storages that do not count as T_M: those of parameters and constants.
            hands_over: a T_M that is kept is the caller's between `middle.hand_over` and `middle.take_back`.
            halfway: called when half of the products have run, in each pass.
        """
        self._hands_over, self._halfway = hands_over, halfway
        self._experts, self._tokens_per_expert, self._probs, self._restore = experts, tokens_per_expert, probs, middle
        self.middle = SavedMiddle(kept | {probs.untyped_storage().data_ptr()}, experts.borrowed)
        self._gradients: Gradients | None = Gradients()
        self._anchor: torch.Tensor | None = None
        self._exit: torch.Tensor | None = None
        self._drawn_from: RandomStates | None = None
        """The states of random generators before the experts drew numbers that are to be drawn again; None: none."""
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Returns the context of the forward pass as far as it decides in which dtype experts compute."""
        self._has_written = False
        """Whether the experts have written into what they were given, in the forward pass."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the outputs [R, H] of tokens [R, H], without a graph to the outside."""
        if self._restore is Restore.KEEP and not self._hands_over:
            return self._record(tokens, self._without_borrowed())
        self._autocast = _present_autocast(tokens.device.type)
        given = _versions(tokens, self._probs)
        output = self._forward_to_be_restored(tokens)
        self._has_written = _versions(tokens, self._probs) != given
        return output

    def _forward_to_be_restored(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._restore is Restore.RECOMPUTE:
            states = self._experts.random_states()
            with torch.no_grad(), self._telling_halfway():
                output = self._experts.run(tokens, self._tokens_per_expert, self._probs, self._experts.borrow())
            self._drawn_from = states if states.moved() else None
            return output
        offloaded = self._experts.products if self._restore is Restore.OFFLOAD else ()
        with self.middle.reading(tokens), self.middle.noting_activations(offloaded):
            output = self._record(tokens, self.middle.hooks())
        self.middle.forget_activations()
        return output

    def recompute(self, tokens: torch.Tensor) -> None:
        """Runs the experts again, on the same tokens and with the same random numbers, and keeps T_M this time."""
        self._check_repeats()
        drawn_from, self._drawn_from = self._drawn_from, None
        with self._autocast():
            if drawn_from is None:
                self._record(tokens, self._without_borrowed())
                return
            now = self._experts.random_states()
            drawn_from.restore()
            self._record(tokens, self._without_borrowed())
            now.restore()

    def activate(self, tokens: torch.Tensor) -> None:
        """Computes again, on the same tokens, what was not offloaded of T_M, the rest of which is here.

        Raises:
            ConfigurationError: random numbers are drawn for that. They would be others than before, as the products,
                which may draw some themselves, do not run again.
        """
        self._check_repeats()
        experts = self._experts
        # They save what is needed for gradients of both, as in the forward pass.
        tokens, probs = (one.detach().requires_grad_() for one in (tokens, self._probs))
        states = experts.random_states()
        with self.middle.reading(tokens), self._autocast():
            self.middle.activate(
                lambda: experts.run(tokens, self._tokens_per_expert, probs, experts.borrow()), experts.products
            )
        if states.moved():
            raise ConfigurationError(
                "--moe-opt-memory-reuse S1 and S2 compute activations of experts again, and these draw random numbers "
                "(dropout): give --moe-opt-memory-reuse S3 or S4, which draw the same ones again, or none"
            )

    def _check_repeats(self) -> None:
        """Refuses to run experts again on what they have changed."""
        if self._has_written:
            raise ConfigurationError(
                "--moe-opt-memory-reuse S1 to S4 run experts again on the tokens and probabilities that they were "
                "given, and these experts write into them: copy them first, or give --moe-opt-memory-reuse none"
            )

    def backward(
        self, tokens: torch.Tensor, grad_output: torch.Tensor, take: TakeGradient
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradients of tokens [R, H] and probabilities [R]. Can be called once.

        Args:
            tokens: as in the forward pass, wherever they are now.
            take: is told as soon as a parameter has its gradient.
        """
        gradients, self._gradients = self._gradients, None  # the call outlives them: its partition's are sent by then
        gradients.output = grad_output
        if self._experts.borrowed is not None:
            self._experts.borrow()  # now, on all ranks alike: those that begin with their own experts would ask later
        # Not of those that were frozen since: neither autograd nor Megatron gives them a gradient.
        trained = {number: one for number, one in enumerate(self._experts.parameters) if one.requires_grad}
        inputs = (self._anchor, *trained.values())
        with self.middle.reading(tokens), _taking(trained, take) as taken:
            found = torch.autograd.grad(self._exit, inputs, torch.zeros_like(self._exit), allow_unused=True)[1:]
        self._exit = self._anchor = None
        # PyTorch 2.6 passes over hooks of parameters that a function has saved through hooks.
        for (number, parameter), gradient in zip(trained.items(), found, strict=True):
            is_used = gradient is not None or parameter.data_ptr() in self.middle.used
            if is_used and number not in taken:
                take(number, gradient)
        of_tokens, of_probs, *of_borrowed = gradients.sources
        for number, gradient in enumerate(of_borrowed, start=len(self._experts.parameters)):
            if gradient is not None:  # the expert has rows
                take(number, gradient)
        return (
            torch.zeros_like(tokens) if of_tokens is None else of_tokens,
            torch.zeros_like(self._probs) if of_probs is None else of_probs,
        )

    def offload_middle(self) -> None:
        """Begins to copy T_M to the host but for its activations, and notes how many bytes of both a row has."""
        of_row = (num_bytes // max(1, self._probs.numel()) for num_bytes in self.middle.offload())
        self._experts.shown.middle_row_bytes, self._experts.shown.activation_row_bytes = of_row

    def _record(self, tokens: torch.Tensor, hooks: AbstractContextManager[Any]) -> torch.Tensor:
        self._anchor = torch.empty(0, device=tokens.device, requires_grad=True)
        with torch.enable_grad(), hooks, self._telling_halfway():
            borrowed, stand_ins = self._experts.borrow(), self._experts.stand_ins
            if stand_ins and any(one.requires_grad for one in stand_ins):
                sources = tokens, self._probs, *borrowed
                tokens, probs, *borrowed = Enter.apply(self._anchor, self._gradients, *sources)
            else:  # nobody wants gradients of frozen ones
                tokens, probs = Enter.apply(self._anchor, self._gradients, tokens, self._probs)
            output = self._experts.run(tokens, self._tokens_per_expert, probs, borrowed)
            self._exit = Leave.apply(output, self._gradients)
        if not self._experts.shown.use_only_their_own:
            _check_leaves(self._exit, self._experts)
            self._experts.shown.use_only_their_own = True
        return output.detach()

    def _telling_halfway(self) -> AbstractContextManager[None]:
        if self._halfway is None:
            return nullcontext()
        return telling_halfway(self._experts.products, self._experts.shown.products_run, self._halfway)

    def _without_borrowed(self) -> AbstractContextManager[Any]:
        """Returns a context in which operations save what they save anyhow, but no borrowed expert: it may go."""
        borrowed = self._experts.borrowed
        return nullcontext() if borrowed is None else borrowed.arrived.hooks()


def _present_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what makes a context in which operations choose their dtypes as they do here."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype, cache_enabled=False)


def _versions(*tensors: torch.Tensor) -> list[int]:
    """Returns what counts the writes into tensors; nothing in inference, where nothing does."""
    return [one._version for one in tensors if not one.is_inference()]


def trained_beside(
    end: Node | None, parameters: Sequence[torch.Tensor], begins: Iterable[Node] = ()
) -> torch.Tensor | None:
    """Returns a tensor that is trained in the graph that ends at a node, and is none of the parameters; None: there is
    none.

    Args:
        end: None: there is no graph.
        begins: nodes at which the graph is left, as it is at what made a parameter.
    """
    known, nodes = {id(one) for one in parameters}, [end]
    seen = {None, *begins, *(one.grad_fn for one in parameters)}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf.numel() and id(leaf) not in known:  # anchors of graphs have no elements
            return leaf
    return None


def _check_leaves(exit_: torch.Tensor, experts: Experts) -> None:
    """Refuses, with ConfigurationError, experts with something trained in their graph that is none of their trained
    parameters: nobody would ask for its gradient.
    """
    leaf = trained_beside(exit_.grad_fn, experts.parameters)
    if any(leaf is one for one in experts.constants):
        raise ConfigurationError(
            f"--moe-opt-memory-reuse S3 and S4 run experts again, and a parameter of shape {list(leaf.shape)} that was "
            "frozen in the forward pass is trained by now, and would get no gradient: change what is trained between "
            "steps, or give --moe-opt-memory-reuse none"
        )
    if leaf is not None:
        raise ConfigurationError(
            f"--moe-token-dispatcher-type mpmoe: a trained tensor of shape {list(leaf.shape)} takes part in the "
            "experts without being a parameter of the layer's experts module, and would get no gradient from them: "
            "make it one, or use monta, which leaves the call of the experts to Megatron"
        )


@contextmanager
def _taking(parameters: Mapping[int, torch.Tensor], take: TakeGradient) -> Iterator[set[int]]:
    """Takes gradients of parameters, by their numbers, as they arise inside the context. Yields the numbers of the
    parameters that had one taken.

    torch.autograd.grad would hold on to all of them until it returns; it gets stand-ins without memory. Hooks that
    others have put on a parameter are for its whole gradient, and are set aside: they run when autograd gets that.
    """
    taken: set[int] = set()

    def hook(number: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        taken.add(number)
        take(number, grad)
        return None if grad is None else grad.new_zeros(()).expand_as(grad)

    handles, of_others = [], []
    for number, parameter in parameters.items():
        if parameter._backward_hooks:
            of_others.append((parameter._backward_hooks, dict(parameter._backward_hooks)))
            parameter._backward_hooks.clear()
        handles.append(parameter.register_hook(functools.partial(hook, number)))
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
        for hooks, aside in of_others:
            hooks.update(aside)
