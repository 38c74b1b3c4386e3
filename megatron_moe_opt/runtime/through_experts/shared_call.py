"""One call of the shared experts beside a pipeline: in two halves, forward and backward, that are ops of its own.

Each half has a graph of its own, as a checkpointed layer has, so that its backward pass runs when the pipeline says and
not when autograd comes by. It adds to the parameters' gradients at once: whatever waits for these sees them as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SharedExperts:
    """The shared experts of one layer."""

    first: Callable[[torch.Tensor], torch.Tensor]
    """Takes all tokens of this rank, and returns what the second half takes."""
    second: Callable[[torch.Tensor], torch.Tensor]


class SharedCall:
    """What the tokens of one pass become in the shared experts, and their gradients. Each method is called once."""

    output: torch.Tensor | None = None
    """What the second half has returned, without its graph."""
    grad_tokens: torch.Tensor | None = None
    """The gradient of the tokens, once the first half's backward pass has run."""

    def __init__(self, experts: SharedExperts, tokens: torch.Tensor) -> None:
        self._experts, self._trains = experts, torch.is_grad_enabled()
        self.tokens = tokens.detach().requires_grad_() if self._trains and not tokens.requires_grad else tokens
        """The tokens. They require a gradient, or autograd would not come by where the shared experts alone train."""
        self._halves: list[_Half] = []
        self._grad: torch.Tensor | None = None

    def run_first(self) -> None:
        """Runs the first half on the tokens."""
        self._halves.append(_Half(self._experts.first, self.tokens, self._trains))

    def run_second(self) -> None:
        """Runs the second half on what the first one has returned."""
        self._halves.append(_Half(self._experts.second, self._halves[0].end, self._trains))
        self.output = self._halves[1].end.detach()

    def backward_of_second(self, grad: torch.Tensor) -> None:
        """Runs the backward pass of the second half. grad: of the output."""
        self._grad = self._halves.pop().backward(grad)

    def backward_of_first(self) -> None:
        """Runs the backward pass of the first half, on what the second one's has given."""
        self.grad_tokens, self._grad = self._halves.pop().backward(self._grad), None


class _Half:
    """A half that has run, and its graph."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], source: torch.Tensor, trains: bool) -> None:
        self._begin = source.detach().requires_grad_(trains and source.requires_grad)
        with torch.set_grad_enabled(trains):
            self.end = run(self._begin)

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient of what the half took; None: it has none."""
        if grad is not None and self.end.requires_grad:
            torch.autograd.backward(self.end, grad)
        return self._begin.grad
