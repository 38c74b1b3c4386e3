"""Layers, trainings and `auto`'s trials under many adversaries: results are stock's, whatever a device does first.

    python -m tests.accelerator.seeds                               # 20 seeds, many hardware queues and one
    python -m tests.accelerator.seeds --seeds 0-1 --cases monta,parm

What passed is kept in a file and, at the same commit, not run again. The end is a table. The short form is
tests/multirank/test_software_streams.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.prediction import Prediction
from tests.accelerator.executor_library import ROOT, build
from tests.accelerator.ranks import software_streams
from tests.accelerator.software import Queues
from tests.multirank import test_auto, test_mpmoe, test_netmoe
from tests.multirank.test_dispatchers import RECOMPUTE, compare
from tests.multirank.test_parm import compare_replicated
from tests.ranks.pool import RankFailure, RankPool
from tests.ranks.training import losses

BOTH, EP4 = {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4}
TRAVELLING = Options(network_levels=(2, 2), domain_sizes=(2, 1))


def errors_of(dispatcher: str, layout: dict[str, int], options: Options, settings: dict[str, Any] | None = None) -> Any:
    """Returns the errors of a layer's results against stock's."""
    arguments = {"layout": layout, "settings": settings or {}, "options": options}
    return compare(dispatcher, **arguments)["errors"].values()


def several_passes(
    count: int,
    strategy: str,
    levels: tuple[int, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    **by: Any,
) -> list[float]:
    """Returns the errors of mpmoe with two passes under way; all but the first two as worst_errors takes them."""
    variants = [(count, strategy)]
    layout = BOTH if levels is None else EP4
    arguments = {"routing": None, "variants": variants, "steps": 2, "levels": levels, "sizes": sizes} | by
    worst = test_mpmoe.worst_errors(layout, settings={}, **arguments)
    return [error for error, _ in worst.values()]


def netmoe(case: str) -> list[float]:
    """Returns the error of a model whose samples move."""
    return [test_netmoe.compare_case(**test_netmoe.CASES[case])[0]]


LAYERS: dict[str, Callable[[], Iterable[float]]] = {
    "monta O1": lambda: errors_of("monta", BOTH, Options(monta_level="O1", chunks=1)),
    "monta O2 x 3": lambda: errors_of("monta", BOTH, Options(monta_level="O2", chunks=3)),
    "monta O3 x 4, recompute": lambda: errors_of("monta", BOTH, Options(monta_level="O3", chunks=4), RECOMPUTE),
    "parm": lambda: errors_of("parm", BOTH, Options()),
    "parm S2": lambda: compare_replicated("parm", BOTH, {}, None, Options(parm_schedule="S2")).values(),
    "deepspeed": lambda: errors_of("deepspeed", BOTH, Options()),
    **{
        f"mpmoe {strategy} x {count}": lambda count=count, strategy=strategy: several_passes(count, strategy)
        for count, strategy in test_mpmoe.SOME
    },
    "mpmoe none x 3, joint": lambda: several_passes(3, "none", way="joint"),
    "mpmoe none x 3, in 2 chunks": lambda: several_passes(3, "none", chunks=2),
    "mpmoe S2 x 4, hops": lambda: several_passes(4, "S2", (2, 2)),
    "mpmoe S1 x 3, hops, experts travel": lambda: several_passes(3, "S1", (2, 2), (2, 1)),
    "mpmoe x 3, hops from shared tokens": lambda: compare_replicated(
        "mpmoe", BOTH, {}, None, Options(way="hops", network_levels=(2,), partitions=3)
    ).values(),
    "mpmoe S4 x 3, shared rows": lambda: compare_replicated(
        "mpmoe", BOTH, {}, None, Options(way="shared-rows", memory_reuse="S4", partitions=3)
    ).values(),
    "expert-migration": lambda: errors_of("expert-migration", EP4, TRAVELLING),
    "hops in 3 chunks": lambda: errors_of("expert-migration", EP4, Options(network_levels=(2, 2), chunks=3)),
    "netmoe": lambda: netmoe("tp2-ep2-etp2-shared"),
    "netmoe, hops": lambda: netmoe("hops-etp2-uneven"),
}


TRAININGS: dict[str, tuple[str, dict[str, int], Options | None, dict[str, Any]]] = {
    "monta O3 trains": ("monta", BOTH, Options(monta_level="O3", chunks=2), {}),
    "parm trains, recomputed": ("parm", BOTH, None, RECOMPUTE),
    "mpmoe S2 trains": ("mpmoe", BOTH, Options(partitions=3, memory_reuse="S2"), {}),
    "expert-migration trains, recomputed": ("expert-migration", EP4, TRAVELLING, RECOMPUTE),
    "netmoe trains": ("netmoe", EP4, None, test_netmoe.LAYERS | {"distributed_optimizer": False}),
}

TRIED = ("monta:O3x2", "alltoall", "mpmoe:3:S2", "mpmoe:2:hops", "expert-migration:2")
"""The variants of `auto`'s plan, which runs the first; steps are taken to take the times of these places."""
AUTO = "auto's trials"


