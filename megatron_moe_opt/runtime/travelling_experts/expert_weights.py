"""The weights of a rank's experts as one flat tensor, which travels in one message, and as a module's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import LANE_BYTES, empty
from megatron_moe_opt.kernels.streams import has_streams


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the flat tensor."""

    name: str
    shape: torch.Size
    first: int
    numel: int


class ExpertWeights:
    """The parameters of an experts module, one expert after another.

    Slots begin at multiples of LANE_BYTES; what is left between them is zero.
    """

    def __init__(
        self,
        experts: nn.Module,
        expert_of: Callable[[str], int | None],
        ready: Callable[[], None] = lambda: None,
        come_late: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            experts: a module whose parameters are a rank's experts.
            expert_of: the local expert that a parameter of this name belongs to; None: to all.
            ready: waits until the parameters may be read.
            come_late: whether that may be long after a step has begun.
        """
        self.experts, self._ready, self.come_late = experts, ready, come_late
        parameters = dict(experts.named_parameters())
        owner = {name: expert_of(name) for name in parameters}
        expert_with = {parameter: owner[name] for name, parameter in parameters.items()}
        for name, parameter in experts.named_parameters(remove_duplicate=False):
            if expert_of(name) != expert_with[parameter]:
                raise ConfigurationError(
                    f"--moe-opt-domain-sizes: several experts of a rank share the parameter {name}, and experts that "
                    "travel have theirs to themselves: give each its own, or take 1, where none travels"
                )
        self.is_by_expert = None not in owner.values()
        """Whether each expert is a consecutive part of the flat tensor, all of them alike."""
        names = sorted(parameters, key=lambda name: owner[name] or 0)  # stable: the module's order inside an expert
        align = LANE_BYTES // 2  # elements, of two bytes or more: the dtype may still change
        self.slots: list[Slot] = []
        end = 0
        for name in names:
            self.slots.append(Slot(name, parameters[name].shape, end, parameters[name].numel()))
            end += -(-parameters[name].numel() // align) * align
        self.numel = end

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters in the order of slots, as they are now.

        Raises:
            ConfigurationError: the module has others by now.
        """
        parameters = dict(self.experts.named_parameters())
        changed = {slot.name for slot in self.slots} ^ parameters.keys()
        if changed:
            raise ConfigurationError(
                "--moe-opt-domain-sizes: experts travel by the names that their parameters had when the layer was "
                f"built, and {min(changed)} was added or renamed since, as LoRA does: use monta, or take domain size 1"
            )
        return [parameters[slot.name] for slot in self.slots]

    def flatten(self, tensors: Sequence[torch.Tensor | None], flat: torch.Tensor) -> None:
        """Copies tensors, in the order of slots, into flat [numel]; None is zeros."""
        end = 0
        for slot, tensor in zip(self.slots, tensors, strict=True):
            flat[end : slot.first].zero_()
            end = slot.first + slot.numel
            if tensor is None:
                flat[slot.first : end].zero_()
            else:
                flat[slot.first : end].view(slot.shape).copy_(tensor)
        flat[end:].zero_()

    def current(self) -> torch.Tensor:
        """Returns a flat copy of the parameters.

        Raises:
            ConfigurationError: parameters of several dtypes.
        """
        self._ready()
        parameters = [parameter.detach() for parameter in self.parameters]
        dtypes = {parameter.dtype for parameter in parameters}
        if len(dtypes) > 1:
            raise ConfigurationError(
                f"--moe-opt-domain-sizes: experts with parameters of {', '.join(sorted(map(str, dtypes)))} cannot "
                "travel in one message: give them one dtype, or take domain size 1"
            )
        flat = empty((self.numel,), parameters[0].dtype, parameters[0].device)
        self.flatten(parameters, flat)
        return flat

    def equal(self, flat: torch.Tensor) -> torch.Tensor:
        """Whether the parameters are, bit for bit, those that `current` copied: a bool, on their device."""
        self._ready()
        parts = [_bits(*pair) for pair in zip(self.parameters, self.views(flat), strict=True)]
        if has_streams(flat.device):
            return torch.stack([(one == other).all() for one, other in parts]).all()
        return torch.tensor(all(torch.equal(one, other) for one, other in parts))

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the parts of flat [numel] in the order of slots, in the parameters' shapes; the same memory."""
        return (flat[slot.first : slot.first + slot.numel].view(slot.shape) for slot in self.slots)


def _bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns tensors of one shape and dtype as integers, of which NaN equals itself, flat and in the same memory: the
    widest that all their places allow, for there are fewer of these to compare.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    places = (elements * one.element_size() for one in flat for elements in (one.numel(), one.storage_offset()))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[math.gcd(8, *places)]
    return [one.view(integer) for one in flat]
