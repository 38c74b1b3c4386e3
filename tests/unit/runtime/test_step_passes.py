"""Which backward passes of a step have their gradients wait for the last one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.runtime.travelling_experts.expert_gradients import CompressedGradients, WholeGradients
from megatron_moe_opt.runtime.travelling_experts.migrated_experts import MigratedExperts
from megatron_moe_opt.runtime.travelling_experts.step_passes import StepPasses, current_step, step_of


class Layer:
    """Has gradients wait or not."""

    def __init__(self) -> None:
        self.forgotten = 0

    def forget_deferred(self) -> None:
        """Counts."""
        self.forgotten += 1


def test_all_passes_wait_for_the_last_one_in_as_many_layers_as_may():
    layers = [Layer() for _ in range(3)]
    for limit, waiting in ((None, 3), (2, 2), (0, 0)):
        step = StepPasses(3)
        seen = [[step.defers(layer, limit) for layer in layers] for _ in range(4)]  # a pass more than was said
        assert seen == [[number < waiting for number in range(3)]] * 2 + [[False] * 3] * 2
        assert step.end() and not any(layer.forgotten for layer in layers)


def test_one_micro_batch_has_nothing_wait():
    with step_of(1):
        assert not current_step().defers(Layer(), None)
    assert current_step() is None


def test_gradients_of_a_step_that_lacks_a_pass_are_told_and_forgotten():
    layer = Layer()
    with (
        pytest.raises(ConfigurationError, match="fewer backward passes than its step has micro-batches, 2"),
        step_of(2),
    ):
        assert current_step().defers(layer, None)
    assert layer.forgotten == 1 and current_step() is None


def test_gradients_of_a_step_that_failed_are_forgotten():
    layer = Layer()
    with pytest.raises(KeyError), step_of(2):
        current_step().defers(layer, None)
        raise KeyError
    assert layer.forgotten == 1 and current_step() is None


@pytest.mark.parametrize(
    ("dtype", "gradients", "waits"),
    [
        (torch.bfloat16, WholeGradients(), True),
        (torch.float16, WholeGradients(), False),
        (torch.float16, CompressedGradients(1, 2.0), True),
    ],
)
def test_whole_gradients_in_float16_return_in_each_pass(dtype, gradients, waits):
    """What waits is summed in float32, and travels in its dtype: a step's sum may be beyond float16's range."""
    went = []
    layer = MigratedExperts.__new__(MigratedExperts)
    layer.gradients, layer.own, layer._deferring = gradients, 0, []
    layer.communicator = SimpleNamespace(
        residents=SimpleNamespace(limit=None),
        defer=lambda *_: went.append("waits") or SimpleNamespace(wait=lambda: None),
        reduce=lambda *_: went.append("returns"),
    )
    with step_of(2):
        for _ in range(2):
            layer.return_gradients(torch.ones(2, 4, dtype=dtype))
    assert went == ["waits" if waits else "returns", "returns"]
