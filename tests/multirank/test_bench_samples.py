"""`python -m tools.bench.samples` on 4 ranks, ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.cluster import World
from megatron_moe_opt.topology.nodes import discover_nodes
from tests.multirank.test_auto import FasterWithMoves, write_profile
from tests.ranks.devices import rank_device
from tests.unit.trace_cases import random_trace, trace_of
from tools.bench.samples import SampleSettings, check


def settings(**changes: Any) -> SampleSettings:
    dispatchers = "monta", "netmoe", "netmoe:O3x4", "netmoe:hopsx2"
    fields = {"trace": Path("trace.npz"), "dispatchers": dispatchers, "hidden": 32, "tokens": None}
    return SampleSettings(**fields | {"dtype": "fp32", "steps": 2, "warmup": 2} | changes)


def tasteful_trace():
    """Each sample uses the experts of one node only, in all 3 layers; half of the samples are at home on the other."""
    node_of_sample = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    chosen = np.empty((4, 3, 8, 16, 2), int)
    generator = np.random.default_rng(0)
    for place in np.ndindex(4, 3, 8, 16):
        chosen[place] = 4 * node_of_sample[place[2]] + generator.permutation(4)[:2]
    return trace_of(chosen, 8)


@contextmanager
def two_nodes() -> Iterator[None]:
    from megatron_moe_opt.integration.layer import linked_blocks

    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    linked_blocks._holders.cache_clear()
    try:
        yield
    finally:
        del os.environ["GROUP_RANK"]
        linked_blocks._holders.cache_clear()


def bench(tokens: int | None, dtype: str) -> Any:
    import megatron_moe_opt
    from tools.bench import samples

    megatron_moe_opt.register()
    given = settings(tokens=tokens, dtype=dtype)
    with two_nodes():
        decided = samples._decided_share(given, tasteful_trace(), discover_nodes())
        return samples.run(given, tasteful_trace(), rank_device()), decided


@pytest.mark.parametrize(("tokens", "dtype"), [(None, "fp32"), (5, "bf16")])
def test_samples_that_each_use_one_node_cross_nodes_twice_only(ranks, tokens, dtype):
    for (stock, monta, netmoe, chunks, hops), decided in ranks.run(bench, tokens=tokens, dtype=dtype):
        assert decided == pytest.approx(2 / 3)  # of 3 dispatches and 3 combines that are alike
        assert [result.dispatcher for result in (stock, monta, netmoe, chunks, hops)] == [
            "alltoall",
            *settings().dispatchers,
        ]
        assert all(
            len(result.seconds) == 2 and min(result.seconds) > 0 for result in (stock, monta, netmoe, chunks, hops)
        )
        assert monta.moves == {} and set(netmoe.moves) == {1, 2, 3}
        # The first dispatch and the last combine cross nodes; the two combines and dispatches between do not.
        rows = 4 * 2 * (tokens or 16)  # of the 4 samples whose experts are on the other node
        hidden_bytes = 32 * (4 if dtype == "fp32" else 2)
        # Forward and backward, with lanes of 16 bytes but for the gradients on the combine's way.
        assert netmoe.megabytes("inter-node") * 1e6 == pytest.approx(rows * (4 * hidden_bytes + 3 * 16))
        assert chunks.megabytes("inter-node") == netmoe.megabytes("inter-node")
        # Both experts of a token are on one node. A token's facts take 32 bytes, the gradients of its probabilities 16.
        assert hops.megabytes("inter-node") * 1e6 == pytest.approx(rows / 2 * (4 * hidden_bytes + 32 + 16 + 16))
        assert netmoe.megabytes("inter-node") < 0.4 * monta.megabytes("inter-node")
        assert [netmoe.moves[layer]["moved across nodes %"] for layer in (1, 2, 3)] == [50, 0, 50]


def bench_auto(profile: Path) -> Any:
    from megatron_moe_opt.integration.auto.controller import Controller
    from megatron_moe_opt.planning.choosing import trials
    from tools.bench import samples

    given = settings(dispatchers=("auto",), ffn_hidden=32, profile=str(profile))
    with two_nodes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "TURN", 2)
        patch.setattr(Controller, "_largest", lambda controller, _: FasterWithMoves()[controller.layers.current])
        return samples.run(given, tasteful_trace(), rank_device())


def test_auto_sees_that_samples_prefer_nodes_and_tries_to_move_them(ranks, tmp_path):
    profile = write_profile(tmp_path / "cluster.json", World((0, 0, 1, 1), ep=4), (2, 2))
    for stock, auto in ranks.run(bench_auto, profile=profile):
        assert auto.dispatcher.startswith("auto, netmoe")
        assert auto.megabytes("inter-node") < 0.5 * stock.megabytes("inter-node")


def test_what_does_not_fit_is_refused():
    trace = random_trace()
    check(settings(), trace, 4)
    with pytest.raises(ConfigurationError, match="--dispatchers mota is unknown: choose from alltoall, monta"):
        check(settings(dispatchers=("mota",)), trace, 4)
    with pytest.raises(ConfigurationError, match="--dispatchers auto plans whole layers: give --profile and --ffn"):
        check(settings(dispatchers=("auto",), ffn_hidden=32), trace, 4)
    with pytest.raises(ConfigurationError, match="has 8 samples, which 3 ranks cannot share equally"):
        check(settings(), trace, 3)
    with pytest.raises(ConfigurationError, match="--tokens 17: the samples of trace.npz have 16"):
        check(settings(tokens=17), trace, 4)
