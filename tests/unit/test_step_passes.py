"""Which backward passes of a step have their gradients wait for the last one."""

from __future__ import annotations

import pytest

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
    with pytest.raises(RuntimeError, match="fewer backward passes than its step has micro-batches, 2"), step_of(2):
        assert current_step().defers(layer, None)
    assert layer.forgotten == 1 and current_step() is None


def test_gradients_of_a_step_that_failed_are_forgotten():
    layer = Layer()
    with pytest.raises(KeyError), step_of(2):
        current_step().defers(layer, None)
        raise KeyError
    assert layer.forgotten == 1 and current_step() is None
