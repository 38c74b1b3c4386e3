"""Random cases of every kernel, and edits of the kernels that the cases must find.

MOE_OPT_EMULATOR_LONG=1: 20,000 cases and all mutants, in place of a sample.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.build import OUT, ROOT, build
from tests.emulator.mutants import MUTANTS

LONG = bool(os.environ.get("MOE_OPT_EMULATOR_LONG"))
KERNELS = ROOT / "csrc" / "kernels"
# A mutant of a header has all kernels compiled anew.
SAMPLE = MUTANTS if LONG else [mutant for mutant in MUTANTS if mutant[0].endswith(".cu")][4::9]


def run_cases(count: int, module: Path | None = None, only: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs cases in a process of its own; `module`: a build of other kernels."""
    command = [sys.executable, "-m", "tests.emulator.cases", "0", str(count), *(["--only", *only] if only else [])]
    environment = os.environ | ({"MOE_OPT_EMULATOR": str(module)} if module else {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_random_cases_equal_the_cpu():
    done = run_cases(20_000 if LONG else 60)
    assert done.returncode == 0, done.stderr[-2000:]


def few_select_blocks(text: str) -> str:
    return text.replace("kMaxSelectBlocks = 512", "kMaxSelectBlocks = 1")


def test_the_encoders_blocks_go_round_a_second_time():
    text = few_select_blocks((KERNELS / "residual_codec.cu").read_text())
    module = build({"residual_codec.cu": text}, OUT / "variants" / "second-round")
    done = run_cases(2, module, ("second_round",))
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: f"{MUTANTS.index(mutant)}-{mutant[0]}")
def test_a_mutant_is_found(mutant):
    file, before, after, only = mutant
    text = (KERNELS / file).read_text()
    assert text.count(before) == 1, f"{file} has {before!r} {text.count(before)} times: mend the list of mutants"
    text = text.replace(before, after)
    if only == ("second_round",):
        text = few_select_blocks(text)
    module = build({file: text}, OUT / "variants" / f"mutant-{MUTANTS.index(mutant)}")
    done = run_cases(400, module, only)
    assert done.returncode == 1 and "seed" in done.stderr, done.stdout + done.stderr[-2000:]
