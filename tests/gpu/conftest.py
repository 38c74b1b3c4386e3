"""The device of the GPU tests; without one every test in this folder is skipped, for one reason."""

from __future__ import annotations

import pytest
import torch

from megatron_moe_opt import kernels


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; on a machine that has one, run tools/gpu_check.sh")
    info = kernels.build_info()
    if info["backend"] != "cuda":
        pytest.fail("the extension was built for CPU only; rebuild it where nvcc is on PATH")
    yield torch.device("cuda")
    torch.cuda.synchronize()  # a fault belongs to the test that caused it
