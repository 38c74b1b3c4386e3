"""Every dispatcher against stock on streams in software, under two adversaries.

The long form is all tests of dispatchers under any number of them: tests/accelerator/plugin.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_moe_opt.options import Options
from tests.accelerator.executor_library import build
from tests.accelerator.ranks import software_streams
from tests.accelerator.software import Queues
from tests.multirank import test_mpmoe, test_netmoe
from tests.multirank.test_dispatchers import RECOMPUTE, compare
from tests.multirank.test_parm import compare_replicated

pytestmark = pytest.mark.host_only(reason="is about streams in software")

WAYS = ((0, Queues.MANY), (1, Queues.ONE))
BOTH, EP4 = {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("executor"))


def errors_of(dispatcher: str, layout: dict[str, int], options: Options, settings: dict[str, Any] | None = None) -> Any:
    arguments = {"layout": layout, "settings": settings or {}, "options": options}
    return compare(dispatcher, **arguments)["errors"].values()


def several_passes(count: int, strategy: str) -> list[float]:
    variants = [(count, strategy)]
    worst = test_mpmoe.worst_errors(layout=BOTH, settings={}, routing=None, variants=variants, steps=2)
    return [error for error, _ in worst.values()]


CASES = {
    "monta O1": lambda: errors_of("monta", BOTH, Options(monta_level="O1", chunks=1)),
    "monta O2 x 3": lambda: errors_of("monta", BOTH, Options(monta_level="O2", chunks=3)),
    "monta O3 x 4, recompute": lambda: errors_of("monta", BOTH, Options(monta_level="O3", chunks=4), RECOMPUTE),
    "parm": lambda: errors_of("parm", BOTH, Options()),
    "parm S2": lambda: compare_replicated("parm", BOTH, {}, None, "S2").values(),
    "deepspeed": lambda: errors_of("deepspeed", BOTH, Options()),
    **{
        f"mpmoe {strategy} x {count}": lambda count=count, strategy=strategy: several_passes(count, strategy)
        for count, strategy in test_mpmoe.SOME
    },
    "expert-migration": lambda: errors_of(
        "expert-migration", EP4, Options(network_levels=(2, 2), domain_sizes=(2, 1))
    ),
    "netmoe": lambda: [test_netmoe.compare_case(**test_netmoe.CASES["tp2-ep2-etp2-shared"])[0]],
}  # fmt: skip


def run_case(name: str, library: Path, seed: int, queues: Queues) -> float:
    """The worst error on this rank."""
    with software_streams(library, seed, queues) as runner:
        worst = max(CASES[name]())
    assert runner.runs > 1, f"{name} ran no schedule"
    return worst


@pytest.mark.parametrize("name", CASES)
def test_equals_stock_whatever_the_device_does_first(ranks, library, name):
    for seed, queues in WAYS:
        worst = ranks.run(run_case, name=name, library=library, seed=seed, queues=queues)
        assert max(worst) < 1e-6, worst
