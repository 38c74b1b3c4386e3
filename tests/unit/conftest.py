"""Settings of the property tests; the stream executor in software."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.accelerator.executor_library import SoftwareExecutor, build
from tests.accelerator.makespans import LANES

# What an example takes, or making it, says how busy the machine is and nothing about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def executor_folder(tmp_path_factory) -> Path:
    """Where the stream executor is compiled."""
    return tmp_path_factory.mktemp("executor")


@pytest.fixture(scope="session")
def software_executor(executor_folder) -> SoftwareExecutor:
    """The stream executor on streams in software, with a lane for each that schedules have."""
    return SoftwareExecutor(build(executor_folder), len(LANES))
