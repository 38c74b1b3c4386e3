"""Megatron's TEGroupedMLP without Transformer Engine: its class, around a grouped linear layer in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_moe_opt.integration.layer import moe_layer


class GroupedLinear(torch.nn.Module):
    """A grouped linear layer like Transformer Engine's: weight0, weight1, ...; biases that it has not are
    attributes without elements.
    """

    def __init__(
        self,
        num_gemms: int,
        inputs: int,
        outputs: int,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        self.num_gemms, self.calls, self.is_first_microbatch = num_gemms, [], True
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(outputs, inputs)))
            init_method(getattr(self, f"weight{number}"))
            setattr(self, f"bias{number}", torch.empty(0))

    def forward(self, rows: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        assert len(m_splits) == self.num_gemms
        self.calls.append(m_splits)
        self.is_first_microbatch = False  # as Megatron's does: with fusion, the first one's gradients replace main_grad
        assert not any(getattr(self, f"bias{number}").numel() for number in range(self.num_gemms))
        weights = (getattr(self, f"weight{number}") for number in range(self.num_gemms))
        product = _Fused.apply if self.fuse_wgrad_accumulation else _product
        return torch.cat([*map(product, rows.split(m_splits), weights)]), None


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight.t()


class _Fused(torch.autograd.Function):
    """A product whose weight's gradient is added to main_grad: autograd gets one of no meaning in its place."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.weight, ctx.main_grad = weight, weight.main_grad
        return _product(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        ctx.main_grad += grad.t() @ rows
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, 1e9)


def use_grouped_experts(patch: pytest.MonkeyPatch) -> None:
    """Has layers that are built have a TEGroupedMLP as their experts."""
    stock = moe_layer.moe_spec

    def with_grouped_experts(config: Any) -> Any:
        spec = stock(config)
        submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec.keywords["submodules"]
        submodules.experts = ModuleSpec(
            TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        )
        return spec

    patch.setattr(moe_layer, "moe_spec", with_grouped_experts)
