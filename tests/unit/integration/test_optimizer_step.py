"""What is called when a step of an optimizer begins or has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from torch import nn

from megatron_moe_opt.integration import optimizer_step


@pytest.fixture
def cleared():
    """The numbers of the models whose gradients were cleared."""
    numbers: list[int | None] = []

    def note() -> None:
        model = optimizer_step.model_of_step()
        numbers.append(model and model.number)

    optimizer_step.before_optimizer_step(note)
    yield numbers
    optimizer_step.forget(note)


def without_init(kind: type, **attributes: Any) -> Any:
    optimizer = object.__new__(kind)
    vars(optimizer).update(attributes)
    return optimizer


def test_an_optimizer_that_consists_of_others_clears_gradients_once_and_of_its_own_model_alone(cleared):
    """As layer-wise optimizers do, whose parts do not know the chunks of the model (megatron-core 0.18)."""
    part = without_init(FP32Optimizer, is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=[]))
    models = [without_init(ChainedOptimizer, chained_optimizers=[part] * 2, model_chunks=[nn.Module()]) for _ in "ab"]
    for model in (*models, models[0]):
        model.zero_grad()
    assert len(cleared) == 3 and cleared[0] == cleared[2] not in (None, cleared[1]) and cleared[1] is not None
    part.zero_grad()
    assert cleared[3:] == [None]  # whose it is, nobody says
