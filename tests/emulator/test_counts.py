"""What is counted on the emulator: launches of every bound function, against csrc/kernels/launches.txt."""

from __future__ import annotations

import re

from tests.emulator import counts
from tests.emulator.build import KERNELS


def test_no_function_launches_more_than_the_table_says():
    made = counts.launch_table()
    assert made == counts.TABLE.read_text(), "if it is meant: python -m tests.emulator.counts --write"


def test_every_kernel_is_launched_by_a_function_of_the_table():
    table = counts.TABLE.read_text().split()
    declared = {name for source in KERNELS for name in re.findall(r"(\w+)_kernel\(", source.read_text())}
    assert declared and declared <= set(table)
