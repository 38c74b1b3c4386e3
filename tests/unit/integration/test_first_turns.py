"""What runs its first steps under `auto` is beside the checkpoint, and stays there where the job ends in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_moe_opt.integration import training_arguments as arguments
from megatron_moe_opt.integration.auto.first_turns import FILE_NAME, FirstTurns
from megatron_moe_opt.integration.training_arguments import checkpoint_folder

ENDS = {
    "pass": False,
    "sys.exit(0)": False,
    "raise RuntimeError": True,
    "launch.main(['refused.py'])": True,
    "launch.main(['exits.py'])": True,
    "os._exit(1)": True,
    "os.abort()": True,
}
"""How a process ends, and whether what it ran stays written down."""
JOBS = """
import os, sys
from megatron_moe_opt import launch
from megatron_moe_opt.integration.auto.first_turns import FirstTurns

number = next((number for number in range(len(sys.argv) - 1) if os.fork() == 0), None)
if number is None:
    for _ in sys.argv[1:]:
        os.wait()
else:
    end = sys.argv[number + 1]
    sys.argv = ["train.py", "--save", str(number)]
    FirstTurns().run("mpmoe:2:S1")
    exec(end)
"""


def test_it_stays_where_a_process_ends_by_an_error(tmp_path: Path):
    (tmp_path / "refused.py").write_text(
        "from megatron_moe_opt.errors import ConfigurationError\nraise ConfigurationError('in a first step')\n"
    )
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit(16)\n")  # as Megatron does where gradients are NaN
    subprocess.run([sys.executable, "-c", JOBS, *ENDS], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    left = [(tmp_path / str(number) / FILE_NAME).exists() for number in range(len(ENDS))]
    assert dict(zip(ENDS, left, strict=True)) == ENDS


def test_the_next_starts_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--load", str(tmp_path / "not yet there")])
    file = tmp_path / "not yet there" / FILE_NAME
    first, again, third = FirstTurns(), None, None
    assert not first.ended
    first.run("flex:deepep")
    assert [*(again := FirstTurns()).ended] == ["flex:deepep"]
    again.run("mpmoe:2:S1")
    assert [*(third := FirstTurns()).ended] == ["flex:deepep", "mpmoe:2:S1"]
    again.run(None)
    assert [*FirstTurns().ended] == ["flex:deepep"] and str(file) in again.ended["flex:deepep"]
    third.run(None)
    file.unlink()
    assert not FirstTurns().ended


def test_where_it_cannot_be_written_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "a file").write_text("")
    monkeypatch.setattr(sys, "argv", ["train.py", "--save", str(tmp_path / "a file" / "checkpoints")])
    turns = FirstTurns()
    turns.run("mpmoe:2:S1")
    turns.run("mpmoe:4:S1")
    assert capsys.readouterr().out.count("would be tried again in its next start") == 1


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("--load a --save b", "b"),
        ("--load=a --seq-length 32", "a"),
        ("--save-interval 2", None),
        ("--save --lr 1", None),
        ("--save msc://bucket/run", None),
    ],
)
def test_the_folder_of_checkpoints(monkeypatch: pytest.MonkeyPatch, words: str, folder: str | None):
    expected = None if folder is None else Path(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    assert checkpoint_folder() == expected
    both = SimpleNamespace(save=None, load="of Megatron-LM")
    monkeypatch.setattr(arguments, "training_arguments", lambda: both)
    assert checkpoint_folder() == Path("of Megatron-LM")
