"""The two halves of Megatron's shared experts, as it splits them to overlap with dispatch and combine."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe_opt.runtime.through_experts.shared_call import SharedExperts


def halves_of(shared: Any) -> SharedExperts:
    """Returns the halves of a SharedExpertMLP: the first matrix product and the activation, the second product.

    Between its steps Megatron keeps tensors in the module, where these find and leave none. Where it has one kernel for
    both products (FusedSharedExpertMLP), that is the first half, and the second does nothing.
    """
    halfway = "cached_fc2_input"

    def first(tokens: torch.Tensor) -> torch.Tensor:
        nonlocal halfway
        shared.cached_fc1_input = tokens
        shared.linear_fc1_forward_and_act()
        if not shared.config.moe_grouped_gemm:  # Transformer Engine has one workspace for such products of all streams
            torch.cuda.current_stream().wait_stream(shared.stream)
        halfway = "cached_fc2_output" if shared.cached_fc2_input is None else "cached_fc2_input"
        return taken(shared, halfway)

    def second(middle: torch.Tensor) -> torch.Tensor:
        setattr(shared, halfway, middle)
        shared.stream.wait_stream(torch.cuda.current_stream())  # behind the experts, for which it would not wait
        shared.linear_fc2_forward()
        return taken(shared, "cached_fc2_output")

    return SharedExperts(first, second, any(one.requires_grad for one in shared.parameters()))


def taken(shared: Any, name: str) -> torch.Tensor:
    """Returns what shared experts keep under this name, and keep no longer."""
    tensor = getattr(shared, name)
    setattr(shared, name, None)
    return tensor
