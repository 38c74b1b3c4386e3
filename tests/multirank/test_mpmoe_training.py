"""`mpmoe` inside Megatron's training loop: gradients that arrive once and complete, losses, and agreement of ranks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.dispatchers.partitioning import Partitions
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import World
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from megatron_moe_opt.schedules.schedule import OF_EXPERTS
from tests.multirank.test_auto import write_profile
from tests.multirank.test_mpmoe import OVERLAPPED
from tests.ranks.training import losses

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("layout", "settings", "options"),
    [
        ({"ep": 2}, {"overlap": True} | OVERLAPPED, {"memory_reuse": "none"}),
        (
            {"tp": 2, "ep": 2, "etp": 2},
            {"overlap": True, "distributed_optimizer": False},
            {"memory_reuse": "S2", "way": "hops"},
        ),
        ({"pp": 2, "ep": 2}, {"microbatches": 4} | OVERLAPPED, {"memory_reuse": "S3"}),
        ({"pp": 2, "ep": 2}, {"microbatches": 4} | OVERLAPPED | RECOMPUTED, {"memory_reuse": "S2", "way": "hops"}),
        ({"pp": 2, "ep": 2}, {"microbatches": 4}, {"chunks": 2}),
    ],
    ids=str,
)
def test_losses_are_stock(ranks, layout, settings, options):
    settings = {"layout": layout, "steps": 2} | settings
    stock = ranks.run(losses, dispatcher="alltoall", **settings)
    ours = ranks.run(losses, dispatcher="mpmoe", options=Options(partitions=3, **options), **settings)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=1e-5, atol=0)


def gradients_that_arrive(
    dispatcher: str,
    options: Options,
    grouped: bool,
    main_grads: torch.dtype = torch.float32,
    partitions: tuple[int, ...] = (),
) -> tuple[set[int], list[float], int]:
    """How often each expert weight gets a gradient in a backward pass, how far the gradients are from stock's, and how
    many came through autograd.

    With gradient accumulation fusion a weight's GEMM adds to main_grad itself, here in plain PyTorch. What comes
    through autograd all the same is added as Megatron's DDP adds it: not where a GEMM is said to have added already.

    Args:
        partitions: of each micro-batch, where they differ.
    """
    from megatron.core.tensor_parallel import layers

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.grouped_experts import use_grouped_experts
    from tests.ranks.megatron import moe_config, parallel

    def add(rows: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad += grad.T @ rows

    fused = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    stock = getattr(layers, "fused_weight_gradient_mlp_cuda", None), layers._grad_accum_fusion_available
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = fused, True
    arrived: Counter[str] = Counter()
    by_autograd = 0

    def taken(name: str, counts: bool, weight: torch.Tensor) -> None:
        nonlocal by_autograd
        if not weight.grad_added_to_main_grad:
            weight.main_grad += weight.grad
            by_autograd += counts
        weight.grad = None  # where GEMMs add to main_grad, nobody has written it
        arrived.update([name] * counts)

    found: list[dict[str, torch.Tensor]] = []
    try:
        with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
            if grouped:
                use_grouped_experts(patch)
            state = None
            for chosen in ("alltoall", dispatcher):
                megatron_moe_opt.register(options if found else None)
                layer = build_layer(moe_config(moe_token_dispatcher_type=chosen, gradient_accumulation_fusion=True))
                state = state or layer.state_dict()
                layer.load_state_dict(state)
                if found and partitions:
                    layer.token_dispatcher.dispatcher.partitioning = InTurn(partitions)
                weights = dict(layer.experts.named_parameters())
                for name, weight in weights.items():
                    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=main_grads), False
                    weight.register_post_accumulate_grad_hook(functools.partial(taken, name, bool(found)))
                torch.manual_seed(7 + dist.get_rank())
                for _ in range(2):  # micro-batches
                    layer(torch.randn(12, 2, 64))[0].square().sum().backward()
                found.append({name: weight.main_grad for name, weight in weights.items()})
    finally:
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = stock
        megatron_moe_opt.register()
    expected, ours = found
    assert arrived.keys() == expected.keys()
    errors = [((ours[n] - expected[n]).float().norm() / expected[n].float().norm()).item() for n in expected]
    return set(arrived.values()), errors, by_autograd


TRAVELLING = {"network_levels": (4,), "domain_sizes": (4,)}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("dispatcher", "options"),
    [
        *(("mpmoe", {"partitions": 4, "memory_reuse": strategy}) for strategy in STRATEGIES),
        ("expert-migration", TRAVELLING),
        ("mpmoe", {"partitions": 2, "way": "hops"} | TRAVELLING),
    ],
)
def test_fused_gradients_arrive_once_a_pass(ranks, dispatcher, options, grouped):
    options = Options(**options)
    run = ranks.run(gradients_that_arrive, dispatcher=dispatcher, options=options, grouped=grouped)
    for times, errors, by_autograd in run:
        assert times == {2}  # of two micro-batches
        assert max(errors) < 1e-6
        assert bool(by_autograd) == (options.domain_sizes is not None)  # others' experts have no main_grad


@pytest.mark.parametrize("strategy", ["none", "S3"])
def test_narrow_main_grads_are_rounded_once_a_pass(ranks, strategy):
    for partitions in (1, 4):
        options = Options(partitions=partitions, memory_reuse=strategy)
        given = {"dispatcher": "mpmoe", "options": options, "grouped": strategy == "none"}
        for times, errors, by_autograd in ranks.run(gradients_that_arrive, main_grads=torch.bfloat16, **given):
            assert times == {2} and max(errors) < 1e-2
            assert bool(by_autograd) == (partitions > 1)  # of several GEMMs a pass none adds to main_grad


class InTurn:
    """Chooses partitions of a pass as it is told, as a profile may for passes of more or fewer rows."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = iter(counts)

    def choose(self, rows: Callable[[], Sequence[int]]) -> Partitions:
        """Returns as many partitions as are next in turn."""
        return Partitions(next(self._counts), "none")

    def describe(self) -> str:
        """Returns what is said at start."""
        return "in turn"


