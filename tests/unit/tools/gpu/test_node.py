"""tools/gpu/node.py: its plan, how a step ends, and its page from what the commands wrote over Gloo on two CPUs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_moe_opt.cli import main as cli
from megatron_moe_opt.gpu_settings import SHARED
from tools import ROOT
from tools.gpu.node import (
    ALL_TESTS,
    CROSS_SECTION,
    PATIENCE,
    QUEUES,
    SHARING,
    Ranks,
    Step,
    main,
    plan,
    run,
    steps,
)
from tools.gpu.node_page import Result, page

RECORDED = Path(__file__).parent / "node"


def test_a_plan_is_shown_without_a_gpu_and_ends_in_time(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["node", "--plan", "--gpus", "8"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "tests/multirank/test_netmoe.py" in shown and "flex:deepep" in shown and "TORCH_CUDA_SANITIZER=1" in shown
    of_node = steps(Ranks(8), ("deepep",), tmp_path)
    assert plan(of_node).endswith(f"together at most {sum(step.limit_s for step in of_node)} s")
    assert sum(step.limit_s for step in of_node) <= 780
    layers = [step for step in of_node if step.name.startswith("layer")]
    assert [step.environment["CUDA_DEVICE_MAX_CONNECTIONS"] for step in layers] == ["32", "1"]
    watched = [step for step in of_node if step.name in ("CUDA sanitizer of PyTorch", "memcheck", "trace of nsys")]
    assert len(watched) == 3
    assert all("monta:O3x2,parm,mpmoe:2,expert-migration:8" in step.command for step in watched)


def test_threads_of_ranks_are_not_jobs_of_the_build(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$MAX_JOBS jobs" >&2\nexit 1\n')  # as where there is no GPU
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "MAX_JOBS"}
    environment |= {"PYTHON": str(python), "OMP_NUM_THREADS": "77"}
    check = ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--node"]
    result = subprocess.run(check, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, f"{len(os.sched_getaffinity(0))} jobs\n")


def test_ranks_share_a_single_gpu_with_fewer_queues_and_more_time(capsys, monkeypatch, tmp_path):
    alone, of_four = steps(Ranks(SHARING, sharing=True), (), tmp_path), steps(Ranks(SHARING), (), tmp_path)
    assert [one.limit_s for one in alone] == [PATIENCE * one.limit_s for one in of_four]
    layers = [step for step in alone if step.name.startswith("layer")]
    assert [step.environment["CUDA_DEVICE_MAX_CONNECTIONS"] for step in layers] == ["12", "1"]
    monkeypatch.setattr(sys, "argv", ["node", "--plan", "--gpus", "1"])
    monkeypatch.setenv(SHARED, "")
    assert main() == 0 and os.environ[SHARED] == "1"
    assert "--nproc-per-node 4" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert main() == 2 and "2 nodes of one GPU" in capsys.readouterr().err


def test_the_cross_section_names_tests_that_there_are():
    for test in CROSS_SECTION:
        file, name = test.split("::")
        assert f"\ndef {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_the_summary_of_memory_is_rank_0s(tmp_path, monkeypatch):
    """Also where the command fails."""
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda abbreviated: "PyTorch CUDA memory summary")
    monkeypatch.setattr(cli, "main", lambda: sys.exit(sys.argv[1] != "bench"))
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["with_memory", str(tmp_path / f"{rank}.txt"), "bench"])
        with pytest.raises(SystemExit, match="False"):
            runpy.run_module("tools.gpu.with_memory", run_name="__main__")
    assert [file.name for file in tmp_path.iterdir()] == ["0.txt"]


def test_ranks_of_a_job_of_nodes_are_started_by_srun(tmp_path):
    tests, layer, *_ = steps(Ranks(8, nodes=2), (), tmp_path)
    assert tests.command[:2] == ("srun", "--nodes=1") and "--ntasks=16" in layer.command
    assert "expert-migration:1x8" in plan(steps(Ranks(8, nodes=2), (), tmp_path))
    assert "torch.distributed.run" not in layer.command


def test_without_gpus_it_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["node"])
    assert main() == 2
    assert "tools.gpu.node: error: no GPU here; --plan" in capsys.readouterr().err


def test_how_steps_end(tmp_path):
    def result(code: str, limit_s: int = 60, needs: str | None = None) -> Result:
        return run(Step("a step", (sys.executable, "-c", code), limit_s, {"SAID": "yes"}, needs), tmp_path / "log")

    assert result("import os; print(os.environ['SAID'])").said == "ok"
    assert (tmp_path / "log").read_text() == "yes\n"
    failed = result("raise SystemExit(3)")
    assert failed.failed and failed.said.startswith("FAILED (exit status 3)")
    begin = time.monotonic()
    late = result("import time; time.sleep(60)", limit_s=1)
    assert late.failed and late.said.startswith("FAILED (over 1 s)") and time.monotonic() - begin < 30
    absent = result("", needs="no-such-program")
    assert absent.said == "not run: no no-such-program here" and not absent.failed
    unstarted = run(Step("a step", ("no-such-program",), 60, {}), tmp_path / "log")
    assert unstarted.failed and "No such file or directory: 'no-such-program'" in unstarted.said


def test_the_page_tells_what_passed_and_what_was_measured():
    results = [
        Result("tests", "ok", 12.3),
        Result("trace", "not run: no nsys here"),
        Result("memcheck", "FAILED (x)", 1),
    ]
    missing = {"flex:deepep": "DeepEP is not installed"}
    made = page("a title", {"Topology": "GPU0 X"}, results, RECORDED, QUEUES, missing, ALL_TESTS)
    assert f"All of them, which take longer: `{ALL_TESTS}`" in made
    assert "## Memory of rank 0, 32 queue(s)\n\n```\n|=====" in made
    assert made.startswith("# a title\n\n**FAILED: memcheck.**")
    assert "| tests | ok | 12 |" in made and "| trace | not run: no nsys here | - |" in made
    assert "| dispatcher | ms, 32 queue(s) |" in made and "1 queue(s)" not in made  # nothing was recorded with one
    for row in ("| alltoall | 8.79 | 1.000 | 3 |", "| mpmoe:2 |", "| flex:deepep | DeepEP is not installed | - | - |"):
        assert row in made, made
    assert "2 ranks, cpu, gloo: 64 tokens a rank" in made
    assert "| all_to_all | ep | 0.0164 | 0.188 |" in made
    assert "## Topology\n\n```\nGPU0 X\n```" in made
    assert "**All steps that ran passed.**" in page("t", {}, results[:2], RECORDED / "none", QUEUES, {}, ALL_TESTS)
