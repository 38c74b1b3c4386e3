"""`pytest --gpus` where there are none, or fewer than ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import conftest
from tests.ranks.pool import GPUS, RankPool


def test_the_option_is_refused_without_gpus(monkeypatch):
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda name: name == "--gpus")
    monkeypatch.setattr(conftest, "_gpus", lambda: 0)
    with pytest.raises(pytest.UsageError, match="^--gpus: PyTorch finds no GPU here: leave it out, .*over Gloo$"):
        conftest.pytest_configure(config)


def test_ranks_without_a_gpu_each_are_left_out_and_say_why(monkeypatch):
    monkeypatch.setenv(GPUS, "1")
    monkeypatch.setattr(conftest, "_gpus", lambda: 2)
    with pytest.raises(pytest.skip.Exception, match="^4 ranks need a GPU each, and this machine has 2$"):
        next(conftest._open(RankPool(4)))
    assert isinstance(next(conftest._open(RankPool(2))), RankPool)
