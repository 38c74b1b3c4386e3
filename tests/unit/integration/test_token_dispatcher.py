"""What Megatron's methods hand on to a dispatcher of ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.integration.layer.token_dispatcher import PluggedTokenDispatcher
from tests.unit.config_cases import config

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize(("replays", "rows"), [(False, 6), (True, None)])
def test_rows_are_counted_where_a_replayed_routing_may_name_an_expert_twice(replays, rows):
    told = []
    plugged = PluggedTokenDispatcher.__new__(PluggedTokenDispatcher)  # without process groups
    plugged.config = config(moe_enable_routing_replay=replays)
    plugged.shared_experts, plugged._slots, plugged._overlaps = None, None, False
    plugged._routed_by = lambda: None  # Megatron's router
    plugged.dispatcher = SimpleNamespace(permute=lambda *_, **sizes: (told.append(sizes), None))
    plugged.dispatch_preprocess(torch.zeros(3, 1, 16), torch.ones(3, 4, dtype=torch.bool), torch.zeros(3, 4))
    assert told == [{"capacity": None, "num_rows": rows}]
