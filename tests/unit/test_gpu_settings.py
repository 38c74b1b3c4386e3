"""The environment variables that a profile's times depend on."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_moe_opt.dispatchers import say
from megatron_moe_opt.gpu_settings import gpu_settings, needless_queue, other_settings, too_few_queues
from megatron_moe_opt.integration import announce
from megatron_moe_opt.options import Options


def environment(**variables):
    """This process's environment inside the block."""
    return mock.patch.dict(os.environ, variables, clear=True)


RING = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "x", "PATH": "/bin"}


def test_what_is_recorded():
    with environment(**RING):
        assert gpu_settings() == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    with environment():
        assert gpu_settings() == {}


@environment(**RING)
def test_differences_are_named():
    assert other_settings("f.json", None) is None
    assert other_settings("f.json", gpu_settings()) is None
    measured = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_NVLS_ENABLE": "0"}
    assert other_settings("f.json", measured) == (
        "f.json was measured with other settings, and its times may not hold: CUDA_DEVICE_MAX_CONNECTIONS 1 (there "
        "32), NCCL_ALGO Ring (there not set), NCCL_NVLS_ENABLE not set (there 0); set these, or measure again"
    )


def of_queues(number):
    return {} if number is None else {"CUDA_DEVICE_MAX_CONNECTIONS": number}


@pytest.mark.parametrize(
    ("queues", "tp", "cp", "capability", "says"),
    [
        ("1", 1, 1, 9, "with tensor parallelism 1 and context parallelism 1"),
        ("1", 2, 1, 10, "with this GPU"),
        ("1", 2, 1, 9, None),  # Megatron refuses anything else
        ("1", 1, 2, 8, None),
        ("32", 1, 1, 9, None),
        (None, 1, 1, 9, None),
    ],
)
def test_a_queue_that_nobody_needs_is_named(queues, tp, cp, capability, says):
    with environment(**of_queues(queues)):
        line = needless_queue(tp, cp, capability)
    assert line is None if says is None else says in line and line.endswith("set it to 32")


@pytest.mark.parametrize(
    ("queues", "streams", "says"),
    [
        ("4", 6, "is 4, and MoE layers use 6 streams"),
        ("8", 8, None),
        (None, 8, None),
        (None, 9, "is not set, which means 8, and MoE layers use 9 streams"),
        ("1", 9, None),  # Megatron's wish, or named above
        ("4", 0, None),
    ],
)
def test_queues_that_streams_share_are_named(queues, streams, says):
    with environment(**of_queues(queues)):
        line = too_few_queues(streams)
    assert line is None if says is None else says in line and line.endswith("set it to 32")


def test_the_second_pass_says_once_what_too_few_queues_cost(monkeypatch, capsys):
    layers = [torch.nn.Identity() for _ in range(2)]
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setattr(announce, "streams_in_use", lambda: 6)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    for number, layer in enumerate(layers, start=1):
        announced(layer, number)
    printed = []
    for _ in range(3):
        for layer in layers:
            layer(torch.zeros(1))
        printed.append(capsys.readouterr().out)
    assert "MoE layers 1, 2: dispatcher monta" in printed[0] and "MAX_CONNECTIONS" not in printed[0]
    assert printed[1].startswith("moe-opt: monta: CUDA_DEVICE_MAX_CONNECTIONS is 4") and printed[1].count("\n") == 1
    assert not printed[2]


def test_runs_say_once_what_differs_and_only_on_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(say, "_said", set())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    say.say_other_settings("auto", "f.json", {})
    assert not capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):
        say.say_other_settings("auto", "f.json", {})
    assert capsys.readouterr().out.count("f.json was measured with other settings") == 1


def announced(layer: torch.nn.Module, number: int) -> None:
    """Has a stand-in for a MoE layer say what it runs."""
    layer.layer_number = number
    layer.config = SimpleNamespace(tensor_model_parallel_size=1, context_parallel_size=1, params_dtype=torch.float32)
    dispatcher = SimpleNamespace(groups=SimpleNamespace(ep_size=2, etp_size=1), describe=lambda: "it")
    layer.dispatcher = dispatcher
    announce.announce(layer, "monta", dispatcher, Options())


def test_the_first_pass_says_what_one_queue_costs(monkeypatch, capsys):
    layer = torch.nn.Identity()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for available, number in ((False, 0), (True, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        announced(layer, 1)
        layer(torch.zeros(1)), layer(torch.zeros(1))
        said = capsys.readouterr().out
        assert said.count("dispatcher monta") == 1 and said.count("CUDA_DEVICE_MAX_CONNECTIONS is 1") == number


def test_the_first_pass_says_what_blocking_waits_cost(monkeypatch, capsys):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for available, value, number in ((True, "True", 1), (True, "0", 0), (False, "1", 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
        assert gpu_settings()["TORCH_NCCL_BLOCKING_WAIT"] == value
        layers = [torch.nn.Identity() for _ in range(2)]
        for layer in layers:
            announced(layer, 1)
        for layer in layers:
            layer(torch.zeros(1))
        said = capsys.readouterr().out
        assert said.count(f"moe-opt: TORCH_NCCL_BLOCKING_WAIT is {value}: the host waits") == number


def test_a_profile_of_another_layer_is_named(monkeypatch, capsys):
    """Its times are those of other rows and experts, ranks or versions; what it does not say is not compared."""
    from dataclasses import replace

    from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
    from tests.unit.planning.test_cluster_file import CLUSTER

    monkeypatch.setattr(say, "_said", set())
    cluster = replace(CLUSTER, warnings=())
    measured = cluster.measured_with()
    monkeypatch.setattr(say.dist, "get_world_size", lambda: measured["ranks"])
    monkeypatch.setattr(say, "software", lambda: dict(cluster.software))
    gemm, etp = cluster.expert_gemm, cluster.world.expert_tp
    size = {"fp32": 4, "bf16": 2}[gemm.dtype]
    layer = LayerWorkload(0, gemm.hidden, gemm.ffn_hidden, False, 8, 2, size, 16, cluster.world.ep, etp)
    say.say_other_run("f.json", cluster, layer)
    assert not capsys.readouterr().out
    for _ in range(2):
        say.say_other_run("f.json", cluster, replace(layer, hidden=2 * gemm.hidden))
    assert capsys.readouterr().out == (
        f"moe-opt: profile: f.json was measured for another run, and its times may not hold: hidden size of a row "
        f"{2 * gemm.hidden} (there {gemm.hidden}); measure again with moe-opt profile\n"
    )
    monkeypatch.setattr(say, "software", lambda: {"torch": "99"})
    say.say_other_run("f.json", replace(cluster, expert_gemm=None), layer)
    assert f"may not hold: torch 99 (there {cluster.software['torch']});" in capsys.readouterr().out
