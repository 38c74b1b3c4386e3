"""The page that tools/gpu/node.py ends with: what ran, on what, and what was measured, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.markdown_rows import head, row


@dataclass(frozen=True)
class Result:
    """The result of a step. `said` is "ok", "FAILED (...)" or "not run: ..."."""

    name: str
    said: str
    seconds: float | None = None

    @property
    def failed(self) -> bool:
        """Whether it ran and did not pass."""
        return self.said.startswith("FAILED")


def page(
    title: str,
    facts: Mapping[str, str],
    results: Sequence[Result],
    folder: Path,
    queues: Sequence[int],
    not_installed: Mapping[str, str],
    all_tests: str,
) -> str:
    """Returns the whole page.

    Args:
        facts: heading and text, such as the versions and the topology.
        folder: with `layer-QUEUES.json` of moe-opt bench, `memory-QUEUES.txt` beside it, `cluster-QUEUES.json` of
            profile, as far as there are any.
        queues: values of CUDA_DEVICE_MAX_CONNECTIONS.
        not_installed: dispatchers that could not run, and why.
        all_tests: the command of the tests of which the page has a cross-section.
    """
    failed = [result.name for result in results if result.failed]
    verdict = f"**FAILED: {', '.join(failed)}.**" if failed else "**All steps that ran passed.**"
    rows = [(one.name, one.said, "-" if one.seconds is None else f"{one.seconds:.0f}") for one in results]
    parts = [f"# {title}", verdict, _table(("step", "result", "s"), rows)]
    parts.append(f"The tests above are a cross-section. All of them, which take longer: `{all_tests}`")
    layers = {number: _read(folder / f"layer-{number}.json") for number in queues}
    clusters = {number: _read(folder / f"cluster-{number}.json") for number in queues}
    for heading, text in (
        ("One MoE layer, forward and backward", _layers(layers, not_installed)),
        ("Moves of rows", _moves(clusters)),
    ):
        if text:
            parts += [f"## {heading}", text]
    memory = {f"Memory of rank 0, {number} queue(s)": folder / f"memory-{number}.txt" for number in queues}
    summaries = {heading: file.read_text() for heading, file in memory.items() if file.exists()}
    for heading, text in (summaries | dict(facts)).items():
        parts += [f"## {heading}", f"```\n{text.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = (row(*(cell.replace("|", "\\|") for cell in cells)) for cells in rows)
    return "\n".join([*head(*headers, texts=len(headers)), *escaped])


def _layers(reports: Mapping[int, Any], not_installed: Mapping[str, str]) -> str:
    """Returns a table of times with each number of queues side by side, and of peak memory."""
    ran = {number: report for number, report in reports.items() if report is not None}
    if not ran:
        return ""
    headers = ["dispatcher"]
    for number in ran:
        headers += [f"ms, {number} queue(s)", f"ratio to the first, {number} queue(s)", f"peak memory MB, {number}"]
    cells: dict[str, list[str]] = {}
    for place, report in enumerate(ran.values()):
        for result in report["results"]:
            numbers = cells.setdefault(result["dispatcher"], [])
            numbers += ["-"] * (3 * place - len(numbers))
            memory = result["peak_memory_bytes"]
            numbers += [f"{result['median_seconds'] * 1e3:.2f}", f"{result['median_ratio']:.3f}"]
            numbers += ["-" if memory is None else f"{memory / 1e6:.0f}"]
    width = len(headers) - 1
    rows = [(name, *numbers, *["-"] * (width - len(numbers))) for name, numbers in cells.items()]
    rows += [(name, why, *["-"] * (width - 1)) for name, why in not_installed.items()]
    first = next(iter(ran.values()))
    settings, environment = first["settings"], first["environment"]
    said = (
        f"{environment['world size']} ranks, {environment['device']}, {environment['backend']}: {settings['tokens']} "
        f"tokens a rank, hidden {settings['hidden']}, expert hidden {settings['ffn_hidden']}, {settings['experts']} "
        f"experts, top-{settings['topk']}, {settings['dtype']}; medians of {settings['steps']} rounds, of the slowest "
        "rank. Queues: CUDA_DEVICE_MAX_CONNECTIONS."
    )
    return f"{said}\n\n{_table(headers, rows)}"


def _moves(clusters: Mapping[int, Any]) -> str:
    """Returns a table of the largest size that moe-opt profile measured of each move."""
    ran = {number: cluster for number, cluster in clusters.items() if cluster is not None}
    headers, cells = ["move", "group"], {}
    for place, (number, cluster) in enumerate(ran.items()):
        headers += [f"MB, {number} queue(s)", f"ms, {number} queue(s)"]
        for curve in cluster["curves"]:
            size, seconds = curve["points"][-1]
            numbers = cells.setdefault((curve["kind"], curve["group"] or "-"), [])
            numbers += ["-"] * (2 * place - len(numbers)) + [f"{size / 1e6:.3g}", f"{seconds * 1e3:.3f}"]
    width = len(headers) - 2
    rows = [(*move, *numbers, *["-"] * (width - len(numbers))) for move, numbers in cells.items()]
    return _table(headers, rows) if rows else ""
