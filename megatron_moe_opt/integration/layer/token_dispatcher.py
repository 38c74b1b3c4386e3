"""Megatron's six dispatcher methods around one of our dispatchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity, pad_routing_map
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch.distributed import ProcessGroup

from megatron_moe_opt.integration.layer.overlapped_batches import edge_of, overlaps_batches, with_edge
from megatron_moe_opt.integration.layer.shared_halves import halves_of, taken
from megatron_moe_opt.runtime.engine.recomputation import saved_tensors_are_hooked
from megatron_moe_opt.runtime.through_experts.shared_call import SharedExperts

if TYPE_CHECKING:
    from megatron_moe_opt.dispatchers.dispatcher import Dispatcher


class PluggedTokenDispatcher(MoETokenDispatcher):
    """Stands where Megatron's MoEAlltoAllTokenDispatcher stands in a MoELayer.

    Megatron's contract passes (tokens, probabilities) from step to step. Ours travel in one packed tensor: it goes in
    the place of the tokens, and the probabilities handed on beside it stay where they are, [tokens, experts], until
    token_dispatch returns those that arrived. (See overlapped_batches.py for what is handed on where Megatron calls the
    methods itself.)
    """

    pipelines_shared_experts = False
    """Whether shared experts that overlap run between dispatch and combine, beside the pipeline that has all of these.
    """

    def __init__(
        self, dispatcher: Dispatcher, config: Any, pg_collection: Any, routed_by: Callable[[], str | None]
    ) -> None:
        """
        Args:
            routed_by: says who routes where it is not Megatron's router; asked in each pass.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self.dispatcher, self._routed_by = dispatcher, routed_by
        self._overlaps = overlaps_batches(config)
        self._dispatched: Any = None
        self._tokens_per_expert: torch.Tensor | None = None
        self._takes_copies: bool | None = None
        self._shared_are_beside = False
        self._slots: torch.Tensor | None = None
        """The experts in the order of their places; None: that is the order of their numbers."""

    def place_experts(self, slots: Sequence[int]) -> None:
        """Has tokens sent to where the experts are. slots: the number of the expert at each place."""
        self._slots = torch.tensor(slots)

    @property
    def dispatched(self) -> Any:
        """Returns what the dispatcher's `permute` has left for its other steps, in the pass under way."""
        return self._dispatched

    def take_copies(self, tokens: torch.Tensor, tp: ProcessGroup) -> bool:
        """See Dispatcher.take_copies, which is asked once. tokens: [S, B, H]."""
        if self._takes_copies is None:
            self._takes_copies = self.dispatcher.take_copies(tp, tokens.view(-1, tokens.size(-1)))
        return self._takes_copies

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows to send, permuted and packed with their probabilities, and what goes on as `probs`.

        Args:
            tokens: [S/TP, B, H].
            routing_map: bool [S/TP * B, E].
            probs: [S/TP * B, E].
        """
        self.hidden_shape = tokens.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        if self._slots is not None:  # here, where whatever stands in the router's place comes by
            probs, routing_map = self._by_place(probs), self._by_place(routing_map)
        config, capacity, num_rows = self.config, None, None
        if config.moe_router_padding_for_quantization:
            # Some ways of it write to what the router may need for its gradients.
            routing_map = pad_routing_map(routing_map.clone(), get_align_size_for_quantization(config))
        if config.moe_pad_expert_input_to_capacity:  # of that too, as stock has it
            routed = routing_map.size(0) * config.moe_router_topk
            capacity = get_capacity(routed, config.num_moe_experts, config.moe_expert_capacity_factor)
        elif not (
            config.moe_router_padding_for_quantization
            or config.moe_expert_capacity_factor is not None
            or config.moe_enable_routing_replay  # may name an expert twice for a token
            or self._routed_by() is not None
        ):  # dropless: known without asking the device
            num_rows = routing_map.size(0) * config.moe_router_topk
        packed, self._dispatched = self.dispatcher.permute(
            tokens.reshape(-1, tokens.size(-1)).contiguous(),
            probs.contiguous(),
            routing_map.contiguous(),
            capacity=capacity,
            num_rows=num_rows,
        )
        return packed, edge_of(probs) if self._overlaps else probs

    def token_dispatch(self, packed: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends every row to its expert's rank, sorted by local expert; shared experts' first half runs beside it."""
        self._shared_experts_after_main_stream()
        tokens, self._tokens_per_expert, arrived = self.dispatcher.dispatch(packed, self._dispatched, probs.dtype)
        if self.shared_experts is not None:
            # Hooks would see what the halves save in the middle of the pipeline, where a repeated pass may end early.
            self._shared_are_beside = self.pipelines_shared_experts and not saved_tensors_are_hooked()
            if not self._shared_are_beside:
                self.shared_experts.linear_fc1_forward_and_act(tokens)
        return tokens, with_edge(arrived, probs) if self._overlaps else arrived

    def take_shared_experts(self) -> tuple[SharedExperts, torch.Tensor] | None:
        """Returns the shared experts to run beside the others, and their tokens; None: there are none, or they run
        before and after. Whoever gets them calls `give_shared_output`.
        """
        if self.shared_experts is None or not self._shared_are_beside:
            return None
        return halves_of(self.shared_experts), taken(self.shared_experts, "cached_fc1_input")

    def give_shared_output(self, output: torch.Tensor) -> None:
        """Takes what shared experts have returned that ran beside the others."""
        self.shared_experts.cached_fc2_output = output

    def dispatch_postprocess(
        self, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, rows per local expert (CPU) and probabilities: dispatch has sorted them already."""
        return tokens, self._tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the experts' outputs as they are: combine sorts and sums them as it sends them."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns expert outputs to the ranks of their tokens; the shared experts' second half runs beside it."""
        if not self._shared_are_beside:
            self._shared_experts_after_main_stream()
        rows = self.dispatcher.combine(hidden_states, self._dispatched)
        if self.shared_experts is not None:
            if not self._shared_are_beside:
                self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output [S/TP, B, H]: the sum of each token's rows, and the shared experts'."""
        output = self.dispatcher.unpermute(hidden_states, self._dispatched).view(self.hidden_shape)
        if torch.is_autocast_enabled(output.device.type):  # as experts return it, which stock's rows come back in
            output = output.to(torch.get_autocast_dtype(output.device.type))
        self._dispatched = None  # the autograd graph keeps what backward needs
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _by_place(self, of_experts: torch.Tensor) -> torch.Tensor:
        self._slots = self._slots.to(of_experts.device)
        return of_experts.index_select(1, self._slots)

    def _shared_experts_after_main_stream(self) -> None:
        # From megatron-core 0.17 on the shared experts' stream is ordered by its user.
        if hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()
