"""Fixtures for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.ranks.pool import GPUS, RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpus", action="store_true", help="ranks on GPUs (which they share where there are fewer) and NCCL"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "host_only(reason): is about ranks without GPUs; left out with --gpus")
    if config.getoption("--gpus") and not _gpus():
        raise pytest.UsageError("--gpus: PyTorch finds no GPU here: leave it out, and ranks run on the CPU over Gloo")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests that are about the host with --gpus, and says why."""
    if config.getoption("--gpus"):
        for item in items:
            for mark in item.iter_markers("host_only"):
                item.add_marker(pytest.mark.skip(reason=mark.kwargs["reason"]))


def pytest_collection_finish() -> None:
    """Leaves what is imported by now alone: no garbage collection looks at it again."""
    gc.collect()
    gc.freeze()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session", autouse=True)
def kind_of_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets what the option asks for, for all rank processes that start afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--gpus"):
            patch.setenv(GPUS, "1")
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four rank processes for the whole session; they start with the first case."""
    yield from _open(RankPool())


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """Eight rank processes for the whole session."""
    yield from _open(RankPool(8))


@pytest.fixture
def doomed_ranks() -> Iterator[RankPool]:
    """Rank processes for a test that leaves them hanging or dead; those of the session keep the
    groups that they have made.
    """
    yield from _open(RankPool())


def _open(pool: RankPool) -> Iterator[RankPool]:
    yield pool
    pool.close()
