"""Shared experts that overlap run as ops of `mpmoe`'s pipeline, forward and backward, and give what stock's give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe_opt.options import Options
from megatron_moe_opt.schedules.schedule import Kind, Lane
from tests.multirank.test_checkpoint import checkpointed
from tests.multirank.test_dispatchers import LAYOUTS, PAD, RECOMPUTE
from tests.multirank.test_mpmoe import OVERLAPPED
from tests.ranks.devices import difference
from tests.ranks.layers import BesideStock

PARTITIONS = 3
FORWARD, BACKWARD = (Kind.SHARED, Kind.SHARED), (Kind.SHARED_GRADIENT, Kind.SHARED_GRADIENT)


def ends(timelines: list[Any]) -> list[tuple[Kind, Kind]]:
    """Returns what ran first and last in the experts' lane, of each schedule that has them."""
    of_schedules = ([span.op.kind for span in one.lane(Lane.COMPUTE)] for one in timelines)
    return [(kinds[0], kinds[-1]) for kinds in of_schedules if kinds]


def beside_stock(layout: dict[str, int], settings: dict[str, Any], options: dict[str, Any]) -> Any:
    """Returns the largest error of a result of two passes under way at once, and what ran at the ends of pipelines."""
    from megatron_moe_opt.runtime.engine.recording import recording
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        beside = BesideStock(OVERLAPPED | settings, steps=2, together=True)
        layer = beside.ours("mpmoe", Options(partitions=PARTITIONS, **options))
        with recording() as timelines:
            found = beside.run(layer)
        assert any("shared_experts.gate_weight" in name for name in found)
        return max(beside.errors(found).values()), ends(timelines)


@pytest.mark.parametrize(
    ("layout", "settings", "options"),
    [
        ("ep4", {}, {}),
        ("ep4", PAD, {"memory_reuse": "S3"}),
        ("tp2-ep2-etp2", {}, {"memory_reuse": "S1"}),
        ("tp2-ep2-etp2", RECOMPUTE, {}),
    ],
    ids=str,
)
def test_results_are_stocks(ranks, layout, settings, options):
    arguments = {"layout": LAYOUTS[layout], "settings": settings, "options": options}
    repeated = [FORWARD, BACKWARD] if settings is RECOMPUTE else [BACKWARD]
    for error, ran in ranks.run(beside_stock, **arguments):
        assert error < 1e-6 and ran == [FORWARD] * 2 + repeated * 2


def with_saved_tensors_hooked() -> Any:
    from megatron_moe_opt.runtime.engine.recording import recording
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        beside = BesideStock(OVERLAPPED)
        layer = beside.ours("mpmoe", Options(partitions=PARTITIONS))
        checkpointed(layer)
        with recording() as timelines:
            found = beside.run(layer)
        return max(beside.errors(found).values()), ends(timelines)


@pytest.mark.host_only(
    reason="Megatron's own halves, repeated by the checkpoint, lack waits between streams, in stock too"
)
def test_they_run_before_and_after_where_saved_tensors_are_hooked(ranks):
    for error, ran in ranks.run(with_saved_tensors_hooked):
        assert error < 1e-6 and ran == [(Kind.COMPUTE, Kind.COMPUTE)] * 2 + [(Kind.GRADIENT, Kind.GRADIENT)]


def several_times_in_a_graph(field: str, value: Any) -> Any:
    from megatron_moe_opt.runtime.engine.recording import recording
    from tests.ranks.megatron import parallel

    class Several(BesideStock):
        """Layers of a configuration by which Megatron has a graph call each several times."""

        def _built(self, config: Any) -> Any:
            setattr(config, field, value)
            return super()._built(config)

    with parallel(ep=4):
        beside = Several(OVERLAPPED)
        layer = beside.ours("mpmoe", Options(partitions=PARTITIONS))
        with recording() as timelines:
            found = beside.run(layer)
        return max(beside.errors(found).values()), ends(timelines)


@pytest.mark.parametrize("setting", [("mtp_use_repeated_layer", True), ("mlp_chunks_for_training", 2)], ids=str)
def test_they_run_before_and_after_where_a_graph_has_a_layer_several_times(ranks, setting):
    """DDP counts how often each of their parameters gets a gradient, and stock's graph gives one."""
    for error, ran in ranks.run(several_times_in_a_graph, field=setting[0], value=setting[1]):
        assert error < 1e-6 and ran == [(Kind.COMPUTE, Kind.COMPUTE), (Kind.GRADIENT, Kind.GRADIENT)]


def trained_alone(trains: bool) -> list[float]:
    """Returns the errors of the output and of the gradients of shared experts where nothing else is trained, not even
    what comes before the layer.
    """
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        beside = BesideStock(OVERLAPPED)
        results = []
        for layer in (beside.stock, beside.ours("mpmoe", Options(partitions=PARTITIONS))):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_("shared_experts.linear" in name)
            tokens = torch.randn(12, 3, layer.config.hidden_size, generator=torch.Generator().manual_seed(1))
            with torch.set_grad_enabled(trains):
                output, _ = layer(tokens)
            if trains:
                output.square().sum().backward()
            gradients = [one.grad for one in layer.shared_experts.parameters() if one.grad is not None]
            results.append([output.detach(), *gradients])
        expected, found = results
        assert len(found) == len(expected) == (3 if trains else 1)
        return [difference(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize("trains", [True, False])
def test_they_may_be_all_that_is_trained(ranks, trains):
    for errors in ranks.run(trained_alone, trains=trains):
        assert max(errors) < 1e-6


def some_gradients_alone() -> bool:
    """Asks for the gradient of a layer's input and of nothing else; returns whether a frozen layer has a graph."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        layer = BesideStock(OVERLAPPED).ours("mpmoe", Options(partitions=PARTITIONS))
        tokens = torch.randn(12, 3, layer.config.hidden_size)
        needed = tokens.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="gradients of some tensors alone"):
            torch.autograd.grad(layer(needed)[0].sum(), needed)
        assert all(one.grad is None for one in layer.parameters())
        layer.requires_grad_(False)
        return layer(tokens)[0].requires_grad


def test_some_gradients_alone_are_refused_and_what_is_frozen_has_no_graph(ranks):
    """The shared experts' would be added to what others have, as in Megatron's recomputation, which refuses it too."""
    assert ranks.run(some_gradients_alone) == [False] * 4
