"""python -m tests.faults --injections 200: the long form of the campaign, with a table at the end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tests.faults.campaign import Outcome, run
from tests.faults.cases import KINDS, PLACES, SLACK_S, TIMEOUT_S, Fault, faults
from tests.ranks.dispatchers import DISPATCHERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--injections", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="injections beside each other; times are longer then")
    parser.add_argument("--dispatcher", nargs="*", choices=DISPATCHERS)
    parser.add_argument("--place", nargs="*", choices=PLACES)
    parser.add_argument("--kind", nargs="*", choices=KINDS)
    parser.add_argument("--json", type=Path, help="write all outcomes, with what the ranks printed, here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wanted = {name: getattr(args, name) for name in ("dispatcher", "place", "kind") if getattr(args, name)}
    cases = [
        one for one in faults(args.injections, args.seed) if all(getattr(one, key) in of for key, of in wanted.items())
    ]
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(args.at_once) as pool:
        running = []
        for number, fault in enumerate(cases):
            place = Path(folder) / str(number)
            place.mkdir()
            running.append(pool.submit(run_until_it_happens, fault, place))
        for done in as_completed(running):
            outcomes.append(done.result())
            outcome, spent = outcomes[-1], time.monotonic() - began
            seconds = "    -" if outcome.seconds is None else f"{outcome.seconds:5.1f}"
            left = spent / len(outcomes) * (len(cases) - len(outcomes))
            verdict = "; ".join((*outcome.wrong, *outcome.late)) or "ok"
            print(f"{len(outcomes):3}/{len(cases)} {left / 60:3.0f} min left {seconds} s  {outcome.fault}: {verdict}",
                  flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps([_record(one) for one in outcomes], indent=1))
    table = "\n".join(report(outcomes))
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")
    return int(not all(one.is_good for one in outcomes))


def run_until_it_happens(fault: Fault, folder: Path) -> Outcome:
    """Runs a fault once more where ranks of a busy machine do not find each other in the short
    timeout that they are given.
    """
    for number in range(3):
        again = folder / str(number)
        again.mkdir()
        outcome = run(fault, again)
        if outcome.happened:
            break
    return outcome


def report(outcomes: Sequence[Outcome]) -> list[str]:
    """A table in Markdown: dispatchers across, faults and places down; injections as they should be of all, and the
    longest time to the end of the last rank.
    """
    cells: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        fault: Fault = one.fault
        for kind, place in ((fault.kind, fault.place), (fault.kind, "all"), ("all", "all")):
            for dispatcher in (fault.dispatcher, "all"):
                cells[kind, place, dispatcher].append(one)
    columns = (*DISPATCHERS, "all")
    rows = [(kind, place) for kind in KINDS for place in (*PLACES, "all")] + [("all", "all")]
    rows = [(kind, place) for kind, place in rows if cells[kind, place, "all"]]
    lines = ["| fault | place | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for kind, place in rows:
        of_row = [_cell(cells[kind, place, dispatcher]) for dispatcher in columns]
        lines.append(f"| {kind} | {place} | " + " | ".join(of_row) + " |")
    good = sum(one.is_good for one in outcomes)
    lines += [
        "",
        f"{good} of {len(outcomes)} as they should be: every rank ended with an error status and a sentence that names "
        f"the rank and the layer, within {SLACK_S:.0f} s, or after kill and stop {SLACK_S + TIMEOUT_S:.0f} s, of which "
        f"{TIMEOUT_S:.0f} s are the configured timeout.",
    ]
    return lines


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    seconds = [one.seconds for one in outcomes]
    longest = "hangs" if None in seconds else f"{max(seconds):.1f} s"
    return f"{sum(one.is_good for one in outcomes)}/{len(outcomes)}, {longest}"


def _record(outcome: Outcome) -> dict:
    return asdict(outcome)


if __name__ == "__main__":
    sys.exit(main())
