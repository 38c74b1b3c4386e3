"""Tests of several ranks with a device each, as `pytest tests/multirank --gpus` runs them on GPUs and NCCL.

    python -m pytest -p tests.emulator.plugin tests/multirank --gpus

is the long form. A tensor left on the host meets the device's here, and one given to NCCL is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.multirank import test_bench_layer
from tests.multirank.test_dispatchers import compare
from tests.multirank.test_mpmoe import worst_errors
from tests.multirank.test_parm import compare_replicated
from tests.ranks.dispatchers import options_of
from tests.ranks.pool import GPUS, RankPool

BOTH, EP4 = {"tp": 2, "ep": 2, "etp": 2}, {"ep": 4}


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GPUS, "1")
        pool = RankPool()
        yield pool
        pool.close()


def where_tensors_are() -> tuple[str, ...]:
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
    dist.all_reduce(counted := torch.arange(3).repeat(2, 1)[1])
    with pytest.raises(RuntimeError, match="(?i)nccl|no backend"):
        dist.all_reduce(torch.ones(1, device="cpu"))
    with pytest.raises(RuntimeError, match="(?i)device"):
        drawn + torch.ones(3, device="cpu")
    return str(drawn.device), str(counted.tolist()), dist.get_backend()


def test_what_a_test_makes_is_on_the_device_of_its_rank_and_nccl_takes_nothing_else(gpu_ranks):
    assert gpu_ranks.run(where_tensors_are) == [("cuda:0", "[0, 4, 8]", "nccl")] * 4


def drawn() -> torch.Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(1))


def test_numbers_are_those_of_the_host_and_results_come_back_to_it(gpu_ranks):
    for of_rank in gpu_ranks.run(drawn):
        assert of_rank.device.type == "cpu" and torch.equal(of_rank, drawn())


def errors_of(dispatcher: str, folder: object) -> list[float]:
    """Of a layer against stock, forward and backward."""
    if dispatcher == "parm":
        return list(compare_replicated("parm", BOTH, {}, None, "S2").values())
    if dispatcher == "mpmoe":
        return [error for error, _ in worst_errors(BOTH, {}, None, [(2, "S4")], steps=2).values()]
    layout = BOTH if dispatcher in ("monta", "deepspeed") else EP4
    options = None if dispatcher == "deepspeed" else options_of(dispatcher, folder)
    return list(compare(dispatcher, layout, {}, options=options)["errors"].values())


@pytest.mark.parametrize("dispatcher", ["monta", "deepspeed", "parm", "mpmoe", "expert-migration"])
def test_a_layer_equals_stock(gpu_ranks, tmp_path, dispatcher):
    for errors in gpu_ranks.run(errors_of, dispatcher=dispatcher, folder=tmp_path):
        assert max(errors) < 1e-6


def test_a_benchmark_of_layers_runs(gpu_ranks):
    settings = test_bench_layer._settings(dispatchers=("monta",))
    for report in gpu_ranks.run(test_bench_layer._run, settings=settings):
        assert all(result.gradient_difference < 5e-6 for result in report.results)
