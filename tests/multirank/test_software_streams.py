"""Every dispatcher against stock on streams in software, under an adversary.

The long forms: tests/accelerator/seeds.py has these layers, and trainings, under 20; tests/accelerator/plugin.py has
any test of ranks under any number of them.
"""

from __future__ import annotations

import pytest

from tests.accelerator.seeds import LAYERS, run_case
from tests.accelerator.software import Queues

pytestmark = pytest.mark.host_only(reason="is about streams in software")

WAYS = ((0, Queues.MANY), (1, Queues.ONE))
"""Taken in turn."""


@pytest.mark.parametrize(("number", "case"), list(enumerate(LAYERS)), ids=str)
def test_equals_stock_whatever_the_device_does_first(ranks, library, number, case):
    seed, queues = WAYS[number % len(WAYS)]
    worst = ranks.run(run_case, case=case, library=library, seed=seed, queues=queues)
    assert max(worst) < 1, worst
