"""Settings of the property tests; commands in this process; kernels of each instruction set; the stream executor in
software.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import megatron_moe_opt
from megatron_moe_opt.extension import load_extension
from tests.accelerator.executor_library import SoftwareExecutor, build
from tests.accelerator.makespans import LANES
from tests.unit.permute_cases import CPU_KERNELS

megatron_moe_opt.use_host_backend()  # before tests import Megatron, which then does without PyTorch's compiler

# What an example takes, or making it, says how busy the machine is and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs `moe-opt WORDS`, or another program of ours, as the first of `world` ranks: exit code, output, errors."""
    from megatron_moe_opt.cli import main

    def run(*words, world=1, commands=main.app, name="moe-opt"):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit) as end:
            main.main(commands, name)
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture(params=CPU_KERNELS)
def cpu_kernels(request) -> Iterator[str]:
    """Has the kernels of an instruction set run on this processor: of each that it has, in turn."""
    load_extension().select_cpu_kernels(request.param)
    yield request.param
    load_extension().select_cpu_kernels("best")


@pytest.fixture(scope="module")
def registered() -> None:
    """Makes our dispatchers valid in Megatron, without options."""
    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register()


@pytest.fixture(scope="session")
def executor_folder(tmp_path_factory) -> Path:
    """Where the stream executor is compiled."""
    return tmp_path_factory.mktemp("executor")


@pytest.fixture(scope="session")
def software_executor(executor_folder) -> SoftwareExecutor:
    """The stream executor on streams in software, with a lane for each that schedules have."""
    return SoftwareExecutor(build(executor_folder), len(LANES))
