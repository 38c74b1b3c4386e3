"""recipes/setup_env.sh: what it installs, and with which variables. Commands of Python are noted and not run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/bin/sh
echo "constraint $PIP_CONSTRAINT, CUDA $MOE_OPT_CUDA: $*" >>notes
"""
NEW_PYTHON = """#!/bin/sh
case "$*" in
    *sysconfig*) echo include ;;
    *venv*) echo "$*" >>notes; echo 'PATH="$PWD/.venv/bin:$PATH"' >.venv/bin/activate ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with an environment that is made, and has nothing yet."""
    for folder in (".venv/bin", "recipes", "tools", "csrc"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("setup.py", "CMakeLists.txt", "pyproject.toml", "recipes/train_and_compare.sh"):
        (tmp_path / file).touch()
    for file in ("setup_env.sh", "quickstart.sh", "requirements.txt", "../tools/requirements.txt"):
        shutil.copy(ROOT / "recipes" / file, tmp_path / "recipes" / file)
    (tmp_path / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    (tmp_path / ".venv/bin/python").write_text(PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    return tmp_path


def noted(tree: Path, *command: str, **environment: str) -> list[str]:
    """Runs a command; returns the commands of Python that it has run."""
    (tree / "notes").write_text("")
    given = {name: value for name, value in os.environ.items() if name != "MOE_OPT_CUDA"} | environment
    subprocess.run(command, cwd=tree, env=given, check=True)
    return (tree / "notes").read_text().splitlines()


def test_the_quickstart_builds_for_cpus_whatever_versions_an_image_demands(tree):
    installed, built, *_ = noted(tree, "bash", "recipes/quickstart.sh", PIP_CONSTRAINT="/etc/pip/constraint.txt")
    assert installed.startswith("constraint /dev/null, CUDA OFF: -m pip install")
    assert built.startswith("constraint /dev/null, CUDA OFF: -m pip install")
    (tree / ".venv/built-from.sha256").unlink()
    assert "CUDA ON: -m pip" in noted(tree, "bash", "recipes/quickstart.sh", MOE_OPT_CUDA="ON")[0]


def test_an_environment_that_was_not_completed_is_made_anew(tree):
    """As Debian's Python leaves one without python3-venv: with its links to Python, and no more."""
    (tree / ".venv/bin/activate").unlink()
    (tree / "include").mkdir()
    (tree / "python3").write_text(NEW_PYTHON)
    (tree / "python3").chmod(0o755)
    command = ["bash", "-c", "source recipes/setup_env.sh"]
    given = os.environ | {"PYTHON": "./python3"}
    refused = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == (
        "setup_env: error: there is no include/Python.h; install the headers of ./python3 (python3-dev)\n"
    )
    (tree / "include/Python.h").touch()
    made, *_, built = noted(tree, *command, PYTHON="./python3")
    assert made == "-m venv --clear .venv" and "--editable ." in built


def test_packages_for_tests_are_installed_where_they_are_asked_for(tree):
    def installed(**environment: str) -> list[str]:
        lines = noted(tree, "bash", "-c", "source recipes/setup_env.sh", **environment)
        return [words for line in lines if "-m pip install" in line for words in line.split() if "requirement" in words]

    of_tests = {"MORE_REQUIREMENTS": "tools/requirements.txt"}
    ours, tests = "--requirement=recipes/requirements.txt", "--requirement=tools/requirements.txt"
    assert [installed(), installed(), installed(**of_tests), installed(**of_tests)] == [[ours], [], [tests], []]
    assert installed() == []  # nor after the tests
    shutil.rmtree(tree / ".venv/installed")
    assert installed(**of_tests) == [ours, tests]
    assert of_tests["MORE_REQUIREMENTS"] in (ROOT / "tools/test.sh").read_text()
