"""What routing is not recorded of; that it is recorded right, tests/multirank/test_expert_order.py shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.observe.routing_recorder import RoutingRecorder, check_recordable

RECORDABLE = {
    "context_parallel_size": 1,
    "moe_expert_capacity_factor": None,
    "recompute_granularity": None,
    "moe_token_dispatcher_type": "monta",
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"moe_token_dispatcher_type": "netmoe"}, "--moe-token-dispatcher-type netmoe, which moves samples: record"),
        ({"moe_token_dispatcher_type": "auto"}, "--moe-token-dispatcher-type auto, which measures with layers of its"),
        ({"context_parallel_size": 2}, "--context-parallel-size: leave it out"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor: leave it out"),
        ({"recompute_granularity": "full"}, "--recompute-granularity: leave it out"),
    ],
)
def test_what_cannot_be_recorded_is_refused(change, problem):
    check_recordable(SimpleNamespace(**RECORDABLE))
    with pytest.raises(ConfigurationError, match=f"^moe-opt trace record does not work with {problem}"):
        check_recordable(SimpleNamespace(**RECORDABLE | change))


def test_a_run_that_ends_before_it_was_recorded_says_so(tmp_path):
    sentence = "^--steps 2-3: the run ended after step 0, and nothing is written: choose steps within it$"
    with pytest.raises(ConfigurationError, match=sentence), RoutingRecorder(tmp_path / "a.npz", range(2, 4)):
        pass
    with pytest.raises(ZeroDivisionError), RoutingRecorder(tmp_path / "a.npz", range(2, 4)):
        raise ZeroDivisionError  # is not hidden
