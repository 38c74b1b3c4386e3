"""Training holds what it held: threads, files, process groups and tensors (tests/steady.py is the long form)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.dispatchers import DISPATCHERS
from tests.steady import measure

WARM_UP = {"auto": 11}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_steps_leave_nothing_behind(ranks, tmp_path: Path, dispatcher: str):
    begin = WARM_UP.get(dispatcher, 2)
    of_ranks = ranks.run(
        measure, dispatcher=dispatcher, at=(begin, begin + 3), folder=tmp_path, trial_steps=WARM_UP["auto"] - 3
    )
    for before, after in of_ranks:
        assert after.threads <= before.threads
        assert after.files <= before.files
        assert after.groups <= before.groups
        assert after.tensors <= before.tensors
