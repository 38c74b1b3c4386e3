"""Trials of partitions for several numbers of rows at once; those of several ranks are in multirank/test_tuning.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.dispatchers import tuning
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.choosing.partition_search import PARTITIONS
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload

LAYER = LayerWorkload(0, 64, 128, False, 8, 2, 4, 16, 4, 1, fused=True)


class Alone:
    """In the place of groups that nothing is asked of."""


@pytest.fixture
def said(monkeypatch):
    """What a single rank says."""

    def agree(trial, groups):
        trial.seconds = {one: [clock.seconds for clock in clocks] for one, clocks in trial._clocks.items()}

    lines = []
    monkeypatch.setattr(tuning._Trial, "agree", agree)
    monkeypatch.setattr(tuning, "say", lambda dispatcher, line: lines.append(line))
    return lines


def test_a_choice_that_other_numbers_of_rows_made_meanwhile(said):
    """More and fewer rows settle on 3 while 1 is tried: it is known for what lies between them, and was never run."""
    tuner = tuning._Tuner(tuning.Candidates(LAYER, PARTITIONS, ("none",)))

    def passed(rows):
        """The partitions of a pass, and whether they were a trial."""
        one = tuner.choose(rows, None)
        if one.finished is not None:
            one.finished(SimpleNamespace(seconds=1.0 + abs(one.count - 3)))
        return one.count, one.finished is not None

    assert [passed(10_000) for _ in range(5)] == [(1, True)] * 5
    for rows in (1_000, 100_000):
        while passed(rows)[1]:
            pass
    assert passed(10_000) == (3, False)
    assert "3 partitions" in said[-1] and "5 passes of trials ended when it was the choice for more and" in said[-1]
    assert len(said) == 3


def test_trials_of_passes_that_are_repeated_as_they_were():
    partitioning = tuning.MeasuredPartitioning(Alone(), tuning.Candidates(LAYER, PARTITIONS, ("none",)))

    def layer(rows):
        partitioning.choose(lambda: 10_000)
        return rows.square()

    def run(**how):
        checkpoint(layer, torch.ones(3, requires_grad=True), **how).sum().backward()

    run(use_reentrant=True)
    with pytest.raises(ConfigurationError, match="repeats passes as they were: name what the log shows as chosen"):
        run(use_reentrant=False)
