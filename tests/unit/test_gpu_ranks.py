"""Ranks on GPUs where there are none, or fewer than ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.runtime.job.gpu_of_rank import take_gpu
from tests import conftest


def test_the_option_is_refused_without_gpus(monkeypatch):
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda name: name == "--gpus")
    monkeypatch.setattr(conftest, "_gpus", lambda: 0)
    with pytest.raises(pytest.UsageError, match="^--gpus: PyTorch finds no GPU here: leave it out, .*over Gloo$"):
        conftest.pytest_configure(config)


@pytest.mark.parametrize(("gpus", "local_rank", "device", "host"), [(8, 3, 3, False), (2, 3, 1, True), (1, 3, 0, True)])
def test_ranks_share_gpus_where_there_are_fewer_each_a_host_to_nccl(monkeypatch, gpus, local_rank, device, host):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, value in {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 4, "NCCL_HOSTID": ""}.items():
        monkeypatch.setenv(name, str(value))
    assert take_gpu() == torch.device("cuda", device) and taken == [torch.device("cuda", device)]
    assert os.environ["NCCL_HOSTID"].endswith(f"-{local_rank}" if host else "")
    assert bool(os.environ["NCCL_HOSTID"]) is host
