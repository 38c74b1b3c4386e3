"""tools/megatron_checks/feature_matrix.py: what a run's output and status say of a cell, which runs once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tools.megatron_checks import feature_matrix
from tools.megatron_checks.feature_matrix import FEATURES, STOCK, Cell, Feature, judged, losses_of, read, table

STEP = (
    " [2026-11-23] iteration        {}/       3 | consumed samples: 4 | lm loss: {} | loss scale: 1.0 | grad norm: 1 |"
)
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{}\n'
ONE = Feature("one")
LOSSES = ("5.957920E+00", "5.937421E+00")


def trained(*losses: str) -> str:
    return "\n".join(STEP.format(number, loss) for number, loss in enumerate(losses, start=1))


EQUAL = Cell("one", STOCK, "equal", losses=LOSSES)
BROKEN = Cell("one", STOCK, "as stock", "AssertionError: Transformer Engine is required")


@pytest.mark.parametrize(
    ("status", "text", "stock", "outcome"),
    [
        (0, trained(*LOSSES), None, ("equal", "")),
        (0, trained(*LOSSES), EQUAL, ("equal", "0.0e+00")),
        (0, trained("5.957921E+00", LOSSES[1]), EQUAL, ("equal", "1.7e-07")),
        (0, trained("5.958920E+00", LOSSES[1]), EQUAL, ("different", "1.7e-04")),
        (0, trained(LOSSES[0]), EQUAL, ("different", "inf")),
        (0, trained("nan", LOSSES[1]), EQUAL, ("different", "nan")),
        (0, "", EQUAL, ("traceback", "")),  # nothing was trained
        (0, trained(*LOSSES), BROKEN, ("runs", "")),
        (2, "moe-opt: error: --flag 3 is wrong: drop it", EQUAL, ("refused", "--flag 3 is wrong: drop it")),
        (1, "moe-opt: error: rank 1 (a) failed first, after MoE layer 1: --flag 3 is wrong", EQUAL, ("traceback", "")),
        (1, "moe-opt: error: --flag 3\n" + TRACE.format("ValueError: no"), EQUAL, ("traceback", "ValueError: no")),
        (1, TRACE.format(BROKEN.detail), None, ("as stock", BROKEN.detail)),
        (1, TRACE.format(BROKEN.detail), BROKEN, ("as stock", BROKEN.detail)),
        (1, TRACE.format(f"[rank1]: {BROKEN.detail}"), BROKEN, ("as stock", BROKEN.detail)),
        (
            1,
            TRACE.format("ValueError: an object at 0x7fcb4ed1 is"),
            None,
            ("as stock", "ValueError: an object at 0x... is"),
        ),
        (1, TRACE.format("KeyError: 'x'"), BROKEN, ("traceback", "KeyError: 'x'")),
        (None, trained(*LOSSES), EQUAL, ("did not end", "")),
    ],
)
def test_what_a_run_says_of_a_cell(status, text, stock, outcome):
    assert judged(ONE, "monta", status, text, stock) == outcome


def test_what_routers_draw_may_differ_where_samples_move_and_only_there():
    outcomes = [
        judged(Feature("one", is_drawn=drawn), name, 0, trained(loss, LOSSES[1]), EQUAL)[0]
        for drawn, name, loss in (
            (True, "netmoe", "5.958920E+00"), (True, "netmoe", LOSSES[0]), (True, "netmoe", "6.958920E+00"),
            (True, "monta", "5.958920E+00"), (False, "netmoe", "5.958920E+00"),
        )
    ]  # fmt: skip
    assert outcomes == ["other draws", "equal", "different", "different", "different"]
    drawn = Cell("EP 2", "netmoe", "other draws", "2.9e-05", LOSSES)
    assert "| other draws 2.9e-05 |" in table({("EP 2", "netmoe"): drawn}, FEATURES, ("netmoe",))


def test_losses_are_read_as_megatron_prints_them():
    assert losses_of(trained("5.957920E+00", "nan")) == ("5.957920E+00", "nan")


def test_features_have_names_of_their_own_and_more_than_sixty():
    names = [one.name for one in FEATURES]
    assert len(names) == len(set(names)) >= 60 and not any(set(name) & set(",;|") - {","} for name in names)


def test_what_has_run_is_read_and_not_run_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "pretrain_gpt.py").touch()
    ran = []

    def run(todo: list[tuple[Feature, str]], *_: object) -> Iterator[tuple[Feature, str, int, str, float]]:
        for feature, name in todo:
            ran.append(name)
            refused = name == "parm"
            text = "moe-opt: error: --moe-token-dispatcher-type parm: no" if refused else trained(*LOSSES)
            yield feature, name, 2 if refused else 0, text, 1.0

    monkeypatch.setattr(feature_matrix, "prepare", lambda checkout: None)
    monkeypatch.setattr(feature_matrix, "run", run)
    page = tmp_path / "page.md"
    words = [
        "x",
        str(tmp_path),
        "--features",
        "EP 2",
        "--dispatchers",
        "monta,parm",
        "--folder",
        str(tmp_path / "cells"),
    ]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", [*words, "--table", str(page)])
        assert feature_matrix.main() == 0
    assert ran == [STOCK, "monta", "parm"]
    assert "| EP 2 | = | = | refused (1) |" in page.read_text()
    assert "1. `--moe-token-dispatcher-type ...: no`" in page.read_text()
    file = tmp_path / "cells" / "cells.jsonl"
    other = Cell("EP 2", "monta", "different", "1.0e-01", LOSSES)
    file.write_text(file.read_text() + json.dumps(asdict(other)) + "\n")
    assert read(file)["EP 2", "monta"] == other  # the last one counts
    monkeypatch.setattr("sys.argv", words)
    assert feature_matrix.main() == 0 and ran[3:] == ["monta"]  # of another command


def test_a_checkout_and_a_feature_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no pretrain_gpt.py: give a checkout of Megatron-LM"):
        feature_matrix.main()
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path), "--features", "EP 3", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="--features EP 3 is unknown: choose from EP 2; EP 4; "):
        feature_matrix.main()


def test_the_table_leaves_out_what_has_not_run():
    assert table({("EP 2", STOCK): EQUAL}, FEATURES, ("monta",)).count("\n| ") == 1
