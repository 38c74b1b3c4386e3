"""What an error says that is raised in a pass of a MoE layer: which layer, which pass, and what was raised first."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def failing_ranks() -> Iterator[RankPool]:
    """Rank processes whose layers fail between two exchanges, so that they go on together."""
    pool = RankPool()
    yield pool
    pool.close()


def check(pool: RankPool, dispatcher: str, direction: str, sentence: str) -> None:
    for message, cause in pool.run(fail, dispatcher=dispatcher, direction=direction):
        assert message == f"in MoE layer 7 ({dispatcher}, {direction}): {sentence}"
        assert "in raise_in_experts" in cause and cause.endswith("ValueError: boom\n")


@pytest.mark.parametrize(
    ("dispatcher", "direction"),
    [("monta", "forward"), ("monta", "recompute"), ("netmoe", "forward"), ("expert-migration", "forward")],
)
def test_an_error_names_layer_and_pass_and_keeps_its_cause(failing_ranks: RankPool, dispatcher: str, direction: str):
    check(failing_ranks, dispatcher, direction, "ValueError: boom")


@pytest.mark.parametrize(("direction", "op"), [("forward", "compute"), ("backward", "gradient")])
def test_an_error_in_a_lane_names_its_op_too(doomed_ranks: RankPool, direction: str, op: str):
    # That lane races the one of the exchanges: some ranks may have begun one that the others never begin.
    check(doomed_ranks, "mpmoe", direction, f"lane compute: {op} of chunk 0 failed: ValueError: boom")
