"""Tests of several ranks with a device each, as `pytest tests/multirank --gpus` runs them on GPUs and NCCL.

    python -m pytest -p tests.emulator.plugin tests/multirank --gpus

is the long form. A tensor left on the host meets the device's here, and one given to NCCL is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.options import Options
from tests.multirank import test_bench_layer
from tests.multirank.test_dispatchers import RAGGED, compare
from tests.multirank.test_mpmoe import worst_errors
from tests.multirank.test_parm import compare_replicated
from tests.multirank.test_telemetry import model_step
from tests.ranks.dispatchers import options_of
from tests.ranks.layers import OWN_ROUTING, BesideStock, take_turns
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


def what_calls_do() -> dict[str, str]:
    """What is said of calls that are used wrongly, each in a group of its own."""

    def said(use: Callable[[dist.ProcessGroup, torch.Tensor, torch.Tensor], object]) -> str:
        group, own = dist.new_group(), torch.full((3,), float(dist.get_rank()))
        gathered = torch.zeros(3 * dist.get_world_size())
        try:
            return str(use(group, own, gathered))
        except RuntimeError as error:
            return str(error).partition("\nException raised")[0]

    def gather(group: dist.ProcessGroup, own: torch.Tensor, gathered: torch.Tensor) -> dist.Work:
        return dist.all_gather_into_tensor(gathered, own, group=group, async_op=True)

    def waited(group: dist.ProcessGroup, own: torch.Tensor, gathered: torch.Tensor) -> list[float]:
        works = [gather(group, own, gathered), dist.all_reduce(own, group=group, async_op=True)]
        works[1].wait()  # and, before that, for the first
        return [*gathered[::3].tolist(), own[0].item()]

    def used_in_turn(group: dist.ProcessGroup, own: torch.Tensor, gathered: torch.Tensor) -> float:
        gather(group, own, gathered)
        dist.all_reduce(gathered, group=group)
        return gathered[-1].item()

    def then(use: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[..., object]:
        def run(group: dist.ProcessGroup, own: torch.Tensor, gathered: torch.Tensor) -> object:
            work = gather(group, own, gathered)
            used = use(own, gathered)
            work.wait()
            return used

        return run

    def other(group: dist.ProcessGroup, own: torch.Tensor, gathered: torch.Tensor) -> object:
        return gather(group, own, gathered).wait() if dist.get_rank() else dist.all_reduce(own, group=group)

    return {
        "waited": said(waited),
        "used in turn": said(used_in_turn),
        "read early": said(then(lambda own, gathered: gathered.sum().item())),
        "written early": said(then(lambda own, gathered: gathered.zero_())),
        "changed": said(then(lambda own, gathered: own.add_(1))),
        "other": said(other),
    }


def test_calls_are_late_and_strict(gpu_ranks):
    for rank, said in enumerate(gpu_ranks.run(what_calls_do)):
        assert said["waited"] == "[0.0, 1.0, 2.0, 3.0, 6.0]" and said["used in turn"] == "12.0"
        assert "which nobody has written" in said["read early"]
        assert said["written early"] == "allgather_base: its output was written before it was over"
        assert said["changed"] == "allgather_base: what it sends was changed before it was over"
        first = 0 if rank else 1  # of those that do not agree with this rank
        for issuer in (first, rank):
            what = "allgather_base" if issuer else "allreduce"
            assert f"rank {issuer} issued {what} as call 0" in said["other"].replace("; that", f"; rank {rank}")


def errors_of(dispatcher: str, folder: object) -> list[float]:
    """Returns the errors of a layer against stock, forward and backward."""
    if dispatcher == "parm":
        return list(compare_replicated("parm", BOTH, {}, None, Options(parm_schedule="S2")).values())
    if dispatcher == "mpmoe":
        return [error for error, _ in worst_errors(BOTH, {}, None, [(2, "S4")], steps=2).values()]
    layout = BOTH if dispatcher in ("monta", "deepspeed") else EP4
    options = None if dispatcher == "deepspeed" else options_of(dispatcher, folder)
    return list(compare(dispatcher, layout, {}, options=options)["errors"].values())


@pytest.mark.parametrize("dispatcher", ["monta", "deepspeed", "parm", "mpmoe", "expert-migration"])
def test_a_layer_equals_stock(gpu_ranks, tmp_path, dispatcher):
    for errors in gpu_ranks.run(errors_of, dispatcher=dispatcher, folder=tmp_path):
        assert max(errors) < 1e-6


def errors_of_own_routing(numbers: tuple[int, ...]) -> list[dict[str, float]]:
    """Returns the errors of layers against stock where a hook has tokens go, in turn, to so many experts each."""
    from tests.ranks.megatron import parallel

    found = []
    with parallel(ep=4):
        beside = BesideStock(OWN_ROUTING)
        take_turns(beside.stock, numbers)
        for dispatcher, options in (("monta", {"monta_level": "O2", "chunks": 2}), ("parm", {}), ("mpmoe", {})):
            layer = beside.ours(dispatcher, Options(**options))
            take_turns(layer, numbers)
            found.append(beside.errors(beside.run(layer)))
    return found


@pytest.mark.skipif(not RAGGED, reason="this Megatron's stock takes top-k experts a token for granted")
@pytest.mark.parametrize("numbers", [(3, 2), (1, 2)], ids=["more", "fewer"])
def test_a_routing_of_ones_own_gives_tokens_more_or_fewer_experts(gpu_ranks, numbers):
    for found in gpu_ranks.run(errors_of_own_routing, numbers=numbers):
        assert max(max(errors.values()) for errors in found) < 1e-6


def test_telemetry_of_narrow_rows_gathers_what_is_on_the_device(gpu_ranks):
    for measured in gpu_ranks.run(model_step, dispatcher="mpmoe", settings={}, options={"wire": "fp8"}):
        assert all(values["dispatch error"] > 0 for values in measured["report"].values())


def never_wait_for(name: str) -> None:
    """Has nobody wait for calls of this name."""
    ctypes.CDLL(load_extension().__file__).emulator_never_wait_for(name.encode())


def layer_without_joins(folder: object) -> str:
    """What is said of a layer where `Exchange::join` (csrc/pipeline/exchange.cpp), the only one to issue an `alltoall`,
    does not wait for it.
    """
    never_wait_for("alltoall")
    try:
        errors_of("monta", folder)
    except RuntimeError as error:
        return str(error)
    finally:
        never_wait_for("")
    return "nothing"


def test_a_join_that_is_missing_is_found(gpu_ranks, tmp_path):
    for said in gpu_ranks.run(layer_without_joins, folder=tmp_path):
        assert "which nobody has written" in said


def test_a_benchmark_of_layers_runs(gpu_ranks):
    settings = test_bench_layer._settings(dispatchers=("monta",))
    for report in gpu_ranks.run(test_bench_layer._run, settings=settings):
        assert all(result.gradient_difference < 5e-6 for result in report.results)