@pytest.mark.parametrize("grouped", [False, True])
def test_narrow_main_grads_get_all_passes_of_a_step_whatever_their_partitions(ranks, grouped):
    """DDP adds nothing that autograd brings to a main_grad to which a GEMM has added in the same step."""
    given = {"dispatcher": "mpmoe", "options": Options(partitions=4), "grouped": grouped, "partitions": (1, 4)}
    for times, errors, _ in ranks.run(gradients_that_arrive, main_grads=torch.bfloat16, **given):
        assert times == {2} and max(errors) < 1e-2


def differing_counts() -> list[tuple[int, float]]:
    """Ranks with very different numbers of tokens, whose own numbers would make them choose differently."""
    import megatron_moe_opt
    from megatron_moe_opt.dispatchers.partitioning import Partitions
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.layers import route_to
    from tests.ranks.megatron import moe_config, parallel

    class ByRows:
        counts: list[int] = []

        def choose(self, rows: Any) -> Partitions:
            self.counts.append(2 + sum(rows()) % 5)
            return Partitions(self.counts[-1], "S2")

        def describe(self) -> str:
            return ""

    with parallel(tp=1, ep=2, etp=2):
        megatron_moe_opt.register()
        layer = build_layer(moe_config(moe_token_dispatcher_type="mpmoe"))
        route_to(layer, "hot", seed=3)
        layer.token_dispatcher.dispatcher.partitioning = partitioning = ByRows()
        finite = []
        for tokens in (1, 7, 2, 12, 3):
            hidden = torch.randn(tokens * (1 + 3 * dist.get_rank()), 1, 64, requires_grad=True)
            layer(hidden)[0].sum().backward()
            finite.append(bool(hidden.grad.isfinite().all()))
        return list(zip(partitioning.counts, finite, strict=True))


def test_ranks_agree_on_partitions_under_skewed_counts(ranks):
    """Each has another number of rows: a choice by it would leave ranks waiting for collectives that never come."""
    results = ranks.run(differing_counts)
    assert results == [results[0]] * 4
    assert all(finite for _, finite in results[0])
    assert len({count for count, _ in results[0]}) > 1


