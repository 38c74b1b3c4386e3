"""Ranks on GPUs where there are none, or fewer than ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.runtime.job.gpu_of_rank import SHARED, take_gpu
from tests import conftest


def test_the_option_is_refused_without_gpus(monkeypatch):
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda name: name == "--gpus")
    monkeypatch.setattr(conftest, "_gpus", lambda: 0)
    with pytest.raises(pytest.UsageError, match="^--gpus: PyTorch finds no GPU here: leave it out, .*over Gloo$"):
        conftest.pytest_configure(config)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device", "host"), [(8, 3, 3, "0"), (2, 3, 1, "1"), (1, 3, 0, "3"), (1, 3, 0, None)]
)
def test_ranks_go_round_gpus_and_each_round_is_a_host_to_nccl(monkeypatch, gpus, local_rank, device, host):
    """None: they do not share; a rank that sees one GPU alone, of many, takes it and stays on its host."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    for name in (SHARED, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "")
        if host is None:
            monkeypatch.delenv(name)
    assert take_gpu() == torch.device("cuda", device) and taken == [torch.device("cuda", device)]
    found = os.environ.get("NCCL_HOSTID")
    assert found is None if host is None else found.endswith(f"-{host}")
