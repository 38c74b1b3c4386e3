"""`pytest -p tests.accelerator.plugin --accelerator WAYS tests/multirank`: ranks run what tests give them on an
accelerator in software, with many hardware queues and with one.

WAYS: `clocks`, vector clocks that follow all that a rank does (device.py), or seeds of adversaries that empty the
queues of its schedules (ranks.py), such as 0-19; several with commas. Left out are tests
that give ranks nothing to do, and those about the host. At the end a table says what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.software import Queues
from tests.ranks.pool import CASE_TIMEOUT_S, RankPool

POOLS = {"ranks", "eight_ranks", "doomed_ranks"}
SLOWER = 6  # than on a CPU: what hangs is ended later
_on_cpu = RankPool.run


@dataclass(frozen=True)
class Way:
    """How a test runs. Without a seed: under vector clocks."""

    queues: Queues
    seed: int | None = None

    @property
    def engine(self) -> str:
        return "clocks" if self.seed is None else "adversaries"

    def __str__(self) -> str:
        return f"{'clocks' if self.seed is None else f'seed {self.seed}'}, {self.queues.value}"


def ways_of(words: str) -> list[Way]:
    ways = []
    for word in words.split(","):
        first, _, last = word.partition("-")
        seeds = [None] if word == "clocks" else range(int(first), int(last or first) + 1)
        ways += [Way(queues, seed) for seed in seeds for queues in Queues]
    return ways


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accelerator", metavar="WAYS", default="clocks", help="clocks, or seeds of adversaries: 0-19")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if POOLS & set(metafunc.fixturenames):
        metafunc.parametrize(
            "queues_and_seed", ways_of(metafunc.config.getoption("--accelerator")), indirect=True, ids=str
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [
        item
        for item in items
        if item.get_closest_marker("host_only")
        or "queues_and_seed" not in getattr(getattr(item, "callspec", None), "params", ())
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def executor_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.accelerator.executor_library import build

    return build(tmp_path_factory.mktemp("executor"))


@pytest.fixture(autouse=True)
def queues_and_seed(request: pytest.FixtureRequest, executor_library: Path) -> Iterator[None]:
    way: Way = request.param
    request.node.user_properties.append(("way", way))

    def run(
        pool: RankPool, function: Callable[..., Any], timeout_s: float = CASE_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        engine = under_clocks if way.seed is None else under_an_adversary
        answers = _on_cpu(
            pool, engine, SLOWER * timeout_s, library=executor_library, way=way, work=partial(function, **kwargs)
        )
        if way.seed is None:
            from tests.accelerator.collectives import check

            check([found for _, found in answers])
        return [result for result, _ in answers]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankPool, "run", run)
        yield


def under_an_adversary(library: Path, way: Way, work: Callable[[], Any]) -> Any:
    from tests.accelerator.ranks import software_streams

    with software_streams(library, way.seed, way.queues) as runner, _fresh(way.queues):
        return work(), runner.runs


def under_clocks(library: Path, way: Way, work: Callable[[], Any]) -> Any:
    from tests.accelerator.device import accelerator

    with _fresh(way.queues), accelerator(library) as found:
        result = work()
    return result, found.findings()


@contextmanager
def _fresh(queues: Queues) -> Iterator[None]:
    """Makes the process, inside the block, a rank with these queues that has not yet said what a process says once."""
    from megatron_moe_opt.dispatchers import say

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if queues is Queues.ONE else "32")
        patch.setattr(say, "_said", set())
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What ran, as the table of docs/software-accelerator.md: of each module, runs by outcome and kind of way."""
    ran: dict[str, dict[str, Counter[str]]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            way = dict(getattr(report, "user_properties", ())).get("way")
            if way is not None and (report.when == "call" or outcome != "passed"):
                module = ran.setdefault(Path(report.nodeid.partition("::")[0]).stem, {})
                module.setdefault(f"{way.engine}, {way.queues.value}", Counter())[outcome] += 1
    kinds = sorted({kind for of_kinds in ran.values() for kind in of_kinds})
    for cells in (["module", *kinds], ["---"] * (1 + len(kinds))) if ran else ():
        terminalreporter.write_line(f"| {' | '.join(cells)} |")
    for module, of_kinds in sorted(ran.items()):
        counts = (of_kinds.get(kind, Counter()) for kind in kinds)
        cells = [", ".join(f"{number} {outcome}" for outcome, number in of_kind.items()) for of_kind in counts]
        terminalreporter.write_line(f"| {' | '.join([f'`{module}`', *cells])} |")
