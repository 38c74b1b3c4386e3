"""Fixtures of the tests of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_moe_opt
from tests.accelerator.executor_library import build

megatron_moe_opt.use_host_backend()  # before tests import Megatron, which then does without PyTorch's compiler


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stream executor, compiled for streams in software."""
    return build(tmp_path_factory.mktemp("executor"))
