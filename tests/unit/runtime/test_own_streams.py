"""Streams of the package are its own: those of PyTorch's pool are shared with NCCL's groups and with Megatron."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.streams import own_stream

ROOT = Path(__file__).resolve().parents[3]


def test_a_stream_of_our_own_is_a_new_one_of_cuda(monkeypatch):
    made = iter((101, 102))
    monkeypatch.setattr(load_extension(), "new_cuda_stream", lambda _: next(made), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, _: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: pytest.fail("PyTorch's pool was asked"))
    assert [own_stream(torch.device("cuda", 0)) for _ in range(2)] == [101, 102]


def test_nothing_else_asks_for_streams():
    """Lanes take new_cuda_stream's in C++ too (csrc/pipeline/cuda_streams.cpp)."""
    found = []
    for folder, pattern in (("megatron_moe_opt", r"\bcuda\.Stream\("), ("csrc", "getStreamFromPool")):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h", ".cu", ".cuh"):
                found += [f"{file.relative_to(ROOT)}: {one}" for one in re.findall(pattern, file.read_text())]
    assert found == ["megatron_moe_opt/kernels/streams.py: cuda.Stream("]  # for devices in software
