"""Progress where there is no terminal."""

from __future__ import annotations

import re
import time

from megatron_moe_opt.cli import console
from megatron_moe_opt.cli.console import progress


def test_a_line_now_and_then_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.02)
    with progress("measuring") as tell:
        tell(2, 7, "all_to_all ep")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(
        re.fullmatch(r"moe-opt: measuring all_to_all ep, 2 of 7 done, after \d+ s", one) for one in lines
    )
    time.sleep(0.05)
    with progress("measuring", is_shown=False) as tell:
        tell(2, 7, "all_to_all ep")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
