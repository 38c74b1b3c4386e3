"""Files that are written whole or not at all, and the checks before them."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.output_file import check_output_file, check_output_folder, write_text_whole, written_whole
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.offline.expert_order import ExpertOrder, write_expert_order
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.traces.routing_trace import write_routing_trace
from megatron_moe_opt.schedules.trace import write_trace
from tests.unit.trace_cases import random_trace

ROOT = Path(__file__).resolve().parents[3]


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    file.chmod(0o640)
    before = file.stat().st_ino
    write_text_whole(file, "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.stat().st_ino != before  # who reads the old one goes on reading it
    assert os.listdir(tmp_path) == ["out.json"]


def test_what_fails_leaves_the_old_file_alone(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    with pytest.raises(KeyError), written_whole(file) as partial:
        partial.write_text("new")
        raise KeyError
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


def test_a_file_that_does_not_fit_on_the_disk_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk would, without one
    try:
        with pytest.raises(ConfigurationError, match=f"^{file} cannot be written .File too large.: choose"):
            write_text_whole(file, "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]


def test_devices_and_pipes_are_written_to_and_stay(tmp_path):
    with pytest.raises(ConfigurationError, match="^/dev/full cannot be written .No space left on device.: choose "):
        write_text_whole("/dev/full", "new")
    write_text_whole("/dev/null", "new")
    assert all(stat.S_ISCHR(os.stat(device).st_mode) for device in ("/dev/null", "/dev/full"))
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_output_file("--output", pipe)  # does not wait for a reader
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text_whole(pipe, "new")
    reader.join()
    assert read == ["new"] and pipe.is_fifo()


WRITERS = {
    "expert order": lambda path: write_expert_order(path, ExpertOrder(2, 1, 2, {1: (1, 0)})),
    "plan": Plan({1: "monta"}, (), "a cluster", 1, 1, 2).save,
    "cluster": Cluster(World((0,)), {}).save,
    "routing trace": lambda path: write_routing_trace(path, random_trace(shape=(1, 1, 1, 1, 1))),
    "trace": lambda path: write_trace(path, {}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_writer_follows_links(tmp_path, write):
    (tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "link", tmp_path / "elsewhere" / "file"
    link.symlink_to(file)
    for _ in range(2):  # to a file that is not there yet, and to one that is
        write(link)
        assert link.is_symlink() and file.stat().st_size > 0
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "link"] and os.listdir(file.parent) == ["file"]


def test_a_place_that_cannot_be_written_to_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("content")
    (tmp_path / "file").chmod(0o600)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=f"^--save {folder} cannot be written .Not a directory.: "):
            check_output_folder("--save", folder)
        with pytest.raises(ConfigurationError, match=f"^--log {folder}/log cannot be written .Not a directory.: "):
            check_output_file("--log", folder / "log", make_folder=True)
    check_output_file("--log", tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(
        ConfigurationError, match=f"^--log {tmp_path}/link is the file of --in, which it would replace: "
    ):
        check_output_file("--log", tmp_path / "link", others=[("--none", None), ("--in", tmp_path / "file")])
    (tmp_path / "link").unlink()
    check_output_file("--log", tmp_path / "new" / "log", make_folder=True)
    check_output_folder("--save", tmp_path / "new" / "save")
    assert (tmp_path / "file").read_text() == "content"
    assert sorted(os.listdir(tmp_path)) == ["file", "new"] and os.listdir(tmp_path / "new") == ["save"]


def test_the_comparison_deletes_nothing_that_it_did_not_make(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("years of work")
    result = subprocess.run(
        ["bash", ROOT / "recipes/train_and_compare.sh", "--output", tmp_path], capture_output=True, text=True
    )
    assert result.returncode == 2
    sentence = f"--output {tmp_path} holds what this recipe did not make; name a new folder"
    assert result.stderr == f"train_and_compare: error: {sentence}\n"
    assert (tmp_path / "checkpoints" / "mine").is_file()
