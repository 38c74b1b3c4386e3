"""What an error says that is raised in a pass of a MoE layer: which layer, which pass, and what was raised first."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.errors import LayerError
from megatron_moe_opt.integration.layer.moe_layer import build_layer
from tests.ranks.megatron import moe_config, parallel
from tests.ranks.pool import RankPool


def raise_in_experts(*_: object) -> None:
    raise ValueError("boom")


def fail(dispatcher: str, direction: str) -> tuple[str, str]:
    """The error of a layer whose experts raise one in a pass, on all ranks; and its cause with the traceback."""
    with parallel(ep=4):
        layer = build_layer(moe_config(moe_token_dispatcher_type=dispatcher, num_layers=8))
        layer.set_layer_number(7)
        tokens = torch.randn(4, 2, 64, requires_grad=True)
        try:
            if direction == "forward":
                layer.experts.register_forward_pre_hook(raise_in_experts)
            elif direction == "backward":
                layer.experts.register_full_backward_pre_hook(raise_in_experts)
            output = checkpoint(layer, tokens, use_reentrant=False)[0] if direction == "recompute" else layer(tokens)[0]
            if direction == "recompute":
                layer.experts.register_forward_pre_hook(raise_in_experts)
            output.sum().backward()
        except LayerError as error:
            return str(error), "".join(traceback.format_exception(error.__cause__))
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("dispatcher", "direction", "sentence"),
    [
        ("monta", "forward", "ValueError: boom"),
        ("monta", "recompute", "ValueError: boom"),
        ("mpmoe", "forward", "lane compute: compute of chunk 0 failed: ValueError: boom"),
        ("mpmoe", "backward", "lane compute: gradient of chunk 0 failed: ValueError: boom"),
        ("netmoe", "forward", "ValueError: boom"),
        ("expert-migration", "forward", "ValueError: boom"),
    ],
)
def test_an_error_names_layer_and_pass_and_keeps_its_cause(
    doomed_ranks: RankPool, dispatcher: str, direction: str, sentence: str
):
    # The lane that fails races the one of the exchanges: some ranks may have begun one that the others never begin.
    for message, cause in doomed_ranks.run(fail, dispatcher=dispatcher, direction=direction):
        assert message == f"in MoE layer 7 ({dispatcher}, {direction}): {sentence}"
        assert "in raise_in_experts" in cause and cause.endswith("ValueError: boom\n")
