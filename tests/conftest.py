"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four rank processes for the whole session; they start with the first case."""
    yield from _open(RankPool())


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """Eight."""
    yield from _open(RankPool(8))


@pytest.fixture
def doomed_ranks() -> Iterator[RankPool]:
    """For a test that leaves ranks hanging or dead; those of the session keep the groups that they have made."""
    yield from _open(RankPool())


def _open(pool: RankPool) -> Iterator[RankPool]:
    yield pool
    pool.close()