def trials(candidates: Sequence[str] = TRIED) -> list[float]:
    """Losses of a training in which `auto` tries its candidates, two steps each, and keeps the first."""
    found = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in candidates)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        Plan(dict.fromkeys((1, 2), candidates[0]), found, "a cluster", ep=4, etp=1, experts=8).save(plan)
        seconds = defaultdict(lambda: 10.0, {name: 1.0 + place for place, name in enumerate(candidates)})
        most, options = _most_steps(candidates), Options(plan=plan)
        auto = test_auto.train(1 + most + 2, options, EP4, seconds, most, moe_token_dispatcher_type="auto")
    assert auto["settled"] and set(candidates) <= set(auto["tried"]) and auto["runs"] == candidates[0], auto
    return auto["losses"]


def without_trials(candidates: Sequence[str] = TRIED) -> list[float]:
    """Losses of the same training under stock."""
    return test_auto.train(1 + _most_steps(candidates) + 2, None, EP4)["losses"]


def _most_steps(candidates: Sequence[str]) -> int:
    return 2 * (len(candidates) + 1)  # what stock has beside alltoall may join


def trained(dispatcher: str, layout: dict[str, int], options: Options | None, settings: dict[str, Any]) -> list[float]:
    """Losses of two optimizer steps."""
    return losses(dispatcher, layout, options, 2, **settings)


@functools.cache
def stock_losses(case: str) -> list[float]:
    """Returns the losses of the same training under stock, without an accelerator."""
    if case == AUTO:
        return without_trials()
    _, layout, _, settings = TRAININGS[case]
    return trained("alltoall", layout, None, settings)


CASES = (*LAYERS, *TRAININGS, AUTO)


def run_case(case: str, library: Path, seed: int, queues: Queues) -> float:
    """Returns the worst error on this rank over what is allowed: 1e-6 of the norm in layers, 1e-5 in losses."""
    expected = None if case in LAYERS else stock_losses(case)
    with software_streams(library, seed, queues) as runner:
        if case in LAYERS:
            worst = max(LAYERS[case]()) / 1e-6
        else:
            found = trials() if case == AUTO else trained(*TRAININGS[case])
            errors = [abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True)]
            worst = max(errors) / 1e-5
    assert runner.runs > 1, f"{case} ran no schedule"
    return worst


Run = tuple[str, int, str]
"""A run: its case, seed, and queues."""


class Kept:
    """What has run, in a file of a line each."""

    def __init__(self, file: Path) -> None:
        self._file, self.of_runs = file, dict[Run, str]()
        """How each run ended: nothing, or why it failed."""
        self._commit = _commit()
        file.parent.mkdir(parents=True, exist_ok=True)
        for line in file.read_text().splitlines() if file.exists() else ():
            commit, case, seed, queues, failure = json.loads(line)
            if commit == self._commit:
                self.of_runs[case, seed, queues] = failure

    def add(self, run: Run, failure: str) -> None:
        self.of_runs[run] = failure
        with self._file.open("a") as file:
            file.write(json.dumps([self._commit, *run, failure]) + "\n")

    def table(self, cases: Sequence[str]) -> str:
        """Runs that passed of those that ran, of each case."""
        lines = [f"| case | {' | '.join(queues.value for queues in Queues)} |", "|---" * (1 + len(Queues)) + "|"]
        for case in cases:
            of_case = [
                [failure for run, failure in self.of_runs.items() if run[::2] == (case, queues.value)]
                for queues in Queues
            ]
            cells = (f"{sum(not failure for failure in failures)} of {len(failures)}" for failures in of_case)
            lines.append(f"| {case} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def seeds(words: str) -> range:
    """The seeds FIRST-LAST, or one."""
    first, _, last = words.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accelerator.seeds", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=seeds("0-19"), help="FIRST-LAST (default: 0-19)")
    parser.add_argument("--cases", default="", help="only those whose names begin with one of these, with commas")
    parser.add_argument("--kept", type=Path, default=Path("runs/seeds.jsonl"), help="what has run")
    args = parser.parse_args()
    cases = [case for case in CASES if case.startswith(tuple(args.cases.split(",")))]
    kept, pool = Kept(args.kept), RankPool()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        for seed in args.seeds:
            for case, queues in ((case, queues) for case in cases for queues in Queues):
                run = case, seed, queues.value
                if kept.of_runs.get(run) == "":
                    continue
                try:
                    worst = max(pool.run(run_case, case=case, library=library, seed=seed, queues=queues))
                    kept.add(run, "" if worst < 1 else f"{worst:.2g} times the error that is allowed")
                except (RankFailure, TimeoutError) as error:
                    kept.add(run, str(error))
                print(f"{case}, seed {seed}, {queues.value}: {kept.of_runs[run] or 'passed'}", flush=True)
    pool.close()
    print("\n" + kept.table(cases))
    return 1 if any(kept.of_runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
