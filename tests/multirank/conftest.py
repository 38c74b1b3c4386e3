"""Fixtures of the tests of several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.executor_library import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stream executor, compiled for streams in software."""
    return build(tmp_path_factory.mktemp("executor"))
