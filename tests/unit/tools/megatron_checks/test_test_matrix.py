"""tools/megatron_checks/test_matrix.py: versions are pinned, a tag is found, what ran is counted and not run again."""

from __future__ import annotations

import os
import re
import sys
from functools import partial

import pytest

from tools import ROOT
from tools.megatron_checks import test_matrix
from tools.megatron_checks.test_matrix import (
    NOT_OF_QUICK,
    PAIRS,
    QUICK,
    Pair,
    counted,
    newest_tag,
    pinned,
    run_tests,
    table,
)

REPORT = '<testsuites><testsuite errors="1" failures="2" skipped="3" tests="10" time="4.2"/></testsuites>'
PAIR = Pair("3.13", "2.15.0", "0.19.2")


def test_a_pairs_versions_take_the_place_of_the_pinned_ones():
    requirements = (ROOT / "recipes" / "requirements.txt").read_text()
    lines = pinned(requirements, PAIR, ["six"]).splitlines()
    assert [line for line in lines if line.startswith(("torch", "megatron-core"))] == [
        "torch==2.15.0",
        "megatron-core==0.19.2",
    ]
    assert lines[-1] == "six" and "ninja" in lines


def test_packages_that_the_cross_section_does_without_are_left_out():
    requirements = (ROOT / "tools" / "requirements.txt").read_text()
    everything, left = (set(pinned(requirements, PAIR, without=one).splitlines()) for one in ((), NOT_OF_QUICK))
    assert left < everything and all(any(line.startswith(one) for line in everything - left) for one in NOT_OF_QUICK)
    assert len(everything - left) == len(NOT_OF_QUICK)


def test_what_pretrain_gpt_needs_is_read_from_the_package():
    assert {"six", "pyyaml", "regex"} <= set(test_matrix.extra("megatron-lm"))


@pytest.mark.parametrize(("version", "tag"), [("0.19.2", "core_v0.19.0"), ("0.18.2", "core_v0.18.2"), ("0.20.0", None)])
def test_the_newest_tag_of_a_version_is_taken(version, tag):
    tags = ["core_v0.18.0", "core_v0.18.2", "core_v0.18.3", "core_v0.19.0", "core_v0.19.0rc1", "core_v0.19.3", "v1"]
    assert newest_tag(tags, version) == tag


def test_what_pytest_reports_is_said_in_words():
    assert counted(REPORT) == "4 passed, 2 failed, 1 errors, 3 skipped"
    assert counted(REPORT.replace('"1"', '"0"').replace('"2"', '"0"').replace('"3"', '"0"')) == "10 passed"


def test_the_cross_section_names_tests_that_there_are():
    for test in QUICK:
        file, _, name = test.partition("::")
        code = (ROOT / file).read_text()
        assert not name or re.search(rf"^def {name.partition('[')[0]}\(", code, re.M), test


def test_what_has_passed_is_not_run_again_and_what_failed_is(tmp_path, monkeypatch, capsys):
    ran = []

    def run_part(pair, part, *_):
        ran.append((pair, part))
        return part == "quick", "7 passed" if part == "quick" else "1 of 8"

    monkeypatch.setattr(test_matrix, "prepare", lambda pair, folder, parts: folder)
    monkeypatch.setattr(test_matrix, "run_part", run_part)
    words = ["x", "--folder", str(tmp_path), "--pairs", "3.13 2.15.0 0.19.2", "--parts", "quick,pretrain"]
    monkeypatch.setattr("sys.argv", words)
    assert [test_matrix.main(), test_matrix.main()] == [1, 1]
    assert ran == [(PAIR, "quick"), (PAIR, "pretrain"), (PAIR, "pretrain")]
    assert "| 3.13 | 2.15.0 | 0.19.2 | 7 passed | **failed**: 1 of 8 | not run |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words[:-1], "quick"])
    assert test_matrix.main() == 0


def test_failed_tests_alone_are_run_again(tmp_path):
    """They run again at once, and where they are asked for after a mend."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    run = partial(run_tests, tmp_path, ["test_two.py"], os.environ, tmp_path / "one.full.log")
    passed, said = run(before=None)
    assert (passed, said) == (False, "1 passed, 1 failed; run again: 0 passed, 1 failed")
    tests.write_text(tests.read_text().replace("False", "True"))
    assert run(before="1 passed, 1 failed") == (True, "1 passed, 1 failed; run again: 1 passed")
    assert run(before="1 passed, 1 failed")[0] is False  # nothing is known to have failed


def test_a_python_that_is_not_here_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python 3.99 here: install one"):
        test_matrix.prepare(Pair("3.99", "2.15.0", "0.19.2"), tmp_path, ["quick"])


@pytest.mark.parametrize(
    ("here", "pairs"), [({"3.12", "3.11"}, [PAIRS[1]]), ({"3.13", "3.12"}, [PAIRS[0]]), ({"3.10"}, [])]
)
def test_the_newest_pair_is_one_whose_python_is_here(monkeypatch, here, pairs):
    monkeypatch.setattr(test_matrix, "interpreter", lambda version: version if version in here else None)
    assert test_matrix.pairs_of("newest") == pairs


@pytest.mark.parametrize("words", [["--pairs", "3.13 2.15.0"], ["--parts", "slow"]])
def test_words_that_name_nothing_are_refused(tmp_path, monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["x", "--folder", str(tmp_path), *words])
    with pytest.raises(SystemExit, match=f"{words[0]} {words[1]} is (not three versions|unknown)"):
        test_matrix.main()


def test_the_table_names_every_supported_pair():
    assert table({}).count("not run") == 3 * len(PAIRS)
