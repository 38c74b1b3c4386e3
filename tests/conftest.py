"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four rank processes for the whole session; they start with the first case."""
    pool = RankPool()
    yield pool
    pool.close()
