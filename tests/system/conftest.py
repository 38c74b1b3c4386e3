"""Fixtures of the system tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.job import Job
from tests.system.training import ROOT

# The checkers of the recipe are tested in this process too; recipes/ is a folder of scripts, not a package.
sys.path.insert(0, str(ROOT / "recipes"))


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sample indices of the tests' datasets, away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real text: some documents of this repository's own source, enough for every split."""
    folder = tmp_path_factory.mktemp("text")
    for number, source in enumerate(sorted((ROOT / "megatron_moe_opt").rglob("*.py"))):
        (folder / f"{number:03}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def data(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a Megatron dataset made of that text."""
    folder = tmp_path_factory.mktemp("data")
    script = ROOT / "recipes" / "prepare_text.py"
    job = Job([script, "--output", folder / "text", "--text", text], folder / "output.txt")
    assert job.wait() == 0, job.output.read_text()
    return folder / "text"
