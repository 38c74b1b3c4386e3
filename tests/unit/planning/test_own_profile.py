"""What `auto` has measured itself: read by a run like it, and by no other; kept where that is possible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe_opt.integration.auto import own_profile
from megatron_moe_opt.integration.auto.own_profile import FILE_NAME
from megatron_moe_opt.planning.costs.cluster import Cluster
from tests.unit.planning.test_cluster_file import CLUSTER

FACTS = {"hidden size of a row": 64, "device": "a GPU", "torch": "2.13.0", "NCCL_ALGO": "Ring"}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(own_profile, "say", lambda _, line: lines.append(line))
    return lines


def test_a_run_like_it_reads_what_was_measured(tmp_path: Path, said: list[str]):
    file = tmp_path / "not yet there" / FILE_NAME
    cluster = replace(CLUSTER, measured_for=FACTS)
    assert own_profile._read(file, FACTS) is None
    own_profile._write(file, cluster)
    assert said == [f"what was measured is kept in {file}"]
    assert own_profile._read(file, FACTS) == cluster


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (FACTS | {"hidden size of a row": 128}, "hidden size of a row 128 (there 64)"),
        (FACTS | {"device": "another"}, "device another (there a GPU)"),
        ({name: fact for name, fact in FACTS.items() if name != "NCCL_ALGO"}, "NCCL_ALGO not set (there Ring)"),
        (FACTS | {"NCCL_PROTO": "LL"}, "NCCL_PROTO LL (there not set)"),
    ],
)
def test_what_a_run_has_otherwise_is_named(tmp_path: Path, said: list[str], facts: dict, part: str):
    file = tmp_path / FILE_NAME
    own_profile._write(file, replace(CLUSTER, measured_for=FACTS))
    assert own_profile._read(file, facts) == f"{file} was measured for another run: {part}"


def test_a_file_of_an_older_version_is_measured_anew(tmp_path: Path):
    file = tmp_path / FILE_NAME
    own_profile._write(file, replace(CLUSTER, measured_for=FACTS))
    file.write_text(file.read_text().replace('"overhead"', '"partition_overhead": 0.002, "overhead"', 1))
    assert own_profile._read(file, FACTS).startswith(f"{file} is not used: measured by an older version")


def test_a_damaged_file_is_measured_anew(tmp_path: Path):
    file = tmp_path / FILE_NAME
    file.write_text("{")
    assert "is written anew" in own_profile._read(file, FACTS)


def test_what_cannot_be_kept_costs_a_line(tmp_path: Path, said: list[str]):
    (tmp_path / "a file").write_text("")
    own_profile._write(tmp_path / "a file" / "checkpoints" / FILE_NAME, CLUSTER)
    own_profile._write(None, CLUSTER)
    assert [line.partition(":")[0] for line in said] == ["what was measured is not kept"] * 2
    assert "no --save" in said[1]


def test_a_profile_of_the_command_is_for_no_run(tmp_path: Path):
    assert CLUSTER.measured_for == {}
    CLUSTER.save(tmp_path / FILE_NAME)
    assert Cluster.load(tmp_path / FILE_NAME) == CLUSTER
    assert "was measured for another run" in own_profile._read(tmp_path / FILE_NAME, FACTS)
