"""What is handed out: a source distribution that is complete, and what of it needs neither a compiler nor PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_moe_opt.cli.bench.saved_report import write_report
from tests.unit.report_cases import made_report

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("plan", "--cluster", "h100-ib400", "--model", "mixtral-8x7b", "--world", "64", "--ep", "8")
TEMPLATES = "megatron_moe_opt/cli/report/templates"


def run(*command: object, cwd: Path = ROOT, expect: int = 0) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # From a copy of what git has: setuptools writes beside its sources.
    tree = folder / "tree"
    tree.mkdir()
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    kept = [file for file in files if file and (ROOT / file).is_file()]
    subprocess.run(["tar", "-cf", "-", "--", *kept], cwd=ROOT, stdout=(folder / "tree.tar").open("wb"), check=True)
    run("tar", "-xf", folder / "tree.tar", "-C", tree)
    run(sys.executable, "-c", f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})", cwd=tree)
    (made,) = folder.glob("*.tar.gz")
    return made


def test_a_source_distribution_has_all_that_builds_the_extension(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", "csrc", "megatron_moe_opt", "CMakeLists.txt", "setup.py", "LICENSE").split()
    assert [name for name in tracked if name not in names and (ROOT / name).exists()] == []


def test_a_bare_environment_plans(sdist: Path, tmp_path: Path) -> None:
    """Neither a compiler nor PyTorch: a wheel of an isolated build, as pip makes it, and the commands that plan."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {f"{TEMPLATES}/{file.name}" for file in (ROOT / TEMPLATES).iterdir()} == {
        name for name in names if name.startswith(TEMPLATES)
    }
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    python, moe_opt = tmp_path / "bare/bin/python", tmp_path / "bare/bin/moe-opt"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)
    assert "No module named 'torch'" in run(python, "-c", "import torch", cwd=tmp_path, expect=1)

    run(moe_opt, *PLAN, "--output", "plan.json", cwd=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())
    run(moe_opt, "trace", "generate", "--passes", 2, "--tokens", 64, "-o", "routing.npz", cwd=tmp_path)
    assert "less between nodes" in run(
        moe_opt, "trace", "replay", "routing.npz", "--nodes", 2, "--ranks-per-node", 8, cwd=tmp_path
    )
    write_report(tmp_path / "layer.json", made_report())
    run(moe_opt, "report", "layer.json", "-o", "report.html", cwd=tmp_path)
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "no PyTorch" in run(moe_opt, "bench", cwd=tmp_path, expect=2)
    said = run("env", "COLUMNS=200", moe_opt, "doctor", cwd=tmp_path, expect=1)
    assert "pip install 'torch>=2.6,<2.15'" in said and "Training cannot run yet: mend PyTorch" in said


def test_a_wheel_with_the_extension(tmp_path: Path) -> None:
    """It says which Linux and which licence it has, and its kernels load beside the PyTorch it was built with."""
    run("bash", "tools/wheels.sh", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-cp3\d+-cp3\d+-manylinux_2_\d+_x86_64\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = archive.read(metadata).decode()
        assert not [name for name in archive.namelist() if "libtorch" in name or "libc10" in name]
    assert "License-Expression: Apache-2.0" in said and "License-File: LICENSE" in said
    loads = "import torch, megatron_moe_opt.extension as extension; print(extension.__file__, extension.build_info())"
    printed = run(sys.executable, "-c", loads, cwd=tmp_path / "unpacked")
    assert str(tmp_path) in printed and "'backend': 'cpu'" in printed
