"""A system that is one record more is registered, planned, drawn, benchmarked and refused as the others are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_moe_opt.planning.predicting.prediction import ALLTOALL

ROOT = Path(__file__).parents[2]


def words(line: str) -> list[str]:
    return line.split()


def run(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "tests.sixth_system", *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_it_is_planned_and_drawn(tmp_path: Path):
    trace, plan = tmp_path / "trace.json", tmp_path / "plan.json"
    layout = words("--cluster pcie --world 16 --tp 4 --ep 4 --expert-tp 4 --model mixtral-8x7b")
    said = run("plan", *layout, "--all", "--draw", "in-turn:4", "--lanes", trace, "--output", plan)
    assert "in-turn:2" in said and "in-turn:4" in said
    seconds = {one["variant"]: one["seconds"] for one in json.loads(plan.read_text())["candidates"]}
    assert seconds["in-turn:4"] >= seconds["monta:O2x4"] > 0
    drawn = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "part"]
    assert sum(event["dur"] for event in drawn) / 1e6 == pytest.approx(seconds["in-turn:4"], abs=1e-6)


def test_it_is_refused_where_it_should_be_registered_and_benchmarked(tmp_path: Path):
    measured = tmp_path / "measured.json"
    sizes = words("--tokens 64 --hidden 32 --ffn-hidden 32 --experts 4 --topk 2 --steps 1 --warmup 1")
    said = run("train", "bench", "--dispatchers", f"{ALLTOALL},in-turn:3", *sizes, "--output", measured)
    assert "in-turn:3" in measured.read_text()
    for line, refused in zip(
        [line for line in said.splitlines() if re.match(r"(in-turn|monta|alltoall|auto): ", line)],
        (
            "in-turn: --swiglu does not wait for its turn",
            "in-turn: --moe-opt-turns 1 is no turn",
            "monta: --moe-opt-turns 2 is for --moe-token-dispatcher-type in-turn, not monta",
            "alltoall: --moe-opt-turns 2 is for --moe-token-dispatcher-type in-turn, not alltoall",
            "auto: --moe-opt-turns 2 is what --moe-token-dispatcher-type auto chooses",
            "in-turn: --moe-opt-chunks 2 is for --moe-token-dispatcher-type monta, netmoe, mpmoe, expert-migration",
        ),
        strict=True,
    ):
        assert line.startswith(refused), line
