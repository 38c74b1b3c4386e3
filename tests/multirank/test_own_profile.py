"""`auto` alone: the run measures what moves cost, keeps it beside the checkpoint, and trains as if it had not."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_moe_opt.integration.auto.own_profile import FILE_NAME
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.costs.domain_curves import profile_name
from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.schedule import Kind, Schedule
from megatron_moe_opt.schedules.timeline import Timeline
from tests.ranks.devices import rank_device

STEPS = 4  # one to look, and three of trials
SMALL = (4096, 16384)


@contextmanager
def short_measurements(arguments: Any = None):
    """Has measurements take few and small sizes; `arguments` are Megatron-LM's. Yields what is said."""
    from megatron_moe_opt.integration import training_arguments
    from megatron_moe_opt.integration.auto import own_profile
    from megatron_moe_opt.integration.measuring import loads, measure, meter

    said: list[str] = []
    settings = {
        loads: {"_COPIED_BYTES": 2**16},
        meter: {"MOST_BESIDE": 4, "LEAST_OPS": 2, "MOST_OPS": 2, "MORE_OF_OUTLIERS": 0, "CALLS": 1, "DIP": 1},
        measure: {"SIZES": SMALL, "LOCAL_SIZES": SMALL[:1], "GEMM_ROWS": (16, 32), "LONGEST_SECONDS": math.inf},
        own_profile: {"say": lambda _, line: said.append(line)},
        training_arguments: {"training_arguments": lambda: arguments},
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, values in settings.items():
            for name, value in values.items():
                patch.setattr(module, name, value)
        yield said


def train(arguments: Any, sizes: dict[str, int], options: Options | None = None, steps: int = STEPS, **config: Any):
    """Losses, what was said, and groups that are left over."""
    from tests.multirank import test_auto

    with short_measurements(arguments) as said:
        auto = {} if config.get("moe_token_dispatcher_type") else {"moe_token_dispatcher_type": "auto"}
        found = test_auto.train(steps, options or Options(), sizes, test_auto.AllAlike(), **auto, **config)
    return {"said": said, "losses": found["losses"], "groups": found.get("groups"), "tried": found.get("tried")}


DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}  # every random number that measuring took would be seen
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"tp": 2, "ep": 2, "etp": 2}, {"bf16": True, **DROPS, **RECOMPUTED}),
        ({"ep": 2, "pp": 2, "vpp": 2}, {"moe_layer_freq": [0, 0, 0, 1], "num_layers": 4, "microbatches": 2, **DROPS}),
        ({"tp": 2, "ep": 4}, {"sequence_parallel": False}),
    ],
    ids=[
        "tp 2, ep 2, expert-tp 2, recomputed",
        "virtual stages, a rank without experts",
        "tokens that a TP group shares",
    ],
)
def test_a_run_that_measures_trains_as_one_that_does_not(ranks, tmp_path, sizes, config):
    arguments = SimpleNamespace(save=str(tmp_path / "new" / "checkpoints"), load=None)
    file = tmp_path / "new" / "checkpoints" / FILE_NAME
    own = ranks.run(train, arguments=arguments, sizes=sizes, **config)
    cluster = Cluster.load(file)
    assert cluster.measured_for["--moe-router-topk"] == 2 and cluster.measured_for["--num-experts"] == 8
    assert cluster.measured_for["--expert-model-parallel-size"] == sizes["ep"] == cluster.world.ep
    assert cluster.measured_for["hidden size of a row"] == 64 and cluster.expert_gemm.hidden == 64
    # Of all layouts, those with cut experts too: or tokens that hop would never be among the candidates.
    assert (Kind.ALL_TO_ALL, profile_name(Kind.ALL_TO_ALL, (sizes["ep"],), 0, sizes["ep"])) in cluster.curves
    first = own[0]["said"]
    assert sum("measuring what moves cost here, for 60 s at most: part " in line for line in first) == 4
    assert first[-1] == f"what was measured is kept in {file}"
    again = ranks.run(train, arguments=arguments, sizes=sizes, **config)
    assert again[0]["said"] == [f"costs of moves here are those that were measured before, in {file}"]
    for measured, read in zip(own, again, strict=True):
        assert measured["losses"] == read["losses"]  # to the last bit
        assert "profile" not in measured["groups"]  # those of the measurement are gone


class Clock:
    """Ops take a time by their bytes, and everything else a millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, schedule: Schedule, steps: Any, record: bool) -> Timeline:
        timeline = simulate(schedule, lambda op: 1e-4 + 2e-7 * op.size)
        self.now += timeline.seconds
        return timeline

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now


def measured_in(seconds: float) -> tuple[int, int, float, list[str]]:
    """Curves, their points, the time that measuring has taken by a clock that does not depend on the machine, and what
    was measured, in turn.
    """
    from megatron_moe_opt.integration.measuring import measure, meter, timing
    from tests.ranks.megatron import parallel

    clock = Clock()
    with parallel(ep=4), short_measurements(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SIZES", tuple(2**power for power in range(12, 18)))
        patch.setattr(meter, "executor", lambda device: clock)
        for module in (meter, timing):
            patch.setattr(module, "time", clock)
        sizes, parts = measure.Sizes(64, 96, "fp32", (4,)), []
        cluster = measure.measure(sizes, seconds, rank_device(), lambda done, of, part: parts.append(part))
    curves = [*cluster.curves.values(), cluster.expert_gemm.points]
    return len(curves), sum(map(len, curves)), clock.now, parts


def test_less_time_means_fewer_points_and_no_more_than_the_time(ranks):
    (number, least, at_least, parts), *_ = ranks.run(measured_in, seconds=1e-6)
    (_, fewer, took, _), *_ = ranks.run(measured_in, seconds=at_least + 1.0)
    (_, most, _, _), *_ = ranks.run(measured_in, seconds=1000.0)
    # EP's exchange last of all moves, under both names.
    of_ep = parts[: parts.index("experts")][-2:]
    assert of_ep == ["all_to_all tokens of 4 ranks at level 0 of 4", "all_to_all ep"]
    assert least == 2 * number  # of each, for a curve of one point says nothing of other sizes
    assert least < fewer < most and most > 4 * number
    assert took < 2 * at_least + 1.0
