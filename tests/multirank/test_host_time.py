"""What a pass costs the host, in numbers that do not depend on the machine: calls of functions."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.ranks.devices import rank_device

ONE_MORE = sys.version_info < (3, 11)  # call, which Python 3.10 counts
BUILDERS = ("schedules/pipeline.py", "schedules/issue_order.py")


def _calls(variant: str) -> tuple[int, dict[tuple[str, str], int]]:
    """Ops of a step of a layer that is warm, and the calls of the package's functions in it."""
    from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test
    from tools.bench.python_per_op import calls_of_a_step

    settings = LayerSettings((variant,), tokens=32, hidden=16, ffn_hidden=16, experts=8, topk=2, ep=4)
    with parallel_layer(1, 4, 1, seed=1):
        layer = layer_under_test(settings, variant, rank_device())
        layer.clear_grads()
        layer.step()
        sizes = [op.size for timeline in layer.observed_step()[0] for op in timeline.schedule.ops]
        assert all(size > 0 for size in sizes)
        calls = calls_of_a_step(layer)
        assert torch.isfinite(layer.tokens.grad).all()
    return len(sizes), dict(calls)


@pytest.mark.parametrize(
    ("variant", "ops", "an_op"),
    [("monta:O3x4", 32, 24), ("mpmoe:4", 40, 31), ("mpmoe:4:hops", 56, 27)],
)
def test_a_pass_builds_no_schedule(ranks, variant, ops, an_op):
    """Ops, what they wait for and their order are those of the pass before, and are bound to tensors. The sizes that a
    recording shows are worked out for it alone.
    """
    for issued, calls in ranks.run(_calls, variant=variant):
        assert not {name for file, name in calls if file in BUILDERS or name == "sized"}
        assert issued == ops and sum(calls.values()) <= an_op * ops + ONE_MORE
