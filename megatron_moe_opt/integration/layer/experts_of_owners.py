"""One call of a Megatron experts module with the experts of several ranks.

SequentialMLP and TEGroupedMLP have a module or parameters for each expert: a shallow copy of the module that has those
of all owners, one owner after another, is the same computation with more experts, and on a GPU one grouped GEMM. The
copy is made for each call, because a module may change between two of them; its settings are the module's own, but that
it adds no gradients to main_grad, and so would buffers and hooks be, which `stays_behind` finds. GroupedMLP
(--moe-use-legacy-grouped-gemm) holds all of its experts in two tensors, so that one call would copy the weights of all
owners in every pass and hold them until its backward pass: it is called owner by owner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.func import functional_call

from megatron_moe_opt.integration.layer.hooks_of_others import hooks_of_others

Parameters = Mapping[str, torch.Tensor]
"""The parameters of one owner's experts, by their names in the module."""

_OF_EXPERT = re.compile(r"(weight|bias)(\d+)")
_FUSED = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")
"""The attributes with which linear modules of Megatron and of Transformer Engine add gradients to main_grad."""


def call_experts(
    experts: nn.Module,
    of_owners: Sequence[Parameters],
    tokens: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the outputs [R, H] of all owners' experts, and the module's bias.

    The gradients of this rank's own experts come through autograd too, also under gradient accumulation fusion: those
    that other ranks return are added to them before Megatron adds their sum to main_grad.

    Args:
        experts: as Megatron builds it.
        of_owners: the parameters of the experts of each owner.
        tokens: [R, H], sorted by owner and expert.
        tokens_per_expert: int64 [owners * local experts], on the CPU.
        probs: [R].
    """
    with without_fused_gradients(experts):
        if _is_by_expert(experts):
            returned = _with_all(experts, of_owners)(tokens, tokens_per_expert, probs)
            for module in experts.modules():
                if "is_first_microbatch" in vars(module):  # Megatron's, which the copies have taken note of alone
                    module.is_first_microbatch = False
            return returned
        of_owner = tokens_per_expert.view(len(of_owners), -1)
        sizes = of_owner.sum(1).tolist()
        parts = zip(of_owners, tokens.split(sizes), of_owner, probs.split(sizes), strict=True)
        outputs, biases = zip(*(functional_call(experts, own, tuple(given)) for own, *given in parts), strict=True)
        return torch.cat(outputs), biases[0]


def stays_behind(experts: nn.Module) -> str | None:
    """Returns what an expert has besides parameters, and those of other owners would be run with: a buffer, such as a
    quantizer's scale or a mask, or a hook that others have put on it alone; None: nothing.
    """
    for name, _ in experts.named_buffers():
        return f"the buffer {name} of experts"
    each = getattr(experts, "local_experts", None)
    return None if each is None else next(map(str, hooks_of_others(each, "local_experts")), None)


@contextmanager
def without_fused_gradients(experts: nn.Module) -> Iterator[None]:
    """Has forward passes in here give weights' gradients to autograd in their backward passes. Other ranks' experts
    have no main_grad here, to which a GEMM could add them, and one that is narrow would be rounded at each.
    """
    settings = ((module, name, vars(module).get(name)) for module in experts.modules() for name in _FUSED)
    fused = [setting for setting in settings if setting[2]]
    for module, name, _ in fused:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module, name, value in fused:
            setattr(module, name, value)


def _is_by_expert(experts: nn.Module) -> bool:
    """Whether every parameter belongs to an expert, in modules that nobody has made run something else."""
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    if any({"forward", "_compiled_call_impl"} & vars(module).keys() for module in experts.modules()):
        return False
    names = [name for name, _ in experts.named_parameters()]
    if isinstance(experts, SequentialMLP):
        return all(name.startswith("local_experts.") for name in names)
    grouped = "|".join(name for name, child in experts.named_children() if hasattr(child, "num_gemms"))
    return isinstance(experts, TEGroupedMLP) and all(
        re.fullmatch(rf"({grouped})\.{_OF_EXPERT.pattern}", name) for name in names
    )


def _with_all(experts: nn.Module, of_owners: Sequence[Parameters]) -> nn.Module:
    """Returns a copy of the module with the experts of all owners."""
    joined = _copy(experts)
    joined.num_local_experts = experts.num_local_experts * len(of_owners)
    for name, child in experts.named_children():
        if name == "local_experts":
            copies = [_with(child, own, "local_experts.") for own in of_owners]
            joined._modules[name] = nn.ModuleList(expert for copy in copies for expert in copy)
        elif hasattr(child, "num_gemms"):
            joined._modules[name] = _grouped(child, of_owners, f"{name}.")
    return joined


def _with(module: nn.Module, own: Parameters, prefix: str) -> nn.Module:
    """Returns a copy of the module that has other parameters."""
    copy = _copy(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            copy._parameters[name] = own[prefix + name]
    for name, child in module._modules.items():
        if child is not None:
            copy._modules[name] = _with(child, own, f"{prefix}{name}.")
    return copy


def _grouped(linear: nn.Module, of_owners: Sequence[Parameters], prefix: str) -> nn.Module:
    """Returns a copy of Transformer Engine's GroupedLinear (weight0, weight1, ...) with those of all owners."""
    copy, each = _copy(linear), linear.num_gemms
    copy.num_gemms = each * len(of_owners)
    places = range(0, copy.num_gemms, each)
    copy._parameters.clear()
    for first, own in zip(places, of_owners, strict=True):
        for name in linear._parameters:
            copy._parameters[_moved(name, first)] = own[prefix + name]
        for name, value in vars(linear).items():  # a bias that it has not is an attribute without elements
            if _OF_EXPERT.fullmatch(name):
                setattr(copy, _moved(name, first), value)
    return copy


def _moved(name: str, first: int) -> str:
    """Returns the name of an expert's parameter where `first` experts come before its owner's."""
    kind, number = _OF_EXPERT.fullmatch(name).groups()
    return f"{kind}{first + int(number)}"


def _copy(module: nn.Module) -> nn.Module:
    """Returns a module with the same attributes, hooks and buffers, whose parameters and children can be exchanged."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy._parameters, copy._modules = dict(module._parameters), dict(module._modules)
    return copy
