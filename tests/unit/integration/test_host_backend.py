"""Switching the host backend on, and the parts of it that need no ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration import patching
from megatron_moe_opt.integration.host import devices, gloo
from megatron_moe_opt.integration.host.attention import zigzag_positions
from megatron_moe_opt.integration.host.limits import LIMITS, check_host_arguments

PAGE = Path(__file__).parents[3] / "docs" / "feature-matrix.md"
USE = "from megatron_moe_opt.integration.host import use_host_backend; print(use_host_backend(), use_host_backend())"
MEGATRON = "import megatron.core.models.gpt, megatron.core.distributed, megatron.core.optimizer"
ALIASES = """
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.utils import is_te_min_version
print(mappings.dist_reduce_scatter_func is dist.reduce_scatter_tensor)
print(param_and_grad_buffer.dist_all_gather_func is dist.all_gather_into_tensor)
print(param_and_grad_buffer._coalescing_manager is dist._coalescing_manager)
print(is_te_min_version("0.1"), "megatron_moe_opt" in dist.reduce_scatter_tensor.__code__.co_filename)
"""
WITH_A_GPU = """
import torch, torch.distributed as dist
torch.cuda.is_available = lambda: True
def names():
    return [vars(owner).get(name) for owner in (torch, torch.cuda, torch.Tensor, dist) for name in dir(owner)]
before = names()
from megatron_moe_opt.integration.host import use_host_backend
print(use_host_backend(), all(a is b for a, b in zip(before, names(), strict=True)))
import sys
print("megatron.core" in sys.modules)
"""
WITHOUT_A_SEAM = """
import torch.distributed as dist
del dist._coalescing_manager
from megatron_moe_opt.integration.host import use_host_backend
try:
    use_host_backend()
except ValueError as error:
    print(str(error).replace(" ", "_"))
"""
CODES = {
    "before": f"{USE}\n{MEGATRON}\n{ALIASES}",
    "after": f"{MEGATRON}\n{USE}\n{ALIASES}",
    "with a gpu": WITH_A_GPU,
    "without a seam": WITHOUT_A_SEAM,
}
FORKS = """
import os, pathlib, runpy, sys
import torch  # once for all of them

for code in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    if os.fork() == 0:
        os.dup2(os.open(code.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY), 1)
        runpy.run_path(str(code))
        sys.exit()
    assert os.wait()[1] == 0, code
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, list[str]]:
    """What each of CODES has printed in a process of its own, since switching the backend on is for good."""
    folder: Path = tmp_path_factory.mktemp("codes")
    for name, code in CODES.items():
        (folder / f"{name}.py").write_text(code)
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return {name: (folder / f"{name}.txt").read_text().split() for name in CODES}


on_the_host = pytest.mark.skipif(torch.cuda.is_available(), reason="the host backend is for machines without a GPU")


@on_the_host
@pytest.mark.parametrize("when", ["before", "after"])
def test_switched_on_before_or_after_importing_megatron(printed, when):
    assert printed[when] == ["True"] * 5 + ["False", "True"]


def test_machine_with_a_gpu_is_left_alone(printed):
    assert printed["with a gpu"] == ["False", "True", "False"]


def test_seam_that_moved_is_refused_by_name(printed):
    (message,) = printed["without a seam"]
    assert message.startswith("megatron-moe-opt_adapts_torch.distributed._coalescing_manager,_which_this_version")
    assert "megatron-core_0.16_to_0.20" in message


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_cuda_devices_are_the_cpu(device):
    assert devices.host_device(device) == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("meta"), torch.float32], ids=str)
def test_other_devices_stay(device):
    assert devices.host_device(device) is device


def test_events_measure_milliseconds():
    start, end = devices.HostEvent(enable_timing=True), devices.HostEvent(enable_timing=True)
    start.record()
    sum(range(10_000))
    end.record()
    assert 0 < start.elapsed_time(end) < 1000
    assert devices.HostStream().record_event().query()


@on_the_host
def test_memory_that_nobody_counts_is_none():
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == torch.cuda.memory_allocated() == 0


