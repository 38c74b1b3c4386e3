"""What a layer's experts show in a pass, and no configuration says: which systems would not train them as stock does.

Gates and adapters that others put on experts are hooks, on some ranks alone perhaps, and may come at any time before
the first pass. So a call of the experts is looked at, from before the first of their hooks to behind the last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from megatron_moe_opt.integration.auto.first_step import SeenExperts
from megatron_moe_opt.integration.random_states import AllRandomStates
from megatron_moe_opt.runtime.through_experts.expert_call import trained_beside


class ExpertsLook:
    """Looks at the calls of a layer's experts until one has a graph: the first run of what is recomputed has none."""

    def __init__(self, experts: torch.nn.Module) -> None:
        self._experts = experts
        self._handles: list[RemovableHandle] = []
        """Of the hooks on the experts; none, while they are not looked at."""
        self._call: tuple[AllRandomStates, list[Node]] | None = None
        """Of the call under way: the states of random generators before it, and the nodes that its inputs come from."""
        self._outside: tuple[int, ...] | None = None
        self._draw = self._is_over = False

    def again(self) -> None:
        """Begins to look anew, at the next pass."""
        self._end()
        self._outside, self._draw, self._is_over = None, False, False

    def before_pass(self) -> None:
        """Puts hooks around those that are on the experts by now, unless they were looked at. For every pass."""
        if not self._is_over and not self._handles:
            begin = self._experts.register_forward_pre_hook(self._begin_call, prepend=True)
            self._handles = [begin, self._experts.register_forward_hook(self._end_call)]

    def seen(self, joint: ProcessGroup) -> SeenExperts:
        """Returns what was seen, and how the experts' parameters are now; it looks no more.

        Args:
            joint: the ranks that share the layer's experts.
        """
        self._end()
        parameters = [*self._experts.parameters()]
        return SeenExperts(
            self._outside,
            self._draw,
            any(one.requires_grad for one in parameters),
            tuple(sorted({str(one.dtype) for one in parameters})),
            dist.get_process_group_ranks(joint)[0],
        )

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._call, self._is_over = [], None, True

    def _begin_call(self, _: torch.nn.Module, inputs: tuple[Any, ...] | None) -> None:
        if inputs is None:  # Megatron's fused experts call all hooks so, inside of the call
            return
        trained = [one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad]
        begins = [get_gradient_edge(one).node for one in trained] if torch.is_grad_enabled() else []
        self._call = AllRandomStates(), begins

    def _end_call(self, _: torch.nn.Module, inputs: tuple[Any, ...] | None, outputs: tuple[torch.Tensor, Any]) -> None:
        if inputs is None:
            return
        (states, begins), self._call = self._call, None
        self._draw |= states.moved()
        if torch.is_grad_enabled():
            own = [*self._experts.parameters(), *self._experts.buffers()]
            leaf = trained_beside(outputs[0].grad_fn, own, begins)
            self._outside = None if leaf is None else tuple(leaf.shape)
            self._end()
