"""The device of the GPU tests, alone or as a process group: a GPU, or with `-p tests.emulator.plugin` the emulator.

Without either every test here is skipped, for one reason.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.extension import build_info
from tests.gpu import EMULATED

SAMPLED_OF = 5  # cases, one


def pytest_collection_modifyitems(config, items):
    """Takes a sample of the tests with many cases on the emulator; all of them where MOE_OPT_EMULATOR_LONG is set."""
    if not EMULATED or os.environ.get("MOE_OPT_EMULATOR_LONG"):
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    cases = Counter(item.originalname for item in here)
    left_out = {
        item for item in here if cases[item.originalname] > 6 and zlib.crc32(item.nodeid.encode()) % SAMPLED_OF != 0
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip(
            "no CUDA device: pass -p tests.emulator.plugin, or run tools/gpu_check.sh on a machine that has one"
        )
    info = build_info()
    if info["backend"] != "cuda":
        pytest.fail("the extension was built for CPU only; rebuild it where nvcc is on PATH")
    yield torch.device("cuda")
    torch.cuda.synchronize()  # a fault belongs to the test that caused it


@pytest.fixture
def races_allowed():
    """Allows races in a test whose input makes threads of a kernel race, which the kernel is made to bear."""
    if not EMULATED:
        yield
        return
    from tests.emulator.plugin import switches

    switches.emulator_allow_races(True)
    yield
    switches.emulator_allow_races(False)


@pytest.fixture
def one_rank(device, tmp_path):
    """A process group of one rank over NCCL, with our dispatchers registered."""
    if EMULATED:
        pytest.skip("a layer of Megatron-Core needs a GPU's random numbers and NCCL")
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    import megatron_moe_opt

    megatron_moe_opt.register()
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield device
    if started:
        from megatron.core import parallel_state

        from tests.ranks import megatron

        parallel_state.destroy_model_parallel()
        megatron._layouts.clear()  # its groups are gone
        dist.destroy_process_group()
