"""What `auto` finds out before the first turn of a `flex` whose ranks make a buffer together."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a

from megatron_moe_opt.integration.auto import stock_variants

LAYER = SimpleNamespace(
    config=SimpleNamespace(hidden_size=16, params_dtype=torch.bfloat16),
    token_dispatcher=SimpleNamespace(tp_ep_group=None),
)


@pytest.mark.parametrize("others", ["fail too", "wait"])
def test_a_rank_that_fails_alone_ends_the_run_where_others_wait_for_it(monkeypatch, others):
    """They are in a collective of the library's, and would wait for the timeout of their group."""
    store = dist.HashStore()
    if others == "fail too":
        store.set("starts/flex:deepep/0/1", "")

    def no_buffer(*_: object) -> None:
        raise AssertionError("no\n NVLink")

    monkeypatch.setattr(stock_variants, "_starts", itertools.count())
    monkeypatch.setattr(stock_variants, "ALIKE_S", 0.5)
    monkeypatch.setattr(stock_variants, "job_store", lambda: store)
    monkeypatch.setattr(fused_a2a, "get_buffer", no_buffer)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    if others == "fail too":
        assert stock_variants.failure_to_start("flex:deepep", [LAYER]) == "AssertionError: no NVLink"
    else:
        said = r"auto cannot try flex:deepep on this rank \(AssertionError: no NVLink\), for which others wait"
        with pytest.raises(RuntimeError, match=said):
            stock_variants.failure_to_start("flex:deepep", [LAYER])
