"""`moe-opt timeline` as a user runs it: refusals, its table, and one process."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_moe_opt.cli.report.step_timelines import StepTimelines
from megatron_moe_opt.cli.report.timeline_files import timelines_table
from megatron_moe_opt.planning.costs.cluster import Cluster, ExpertGemm, World
from megatron_moe_opt.planning.predicting.layer_passes import PASSES
from megatron_moe_opt.schedules.schedule import Kind, Lane
from tests.ranks.job import output_of
from tests.unit.schedule_cases import timeline_of


@pytest.fixture
def refusal(command):
    """Why `moe-opt timeline ARGUMENTS` does not run."""

    def refusal(arguments, world):
        code, _, errors = command("timeline", *arguments.split(), world=world)
        assert code == 2
        return errors

    return refusal


@pytest.mark.parametrize(
    ("arguments", "world", "sentence"),
    [
        (
            "-o nowhere/a.json",
            1,
            "--output nowhere/a.json: its folder does not exist; create it or choose another",
        ),
        (
            "-o a.json -o nowhere/a.png",
            1,
            "--output nowhere/a.png: its folder does not exist; create it or choose another",
        ),
        ("-o .", 1, "--output . is a folder: name a file in it"),
        ("-o a.jpeg2000", 1, "the picture a.jpeg2000 has no known format: end its name in .png, .svg, .pdf"),
        (
            "-o a.json --dispatchers monta:O1x4",
            1,
            "--dispatchers monta:O1x4: O1 does not cut; write monta:O1, or take O2 or O3",
        ),
        (
            "-o a.json --dispatchers monta,mpmoe",
            1,
            "--dispatchers monta,mpmoe: write one of monta or mpmoe, such as monta:O3x4 or mpmoe:4:S3",
        ),
        (
            "-o a.json --dispatchers parm:S2",
            1,
            "--dispatchers parm:S2: write one of monta or mpmoe, such as monta:O3x4 or mpmoe:4:S3",
        ),
        ("-o a.json --rank 4", 4, "--rank 4 is not one of the 4 ranks of this run: choose 0 to 3"),
        ("-o a.json --tp 3", 4, "--tp 3 does not divide the 4 ranks of this run: choose a divisor"),
        ("-o a.json --topk 9", 1, "--topk 9 is more than --experts 8: choose at most that"),
    ],
)
def test_refusals(monkeypatch, refusal, tmp_path, arguments, world, sentence):
    monkeypatch.chdir(tmp_path)
    assert refusal(arguments, world) == f"moe-opt: {sentence}\n"


def test_profile_of_other_groups(monkeypatch, refusal, tmp_path):
    monkeypatch.chdir(tmp_path)
    Cluster(World((0, 0, 1, 1), ep=2, expert_tp=2), {(Kind.COPY, None): ((1024, 1e-6),)}).save("cluster.json")
    error = refusal("-o a.json --profile cluster.json", 4)
    assert error == (
        "moe-opt: --ep 4 is not what cluster.json was measured with (2): measure this layout "
        "with moe-opt profile --ep 4 --expert-tp 1\n"
    )


def test_a_profile_that_cannot_predict_the_pipeline(monkeypatch, refusal, tmp_path):
    """Said before anything runs."""
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(World((0, 0, 1, 1), ep=4), {(Kind.COPY, None): ((1024, 1e-6),)})
    arguments = "-o a.json --profile cluster.json --dispatchers mpmoe:2:S1"
    for measured, sentence in (
        (cluster, "the profile has no expert: measure this cluster again with moe-opt profile"),
        (replace(cluster, expert_gemm=ExpertGemm(8, 8, "fp32", ((16, 1e-5),))), "no cost curve for all_to_all"),
    ):
        measured.save("cluster.json")
        assert refusal(arguments, 4).startswith(f"moe-opt: {sentence}")


def test_a_picture_of_no_known_format(monkeypatch, refusal, tmp_path):
    """Said before anything runs."""
    monkeypatch.chdir(tmp_path)
    assert "the picture a.bmp has no known format" in refusal("-o a.bmp", 1)


def test_one_process(tmp_path):
    """The whole command without torchrun; at O1 it has one chunk."""
    file, picture = tmp_path / "step.json", tmp_path / "step.png"
    command = f"timeline --tokens 64 --hidden 32 --dispatchers monta:O1 -o {file} -o {picture}"
    printed = output_of("megatron_moe_opt.cli.main", *command.split())
    for text in ("64 tokens a rank", "rank 0", "monta:O1", *PASSES, f"written to {file}", f"written to {picture}"):
        assert text in printed, printed
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [*PASSES, *["copy of chunk 0"] * 4]
    assert picture.read_bytes().startswith(b"\x89PNG")


def _rows(step: StepTimelines) -> list[list[str]]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(timelines_table("monta", step.predicted, step.measured))
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_table():
    measured = {
        "one": timeline_of((Lane.INTER, 0, 0.4), (Lane.INTRA, 0.3, 0.6)),  # 0.1 of 0.3 s hidden
        "two": timeline_of((Lane.INTER, 0, 0.2), (Lane.INTRA, 0, 0.2)),  # 0.2 of 0.2 s
        "three": timeline_of((Lane.INTRA, 0, 0.01)),  # nothing to hide
    }
    predicted = {
        "one": timeline_of((Lane.INTER, 0, 0.9)),
        "two": timeline_of((Lane.INTER, 0, 0.1)),
        "three": timeline_of(),
    }
    assert _rows(StepTimelines(3, measured, predicted)) == [
        ["one", "900", "600", "+50.0%", "400", "300", "33%"],
        ["two", "100", "200", "-50.0%", "200", "200", "100%"],
        ["three", "0", "10", "-100.0%", "0", "10", "-"],
        ["all", "1000", "810", "+23.5%", "600", "510", "60%"],
    ]
    idle = {"one": timeline_of((Lane.INTER, 0, 0.1), (Lane.INTRA, 0.3, 0.4))}  # 0.2 s in which no lane is busy
    assert _rows(StepTimelines(3, idle, None))[0] == ["one", "-", "400", "-", "100", "100", "0%"]
    assert _rows(StepTimelines(3, measured, None))[0] == ["one", "-", "600", "-", "400", "300", "33%"]
