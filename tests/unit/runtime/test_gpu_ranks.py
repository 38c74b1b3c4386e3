"""Ranks on GPUs where there are none, or fewer than ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.gpu_settings import SHARED
from megatron_moe_opt.runtime.job.gpu_of_rank import take_gpu
from tests import conftest


def test_the_option_is_refused_without_gpus(monkeypatch):
    config = SimpleNamespace(addinivalue_line=lambda *_: None, getoption=lambda name: name == "--gpus")
    monkeypatch.setattr(conftest, "_gpus", lambda: 0)
    with pytest.raises(pytest.UsageError, match="^--gpus: PyTorch finds no GPU here: leave it out, .*over Gloo$"):
        conftest.pytest_configure(config)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "device", "host"),
    [(8, 3, 3, "0"), (2, 3, 1, "1"), (1, 3, 0, "3"), (1, 3, 0, None), (4, 3, 3, None)],
)
def test_ranks_go_round_gpus_and_each_round_is_a_host_to_nccl(monkeypatch, gpus, local_rank, device, host):
    """None: they do not share. A rank that sees one of many GPUs takes it."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.setenv(SHARED, "0" if host is None else "1")
    assert take_gpu() == torch.device("cuda", device) and taken == [torch.device("cuda", device)]
    assert os.environ["NCCL_HOSTID"].endswith("" if host is None else f"-{host}")
    assert (os.environ["NCCL_HOSTID"] == "") is (host is None)


@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_ranks_than_gpus_are_refused_on_all(monkeypatch, local_rank):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv(SHARED, "0")
    with pytest.raises(ConfigurationError, match="^4 ranks were started on this node, which has 2 GPUs: start as many"):
        take_gpu()
