"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import SOFTWARE_STREAMS, RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--software-streams", metavar="SEED", type=int, help="ranks run their schedules on streams in software"
    )


@pytest.fixture(scope="session", autouse=True)
def software_streams(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the option asks for, for all rank processes that start afterwards."""
    seed = request.config.getoption("--software-streams")
    with pytest.MonkeyPatch.context() as patch:
        if seed is not None:
            from tests.accelerator.executor_library import build

            patch.setenv(SOFTWARE_STREAMS, f"{build(tmp_path_factory.mktemp('executor'))}:{seed}")
        yield


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
