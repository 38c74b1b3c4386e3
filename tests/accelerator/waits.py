"""Where the package orders streams, by its source; each such place is left out once, and must be missed.

    python -m tests.accelerator.waits                           # all places, each in the first case that misses it
    python -m tests.accelerator.waits --places hop_way,wire     # those whose names have one of these

What was found is kept in a file and, at the same commit, not looked for again. The end is a table. The short form is
tests/multirank/test_software_accelerator.py, which has the cases.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.accelerator.clocks import PACKAGE
from tests.accelerator.watch import ORDERS_FOR_ITS_CALLER

ORDERS = {"wait", "wait_event", "wait_stream", "record_stream", *ORDERS_FOR_ITS_CALLER}
ON_HOST = ("cli/", "integration/auto/", "integration/host/", "integration/measuring/", "runtime/job/")
"""The folders in which threads, stores and messages of the host are waited for, and trials that wait for everything."""
OF_HOST = {"counts", "gather", "_gathered", "_gather", "_rows", "beyond"}
"""The names of what the host waits for: how often it may is a budget of the tests'."""
WITHOUT_STREAMS = {"_run_on_thread", "_issue_on_stream", "return_gradients", "forget_deferred"}
"""Functions whose waits order no streams: for a thread; so that what is recorded of an op begins when it can run; for
what the host has to know of a schedule that is before it in its queue; for what is then dropped unused.
"""


def ordering_calls() -> dict[str, str]:
    """The calls in the package that order streams: their places, file:line, and their texts."""
    found = {}
    for file in sorted(Path(PACKAGE).rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if not name.startswith(ON_HOST):
            for call in _calls(ast.parse(file.read_text())):
                if _orders(call.func):
                    found[f"{name}:{call.lineno}"] = ast.unparse(call)
    return found


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child
        if not isinstance(child, ast.FunctionDef) or child.name not in WITHOUT_STREAMS:
            yield from _calls(child)


def _orders(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ORDERS - {"wait"}
    return isinstance(function, ast.Attribute) and function.attr in ORDERS and not _of_host(function.value)


def _of_host(waited_for: ast.expr) -> bool:
    if isinstance(waited_for, ast.Call):
        return _of_host(waited_for.func)
    return any(getattr(one, "attr", getattr(one, "id", "")) in OF_HOST for one in ast.walk(waited_for))


def missed(of_ranks: list[dict]) -> str:
    """The first mistake that ranks found in a case, or nothing."""
    from tests.accelerator.collectives import disagreements

    found = [result["found"] for result in of_ranks]
    members = {name: ranks for of_rank in found for name, ranks in of_rank.members.items()}
    mistakes = [mistake for of_rank in found for mistake in of_rank.mistakes]
    return next(iter(mistakes or disagreements([of_rank.issued for of_rank in found], members)), "")


def main() -> int:
    from tests.accelerator.executor_library import build
    from tests.accelerator.seeds import Kept
    from tests.multirank.test_software_accelerator import EVERYTHING, run_case
    from tests.ranks.pool import RankFailure, RankPool

    parser = argparse.ArgumentParser(prog="python -m tests.accelerator.waits", description=__doc__)
    parser.add_argument("--places", default="", help="only those whose names have one of these, with commas")
    parser.add_argument("--kept", type=Path, default=Path("runs/waits.jsonl"), help="what was found")
    args = parser.parse_args()
    calls = {
        place: text for place, text in ordering_calls().items() if any(map(place.__contains__, args.places.split(",")))
    }
    kept, pool, left = Kept(args.kept), RankPool(), set(calls)
    left -= {place for place, *_ in kept.of_runs}
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for case in EVERYTHING:
            if not left:
                break
            used = set().union(*(result["used"] for result in pool.run(run_case, library=library, case=case)))
            for place in sorted(left & used):
                try:
                    said = missed(pool.run(run_case, library=library, case=case, without=place))
                except RankFailure as error:
                    said = str(error).strip().splitlines()[-1]
                if said:
                    left.remove(place)
                    kept.add((place, 0, case), said)
                print(f"{case}, without {place}: {said or 'nothing is missed'}", flush=True)
    pool.close()
    print("\n| without | in | is missed |\n|---|---|---|")
    for place, text in calls.items():
        said = next((f"{case} | {said}" for (of, _, case), said in kept.of_runs.items() if of == place), "| nothing")
        print(f"| `{place}`: `{text}` | {said} |")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
