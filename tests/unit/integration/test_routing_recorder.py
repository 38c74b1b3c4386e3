"""What routing is not recorded of; that it is recorded right, tests/multirank/test_expert_order.py shows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.observe.routing_recorder import (
    RoutingRecorder,
    _OfRank,
    _trace_of,
    check_recordable,
)

RECORDABLE = {
    "context_parallel_size": 1,
    "cuda_graph_impl": "none",
    "mtp_num_layers": None,
    "is_hybrid_model": False,
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
        ({"cuda_graph_impl": "transformer_engine"}, "--cuda-graph-impl: leave it out"),
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor: leave it out"),
        ({"mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer: leave it out"),
        ({"mtp_num_layers": 1, "is_hybrid_model": True}, "--mtp-num-layers in a hybrid model: leave it out"),
        ({"recompute_granularity": "full"}, "--recompute-granularity: leave it out"),
    ],
)
def test_what_cannot_be_recorded_is_refused(change, problem):
    check_recordable(SimpleNamespace(**RECORDABLE))
    with pytest.raises(ConfigurationError, match=f"^moe-opt trace record does not work with {problem}"):
        check_recordable(SimpleNamespace(**RECORDABLE | change))


def test_virtual_stages_are_put_in_the_models_order():
    """Each of two pipeline stages has two pieces of the model, and each layer here one expert of its own number."""

    def of_stage(stage: int, *layers: int) -> _OfRank:
        experts = np.array(layers, dtype=np.uint16).reshape(-1, 1, 1, 1)
        return _OfRank(0, stage, 0, layers, 16, False, [experts], [1])

    trace = _trace_of([of_stage(1, 3, 4, 7, 8), of_stage(0, 1, 2, 5, 6)], ())
    assert trace.layers.tolist() == trace.experts.ravel().tolist() == [*range(1, 9)]


def test_a_run_that_ends_before_it_was_recorded_says_so(tmp_path):
    sentence = "^--steps 2-3: the run ended after step 0, and nothing is written: choose steps within it$"
    with pytest.raises(ConfigurationError, match=sentence), RoutingRecorder(tmp_path / "a.npz", range(2, 4)):
        pass
    with pytest.raises(ZeroDivisionError), RoutingRecorder(tmp_path / "a.npz", range(2, 4)):
        raise ZeroDivisionError  # is not hidden
