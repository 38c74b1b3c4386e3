"""One call of the shared experts beside a pipeline: in two halves, forward and backward, that are ops of its own.

Each half has a graph of its own, as a checkpointed layer has, so that its backward pass runs when the pipeline says and
not when autograd comes by. It adds to the parameters' gradients at once: whatever waits for these sees them as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_moe_opt.runtime.through_experts.own_graph import Enter, Gradients, Leave


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts of one layer."""

    first: Callable[[torch.Tensor], torch.Tensor]
    """Takes all tokens of this rank, and returns what the second half takes."""
    second: Callable[[torch.Tensor], torch.Tensor]
    is_trained: bool
    """Whether a parameter of theirs gets a gradient."""


class SharedCall:
    """What the tokens of one pass become in the shared experts, and their gradients. Each method is called once."""

    def __init__(self, experts: SharedExperts, tokens: torch.Tensor) -> None:
        trains = torch.is_grad_enabled()
        self.num_bytes = tokens.nbytes
        """The bytes of the tokens, which are not held here once the first half has run."""
        self._is_trained = trains and experts.is_trained
        self._first, self._second = _Half(experts.first, trains), _Half(experts.second, trains)
        self._next: torch.Tensor | None = tokens
        """What the next half takes: tokens and what is made of them, and gradients on the way back."""

    def begin(self) -> torch.Tensor:
        """Returns what autograd takes for what the call begins with, before it runs: the tokens or, where parameters
        alone are trained, an empty leaf that requires a gradient, too. Else autograd would not come by.
        """
        if self._next.requires_grad or not self._is_trained:
            return self._next
        return self._next.new_empty(0).requires_grad_()

    def run_first(self) -> None:
        """Runs the first half on the tokens."""
        self._next = self._first.forward(self._next)

    def run_second(self) -> None:
        """Runs the second half on what the first one has returned."""
        self._next = self._second.forward(self._next)

    def take_output(self) -> torch.Tensor:
        """Returns what both halves have made of the tokens, without a graph. It is not held here any longer."""
        output, self._next = self._next.detach(), None
        return output

    def check_backward(self) -> None:
        """Raises RuntimeError where some gradients alone are asked for: those of parameters would be added to, too."""
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "gradients of some tensors alone (torch.autograd.grad, or backward with inputs) do not go through "
                "mpmoe with --moe-shared-expert-overlap, nor through Megatron's recomputation: leave the flag out"
            )

    def backward_of_second(self, grad: torch.Tensor) -> None:
        """Runs the backward pass of the second half. grad: of the output."""
        self._next = self._second.backward(grad)

    def backward_of_first(self) -> None:
        """Runs the backward pass of the first half, on what the second one's has given."""
        self._next = self._first.backward(self._next)

    def take_gradient(self) -> torch.Tensor | None:
        """Returns the gradient of the tokens; None: they need none."""
        grad, self._next = self._next, None
        return grad


class _Half:
    """A half of the shared experts, with a graph of its own."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], trains: bool) -> None:
        self._run, self._trains, self._gradients = run, trains, Gradients()
        self._exit: torch.Tensor | None = None

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Returns what the half makes of `source`, which gets a gradient if it requires one."""
        with torch.set_grad_enabled(self._trains):
            begin = source.detach()
            if self._trains and source.requires_grad:
                anchor = torch.empty(0, device=source.device, requires_grad=True)
                (begin,) = Enter.apply(anchor, self._gradients, begin)
            result = self._run(begin)
            if result.requires_grad:
                self._exit = Leave.apply(result, self._gradients)
        return result

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient of what the half took; None: it has none. Adds to those of parameters."""
        if grad is None or self._exit is None:
            return None
        exit_, self._exit, self._gradients.output = self._exit, None, grad
        torch.autograd.backward(exit_, torch.zeros_like(exit_))
        (of_source,) = self._gradients.sources or (None,)
        return of_source
