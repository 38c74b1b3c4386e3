"""MoE layers under tensor parallelism without sequence parallelism, where every TP rank holds all tokens.

    S1   split over TP -> the layer as under sequence parallelism -> AllGather over TP
    S2   the layer, its router on all tokens; the dispatcher splits the rows and gathers them again

(Parm, section III-B and Fig. 3b and c, "PauseMP".) Each rank sends and computes its own part, where stock Megatron
would do everything TP times over, which it refuses in training. Split and AllGather are each other's gradient.

Gradients of weights that all TP ranks hold are summed over TP as they arise where a rank has seen its part of the
tokens (S1's router, a shared expert's gate); Megatron's own sum at the end of a step is for sequence-parallel models.
S2's router sees all tokens on every rank: its gradient is complete, and its losses are those of one rank.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.layer.layer_seam import LayerSeam, LayerSlot, router_of
from megatron_moe_opt.systems.system import FLAG

NOT_UNDER_STOCK = "stock Megatron does not train MoE layers under TP without --sequence-parallel: add it"
"""Why stock does not run where `holds_replicated_tokens`."""


def holds_replicated_tokens(config: Any) -> bool:
    """Whether every TP rank of a model of this configuration holds all tokens."""
    return config.tensor_model_parallel_size > 1 and not config.sequence_parallel


def keeps_from_splitting_rows(config: Any) -> str | None:
    """Returns why S2 would train another function than S1 where TP ranks hold the same tokens, or would have them
    disagree, beginning with a flag; None: neither.

    Random logits come from the generator of expert parallelism, which differs over TP; jitter from the default one,
    which is the same only as long as all TP ranks draw as much from it, and nothing ensures that. Nothing else in the
    router draws, Sinkhorn's load balancing neither. Megatron-Core 0.16 multiplies losses by the tokens of the router
    that has them. From 0.17 on experts trust the padding of the router.
    """
    if not holds_replicated_tokens(config):
        return None
    drawn = drawn_by_routers(config)
    if drawn is not None:
        return f"{drawn} has each rank of a TP group route the tokens that all of them hold in its own way"
    if config.calculate_per_token_loss and (config.moe_z_loss_coeff or _has_aux_loss(config.moe_aux_loss_coeff)):
        return "--calculate-per-token-loss counts a router's losses once for each token that it sees, on all TP ranks"
    if config.moe_router_padding_for_quantization:
        return (
            "--moe-router-padding-for-quantization pads the rows of an expert before ranks of a TP group share them "
            "out, so that those which arrive need not be a multiple any more"
        )
    tp = config.tensor_model_parallel_size
    joint = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    if max(tp, joint) % min(tp, joint):
        return (
            f"--tensor-model-parallel-size {tp}, which neither divides --expert-model-parallel-size x "
            f"--expert-tensor-parallel-size = {joint} nor is divided by it, has ranks of a TP group exchange rows with "
            "others, whose numbers of rows each of these groups would go by"
        )
    return None


def routes_together(config: Any) -> bool:
    """Whether which rows a token makes depends on the other tokens that its router sees: it drops or balances them."""
    return config.moe_expert_capacity_factor is not None or config.moe_router_load_balancing_type == "sinkhorn"


def _has_aux_loss(coefficients: float | list[float]) -> bool:
    return any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)


def drawn_by_routers(config: Any) -> str | None:
    """Returns the flag by which routers draw numbers for each token from their rank's generator; None: none does."""
    if config.moe_router_force_load_balancing:
        return "--moe-router-force-load-balancing"
    if getattr(config, "moe_router_force_biased", None) is not None:  # from megatron-core 0.17 on
        return f"--moe-router-force-biased {config.moe_router_force_biased:g}"
    if config.moe_input_jitter_eps is not None:
        return f"--moe-input-jitter-eps {config.moe_input_jitter_eps:g}"
    return None


@contextmanager
def reading_as_sequence_parallel(config: Any) -> Iterator[None]:
    """Lets `config` say sequence parallel inside the block: its layers are built, and run, for a part of the tokens."""
    config.sequence_parallel = True
    try:
        yield
    finally:
        config.sequence_parallel = False