@on_the_host
def test_loading_data_leaves_the_generator_of_dropout_alone():
    """Megatron loads data on one rank of a tensor-parallel group alone, and all of them must drop the same."""

    def orders() -> list[list[int]]:
        torch.manual_seed(7)
        before, data = torch.get_rng_state(), range(20)
        shuffled = DataLoader(data, batch_size=20, shuffle=True)
        sampled = DataLoader(data, batch_size=20, sampler=RandomSampler(data))
        in_batches = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 20, drop_last=False))
        found = [batch.tolist() for loader in (shuffled, shuffled, sampled, in_batches) for batch in loader]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    found = orders()
    assert orders() == found and len(set(map(tuple, found))) == 4
    given = torch.Generator()
    assert DataLoader(range(20), generator=given).generator is given


def test_zigzag_positions():
    # 8 tokens on 2 ranks: chunks 01 23 45 67; rank 0 holds the first and the last, rank 1 the two between.
    assert zigzag_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]


def test_replace_reaches_modules_that_hold_the_original():
    owner, holder = types.ModuleType("megatron.owner"), types.ModuleType("megatron.holder")
    owner.double = holder.twice = lambda x: 2 * x
    sys.modules[holder.__name__] = holder
    try:
        patching.replace(owner, "double", lambda original: lambda x: original(x) + 1)
        assert holder.twice is owner.double
        assert holder.twice(2) == 5
    finally:
        del sys.modules[holder.__name__]


def test_replace_refuses_a_name_that_is_not_there():
    with pytest.raises(ConfigurationError, match=r"adapts megatron\.gone\.double, which this version does not"):
        patching.replace(types.ModuleType("megatron.gone"), "double", lambda original: original)


def test_when_imported_adapts_later_and_once(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patching.when_imported("imported_later", lambda module: setattr(module, "value", module.value + 1))
    import imported_later

    assert imported_later.value == 2
    patching.when_imported("imported_later", lambda module: setattr(module, "value", 10))
    assert imported_later.value == 10
    del sys.modules["imported_later"]
    import imported_later

    assert imported_later.value == 1


def test_what_a_newer_torch_asks_of_gloo_is_passed_on():
    """2.14 says enable_reconfigure to every group; what it asks for goes before a device that groups share."""
    made = []

    class Gloo:
        _Options = types.SimpleNamespace
        create_default_device = create_device = staticmethod(lambda **_: "device")

        def __init__(self, *args, **kwargs):
            made.append((args[3:], kwargs))

    shared = gloo._share_device(Gloo)
    shared("store", 0, 1, timeout=5)
    shared("store", 0, 1, timeout=5, enable_reconfigure=False)
    shared("store", 0, 1, timeout=5, enable_reconfigure=True)
    assert [options[0]._timeout for options, _ in made[:2]] == [5, 5] and made[1][1] == {}
    assert made[2] == ((), {"timeout": 5, "enable_reconfigure": True})


HOST_RUNS = {
    "moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_latent_size": None, "recompute_modules": ["core_attn"],
    "multi_latent_attention": False, "async_save": False, "use_persistent_ckpt_worker": False,
    "cuda_graph_impl": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"moe_grouped_gemm": True},
            "--moe-grouped-gemm needs kernels of grouped GEMM, and there is no CUDA device here",
        ),
        ({"moe_permute_fusion": True}, "--moe-permute-fusion needs Transformer Engine"),
        ({"moe_latent_size": 16}, "--moe-latent-size needs Transformer Engine"),
        ({"recompute_modules": ["core_attn", "layernorm"]}, "--recompute-modules layernorm needs Transformer Engine"),
        ({"multi_latent_attention": True}, "--multi-latent-attention needs a GPU"),
        (
            {"async_save": True, "use_persistent_ckpt_worker": True},
            "--async-save with --use-persistent-ckpt-worker needs a GPU for its worker",
        ),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl needs CUDA"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_its_flag(given, sentence):
    # The last is of a version without any of them.
    for runs in (HOST_RUNS, HOST_RUNS | {"recompute_modules": None}, HOST_RUNS | {"async_save": True}, {}):
        check_host_arguments(types.SimpleNamespace(**runs))
    with pytest.raises(ConfigurationError, match=sentence):
        check_host_arguments(types.SimpleNamespace(**HOST_RUNS | given))


def test_the_page_lists_what_needs_a_gpu():
    (rows,) = re.findall(r"^\| refused \| for want of \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    cells = [row.strip("| ").replace("`", "").split(" | ") for row in rows.splitlines()]
    listed = {(flag, needs) for flags, needs in cells for flag in flags.split(", ")}
    assert listed == {(limit.flag, limit.needs) for limit in LIMITS}