def held_after_a_pass(strategy: str, settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes that are still there when a step is over, on device and host."""
    import gc

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
    from tests.ranks.megatron import moe_config, parallel
    from tools.bench.live_memory import LiveTensors

    with parallel(ep=4):
        megatron_moe_opt.register(Options(partitions=3, memory_reuse=strategy))
        layer = build_layer(moe_config(moe_token_dispatcher_type="mpmoe", **settings))
        hidden = torch.randn(64, 2, 64)
        before = HOST_MEMORY.used  # by models of tests before that are still there
        gc.disable()  # nothing may be left to it
        try:
            with LiveTensors() as live:
                for backward in (True, False):
                    output = layer(hidden)[0]
                    if backward:
                        output.sum().backward()
                    del output
                layer.zero_grad()
                return live.held, HOST_MEMORY.used - before
        finally:
            gc.enable()
            megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("strategy", "settings"), [*((one, {}) for one in STRATEGIES), ("none", OVERLAPPED), ("S3", OVERLAPPED)]
)
def test_nothing_stays_behind(ranks, strategy, settings):
    """Nothing is left after a step, nor after a forward pass that is thrown away: what it saved is no cycle."""
    for device, host in ranks.run(held_after_a_pass, strategy=strategy, settings=settings):
        assert device < 20_000  # auxiliary losses that Megatron tracks; a partition's rows are 20 times as much
        assert host == 0


class ByRows:
    """Chooses partitions by rows as a profile does, of which more or fewer are better cut otherwise."""

    def __init__(self) -> None:
        self.chosen: list[int] = []

    def choose(self, rows: Callable[[], Sequence[int]]) -> Partitions:
        """Returns as many partitions as the first rank's rows say."""
        self.chosen.append(1 + rows()[0] % 7)
        return Partitions(self.chosen[-1], "none")

    def describe(self) -> str:
        """Returns what is said at start."""
        return "by rows"


def repeated(profile: Path, by: str) -> tuple[list[int], list[list[int]]]:
    """The numbers of partitions that are chosen in three optimizer steps of three micro-batches that are recomputed, by
    Megatron or by torch.utils.checkpoint; and those that all passes of each have. In the last gradients are cleared
    between forward and backward passes.
    """
    from torch.utils.checkpoint import checkpoint

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.optimizer_step import gradients_cleared
    from megatron_moe_opt.runtime.engine.recording import recording
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=4):
        torch.manual_seed(3 + dist.get_rank())
        megatron_moe_opt.register(Options(partitions=(2, 3), profile=profile))
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        settings = recompute if by == "Megatron" else {}
        layer = build_layer(moe_config(moe_token_dispatcher_type="mpmoe", **settings))
        run = layer if by == "Megatron" else functools.partial(checkpoint, layer, use_reentrant=by == "re-entrant")
        megatron_moe_opt.register()
        partitioning = layer.token_dispatcher.dispatcher.partitioning = ByRows()
        counts = []
        for sizes in ((2, 3, 5), (3, 2, 5), (2, 5, 3)):
            gradients_cleared()
            with recording() as timelines:
                batches = [torch.randn(16, size, 64, requires_grad=True) for size in sizes]
                outputs = [run(one)[0] for one in batches]
                if len(counts) == 2:
                    gradients_cleared()
                for output in outputs:
                    output.sum().backward()
            counts.append([sum(span.op.kind in OF_EXPERTS for span in one.spans) for one in timelines])
    return partitioning.chosen, counts


@pytest.mark.parametrize("by", ["Megatron", "re-entrant", "hooks"])
def test_passes_of_a_step_have_the_same_partitions_where_they_are_repeated(ranks, tmp_path, by):
    """Else experts draw other random numbers, and Transformer Engine takes scales of another call. The first step goes
    by its own first rows, each later one by those of the one before it.
    """
    profile = write_profile(tmp_path / "cluster.json", World((0, 0, 0, 0), ep=4), (4,))
    for chosen, counts in ranks.run(repeated, profile=profile, by=by):
        assert counts == [[count] * 9 for count in chosen]  # three forward passes, repetitions and backward passes
        assert len(chosen) == 3 and chosen[0] == chosen[1] != chosen[2]


def trained_later() -> str:
    """What is said of a tensor outside of the experts that takes part in them, once it is trained."""
    import megatron_moe_opt
    from megatron_moe_opt.errors import ConfigurationError
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=4):
        megatron_moe_opt.register(Options(partitions=2))
        layer = build_layer(moe_config(moe_token_dispatcher_type="mpmoe"))
        megatron_moe_opt.register()
        gate, rows = torch.ones(64), torch.randn(16, 2, 64, requires_grad=True)
        layer.experts.register_forward_hook(lambda _, inputs, outputs: (outputs[0] * gate, outputs[1]))
        layer(rows)[0].sum().backward()
        gate.requires_grad_()
        with pytest.raises(ConfigurationError) as caught:
            layer(rows)
    return str(caught.value)


@pytest.mark.host_only(reason="has an op fail, which ends an adversary's run")
def test_what_is_trained_in_experts_from_a_later_pass_on_is_refused_then(doomed_ranks):
    for said in doomed_ranks.run(trained_later):
        assert "a trained tensor of shape [64] takes part in the experts without being a parameter" in said