def take_replicated_tokens(layer: Any) -> None:
    """Lets a MoELayer that was built inside `reading_as_sequence_parallel` take the tokens that all TP ranks hold.

    Its dispatcher says at its first forward pass, when the number of tokens is known, on which of the two ways. Another
    one may take its place between optimizer steps, and go the other way.
    """
    seam, group, of_parts, marked = LayerSeam(layer), layer.tp_group, _linears_of_parts(layer), _marked(layer)
    built = {name: weakref.ref(parameter) for name, parameter in layer.named_parameters()}
    stock_forward = functools.partial(seam.stock(LayerSlot.FORWARD), layer)
    edge: _Edge | None = None

    def forward(
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        nonlocal edge
        _check(hidden_states, layer, of_parts, intermediate_tensors)
        edge = edge or _Edge(layer, marked, built)
        edge.complete_gradients()
        edge.splits_rows = layer.token_dispatcher.take_copies(hidden_states, group)
        edge.check_additions()
        with reading_as_sequence_parallel(layer.config):
            if edge.splits_rows:
                return stock_forward(hidden_states, padding_mask=padding_mask)
            if padding_mask is not None:  # [B, S]
                padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
            output, bias = stock_forward(split_over_tp(hidden_states, group), padding_mask=padding_mask)
        return _gather(output, group), bias

    seam.put(LayerSlot.FORWARD, forward)


class _Edge:
    """Gradients and losses of what all TP ranks hold; see the top of this file.

    `built` are the parameters that the layer was built with, by name, and `marked` the names of those that were marked
    then. FSDP leaves others in their places, without marks: FSDP2 while a layer runs, Megatron's where weights are made
    on the meta device. What is put around a module gives its parameters other names.
    """

    def __init__(self, layer: Any, marked: set[str], built: dict[str, weakref.ref[torch.nn.Parameter]]) -> None:
        self._router, self._group = router_of(layer), layer.tp_group
        self._splits_rows = False
        marked = marked | _marked(layer)
        known, still_there = marked | built.keys(), {id(parameter()) for parameter in built.values()}
        self._frozen = [one for one in layer.named_parameters() if one[0] in marked]
        """The parameters whose gradients are not completed over TP yet, and their names."""
        self._added = [
            (name, parameter)
            for name, parameter in layer.named_parameters()
            if name not in known and id(parameter) not in still_there and not name.startswith("experts.")
        ]
        """The parameters of which Megatron does not say what part of the tokens they see, as it does of its own."""
        self.complete_gradients()
        self._stock_groups = self._router.tp_cp_group, self._router.tp_dp_cp_group
        if layer.shared_experts is not None:
            self._take_tokens_of_both(layer.shared_experts)

    def complete_gradients(self) -> None:
        """Has gradients completed from here on of all that are trained now: what is frozen may be trained later."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._complete, name))
        self._frozen = [one for one in self._frozen if not one[1].requires_grad]

    def check_additions(self) -> None:
        """Refuses what is trained and was put into the layer after it was built, such as an adapter around the router
        under S1: where it sees a part of the tokens on each TP rank, nobody would add up its gradients.
        """
        for name, parameter in self._added:
            if parameter.requires_grad and self._sees_part(name):
                raise ConfigurationError(
                    f"{name} was added to a MoE layer, and TP ranks without --sequence-parallel would train it on a "
                    "part of the tokens each: add --sequence-parallel, freeze it, or set its attribute "
                    "sequence_parallel, by which its gradients are added up"
                )

    @property
    def splits_rows(self) -> bool:
        """Whether the layer runs S2. Forward and backward passes of an optimizer step all go one way."""
        return self._splits_rows

    @splits_rows.setter
    def splits_rows(self, splits_rows: bool) -> None:
        if splits_rows:  # in each pass: evaluation in groups of its own puts a router's first ones back
            self._router.tp_cp_group, self._router.tp_dp_cp_group = self._router.cp_group, self._without_tp
        elif self._splits_rows:
            self._router.tp_cp_group, self._router.tp_dp_cp_group = self._stock_groups
        self._splits_rows = splits_rows

    @functools.cached_property
    def _without_tp(self) -> ProcessGroup:
        """The group over which global auxiliary losses are means under S2: not over TP, on whose ranks the router sees
        the same tokens. Where there are none, stock's.
        """
        from megatron.core import parallel_state

        kinds, (_, stock) = self._router.config.moe_router_load_balancing_type, self._stock_groups
        if "global_aux_loss" not in ([kinds] if isinstance(kinds, str) else kinds):
            return stock
        known = parallel_state.get_tensor_and_data_parallel_group(check_initialized=False, with_context_parallel=True)
        if known is None or dist.get_process_group_ranks(known) != dist.get_process_group_ranks(stock):
            raise ConfigurationError(
                "--moe-router-load-balancing-type global_aux_loss without --sequence-parallel needs the data-parallel "
                f"groups of Megatron's parallel_state, and this model has others: add --sequence-parallel, or use "
                f"{FLAG} monta"
            )
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def _sees_part(self, name: str) -> bool:
        """Whether the parameter of this name sees a part of the tokens on each TP rank: the router's only under S1."""
        return not (self._splits_rows and name.startswith("router."))

    def _complete(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """Returns a gradient's sum over TP, rounded once, where a rank has seen its part of the tokens."""
        if not self._sees_part(name):
            return grad
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(grad.dtype)

    def _take_tokens_of_both(self, shared_experts: Any) -> None:
        """Lets shared experts that were built for a part of the tokens take and return all of them, under S2."""
        forward, first, last = shared_experts.forward, shared_experts.pre_forward_comm, shared_experts.get_output

        def split(tokens: torch.Tensor) -> torch.Tensor:
            return split_over_tp(tokens, self._group) if self._splits_rows else tokens

        def gather(part: torch.Tensor) -> torch.Tensor:
            return _gather(part, self._group) if self._splits_rows else part

        shared_experts.forward = lambda tokens: gather(forward(split(tokens)))
        shared_experts.pre_forward_comm = lambda tokens: first(split(tokens))
        shared_experts.get_output = lambda: gather(last())


def _marked(layer: Any) -> set[str]:
    """Returns the names of a layer's parameters of which Megatron says that ranks have seen a part of the tokens each,
    but for biases of experts, which have seen those of all ranks.
    """
    return {
        name
        for name, parameter in layer.named_parameters()
        if getattr(parameter, "sequence_parallel", False) and not name.startswith("experts.")
    }


def split_over_tp(tokens: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns this rank's part of tokens [S, B, H] that all TP ranks hold; the gradient is gathered.

    Raises:
        ConfigurationError: there are no equal parts.
    """
    from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

    _check_length(tokens, group)
    return scatter_to_sequence_parallel_region(tokens, group=group)


def _gather(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Returns all parts. The gradient of what is gathered is the same on all ranks: each takes its part of it."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=False, group=group)


def _check_length(hidden_states: torch.Tensor, group: ProcessGroup) -> None:
    if hidden_states.size(0) % group.size():
        raise ConfigurationError(
            f"--seq-length: the {hidden_states.size(0)} tokens of a sequence on a rank cannot be split over "
            f"--tensor-model-parallel-size {group.size()}: choose a length that it divides"
        )


def _linears_of_parts(layer: Any) -> list[Any]:
    """Returns the linears of shared experts that were built for a part of the tokens."""
    shared = layer.shared_experts
    return [] if shared is None else [one for one in shared.modules() if getattr(one, "sequence_parallel", False)]


def _check(hidden_states: torch.Tensor, layer: Any, of_parts: list[Any], intermediate_tensors: Any) -> None:
    """Refuses a pass without equal parts, or of a part of a layer. Megatron's text generation has one token at a time,
    and before that has all linears, those `of_parts` too, take all tokens.
    """
    tp, name = layer.tp_group, layer.config.moe_token_dispatcher_type
    is_cut = layer.training or hidden_states.size(0) % tp.size() == 0
    if not is_cut or not all(linear.sequence_parallel for linear in of_parts):
        raise ConfigurationError(
            f"{FLAG} {name} without --sequence-parallel splits a sequence over --tensor-model-parallel-size "
            f"{tp.size()}, which text generation does not go with: generate with {FLAG} alltoall"
        )
    _check_length(hidden_states, tp)
    if intermediate_tensors is not None:
        raise ConfigurationError(
            "a MoE layer without --sequence-parallel takes no intermediate tensors: add --sequence-parallel, or use "
            f"{FLAG} alltoall"
        )
