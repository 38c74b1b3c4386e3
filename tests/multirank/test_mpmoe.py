"""`mpmoe` against stock `alltoall` in the same process group, for every number of partitions and every strategy.

Outputs and gradients of rows are stock's up to the order in which matrix products add; gradients of weights are sums
over partitions. All are held to the numerics contract.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from tests.multirank.test_dispatchers import DROP, LAYOUTS, PAD, RAGGED, RECOMPUTE, SHARED
from tests.multirank.test_parm import FORCED, GATED, JITTER, PER_TOKEN, SINKHORN, Z_LOSS, compare_replicated
from tests.ranks.devices import difference
from tests.ranks.layers import BATCH, SEQUENCE, BesideStock, run_layer

COUNTS = (2, 3, 8)
ALL = [(1, "S1"), *((count, strategy) for count in COUNTS for strategy in STRATEGIES)]
"""All variants; in one partition all strategies are the same."""
SOME = [(1, "S1"), (3, "none"), (4, "S2"), (3, "S3"), (8, "S4")]
OVERLAPPED = SHARED | {"moe_shared_expert_overlap": True, "moe_shared_expert_gate": True}
GATED_GELU = {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}


def worst_errors(
    layout: dict[str, int],
    settings: dict[str, Any],
    routing: str | None,
    variants: list[tuple[int, str]],
    dtype: str = "float32",
    steps: int = 1,
    delay: bool = False,
    silent: tuple[int, ...] = (),
    levels: tuple[int, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
    way: str | None = None,
    widened: bool = False,
    chunks: int | None = None,
) -> dict[tuple[int, str], tuple[float, str]]:
    """Returns, for each variant, the largest relative error of a result (norm of the difference over the norm), and its
    name.

    `widened`: its experts return float32, whatever they are given.

    With `levels` tokens hop over them, and experts travel in domains of these `sizes`; without, rows go the `way`, a
    partition in so many `chunks`.
    """
    from tests.ranks.megatron import parallel

    is_silent = dist.get_rank() in silent
    capacity = "moe_expert_capacity_factor"
    # Since Megatron 0.17 stock counts the rows that it sends only where some may be dropped. None of 8 experts' is.
    counts = {capacity: 8.0} if silent else {}
    with parallel(**layout):
        sequence = 1 if silent else SEQUENCE
        beside = BesideStock(settings | counts, routing, dtype, steps, together=True, sequence=sequence)
        if is_silent:
            route_nothing(beside.stock)
        worst = {}
        for count, strategy in variants:
            by = {"way": way, "chunks": chunks}
            if levels is not None:
                by = {"way": "hops", "network_levels": levels, "domain_sizes": sizes}
            options = Options(partitions=count, memory_reuse=strategy, **by)
            layer = beside.ours("mpmoe", options, **{capacity: settings.get(capacity)})
            if is_silent:
                route_nothing(layer)
            if widened:
                layer.experts.register_forward_hook(lambda *called: (called[2][0].float(), called[2][1]))
            with slow_copies(delay):
                found = beside.run(layer)
                evaluated = beside.evaluated(layer) if routing is None else found["output 0"]  # each pass draws another
            errors = beside.errors(found) | {"evaluated": difference(evaluated, found["output 0"])}
            worst[count, strategy] = max((error, name) for name, error in errors.items())
    return worst


def route_nothing(layer: Any) -> None:
    """Has no token of this rank get an expert, whatever the layer was told before."""
    stock = layer.router.forward

    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores, routing_map = stock(*inputs)
        return scores * 0, torch.zeros_like(routing_map)

    layer.router.forward = forward


class slow_copies:
    """Lets every other copy to or from the host, and every other sort of rows, come late: whoever does not wait for it
    then takes what is not there yet, or overwrites what is still read."""

    def __init__(self, delay: bool) -> None:
        self.delay, self.turn = delay, 0

    def __enter__(self) -> None:
        from megatron_moe_opt.runtime.engine import offload
        from megatron_moe_opt.runtime.through_experts import expert_pipeline
        from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall

        self.places = [
            (offload.OffloadedTensor, "__init__"),
            (offload.OffloadedTensor, "to_device"),
            (ExpertCall, "forward"),
            (expert_pipeline.steps, "run_now"),
        ]
        self.stock = [getattr(*place) for place in self.places]
        if self.delay:
            for (owner, name), stock in zip(self.places, self.stock, strict=True):
                setattr(owner, name, self.late(stock))

    def __exit__(self, *exception: Any) -> None:
        for (owner, name), stock in zip(self.places, self.stock, strict=True):
            setattr(owner, name, stock)

    def late(self, stock: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.turn += 1
            if self.turn % 2:
                time.sleep(2e-3)
            return stock(*args, **kwargs)

        return function


def frozen_experts(strategies: tuple[str, ...], matrix: str) -> dict[str, tuple[float, int, int]]:
    """Returns, by strategy, the largest error of a layer one of whose experts' matrices is frozen, and the bytes that
    it and a layer that trains all of them copy to the host.
    """
    from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
    from tests.ranks.megatron import parallel

    results = {}
    with parallel(ep=4):
        beside = BesideStock({})
        layers = {one: beside.ours("mpmoe", Options(partitions=4, memory_reuse=one)) for one in strategies}
        copied: dict[tuple[str, bool], int] = {}
        for freeze in (False, True):
            for layer in (beside.stock, *layers.values()):
                for name, parameter in layer.experts.named_parameters():
                    parameter.requires_grad_(not (freeze and matrix in name))
            expected = beside.run(beside.stock)
            for strategy, layer in layers.items():
                HOST_MEMORY.reset_peak()
                found = beside.run(layer)
                copied[strategy, freeze] = HOST_MEMORY.peak
                assert found.keys() == expected.keys()
                worst = max(difference(found[name], expected[name]) for name in expected)
                results[strategy] = worst, copied[strategy, freeze], copied[strategy, False]
    return results


@pytest.mark.parametrize("matrix", ["linear_fc1", "linear_fc2"])
def test_frozen_experts_stay_where_they_are(ranks, matrix):
    """A frozen matrix needs no inputs of its own for backward: less is copied than where it is trained."""
    for results in ranks.run(frozen_experts, strategies=("S1", "S2"), matrix=matrix):
        for error, frozen, trained in results.values():
            assert error < 1e-6 and 0 < frozen <= trained, results


def check(results: list[dict[tuple[int, str], tuple[float, str]]], bound: float = 1e-6) -> None:
    errors = {variant: error for result in results for variant, error in result.items()}
    assert all(error < bound for result in results for error, _ in result.values()), errors


@pytest.mark.parametrize(
    ("layout", "variants"), [("ep4", ALL), ("tp2-ep2-etp2", [*SOME, (2, "S1")])], ids=["ep4", "tp2-ep2-etp2"]
)
def test_every_count_and_strategy(ranks, layout, variants):
    check(ranks.run(worst_errors, layout=LAYOUTS[layout], settings={}, routing=None, variants=variants))


@pytest.mark.parametrize(
    ("layout", "settings", "routing"),
    [
        *((layout, {"moe_router_topk": 1}, None) for layout in ("one-rank-groups", "tp2-ep4", "tp4-etp4", "etp2-ep2")),
        ("cp2-tp2-ep2-etp2", {"moe_router_topk": 3}, None),
        *((layout, extra, None) for layout in ("ep4", "tp2-ep2-etp2") for extra in (DROP, PAD, SHARED, RECOMPUTE)),
        ("tp2-ep2-etp2", {"moe_router_dtype": "fp64"} | GATED_GELU, None),
        ("ep4", {"add_bias_linear": True}, None),
        ("ep4", {"num_moe_experts": 4}, None),  # one local expert
        ("ep4", {"moe_router_topk": 1, "moe_apply_probs_on_input": True}, None),
        *((layout, {}, routing) for layout in ("ep4", "tp2-ep2-etp2") for routing in ("hot", "skewed")),
        *((layout, {}, one) for layout in ("ep4", "tp2-ep2-etp2") for one in RAGGED),
    ],
    ids=str,
)
def test_layouts_and_workloads(ranks, layout, settings, routing):
    # A workload of both these layouts meets each strategy in one of them.
    of_both = routing or settings in (DROP, PAD, SHARED, RECOMPUTE)
    some = SOME if layout in ("ep4", "tp2-ep2-etp2", "etp2-ep2") else SOME[::2]  # two partitions' and one's
    variants = {"ep4": SOME[::2], "tp2-ep2-etp2": SOME[1::2]}.get(layout, SOME) if of_both else some
    check(ranks.run(worst_errors, layout=LAYOUTS[layout], settings=settings, routing=routing, variants=variants))


@pytest.mark.parametrize("routing", RAGGED)
def test_ranks_without_rows(ranks, routing):
    """Ranks 0 and 2 send none; experts of the others get few enough that partitions are empty."""
    arguments = {"layout": {"ep": 4}, "settings": {}, "silent": (0, 2), "variants": SOME}
    check(ranks.run(worst_errors, routing=routing, **arguments))


@pytest.mark.parametrize(("layout", "widened"), [("ep4", True), ("tp2-ep2-etp2", False)])
def test_bf16_is_within_the_contract(ranks, layout, widened):
    arguments = {"layout": LAYOUTS[layout], "settings": {}, "routing": None, "dtype": "bfloat16", "widened": widened}
    check(ranks.run(worst_errors, variants=SOME, **arguments), 1e-2)


def test_several_passes_under_way(ranks):
    """Forward passes of three micro-batches, then their backward passes, as in a pipeline's warm-up."""
    arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": {}, "routing": None, "steps": 3}
    check(ranks.run(worst_errors, variants=SOME, **arguments))


def test_whoever_reads_waits(ranks):
    arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": {}, "routing": None, "delay": True}
    check(ranks.run(worst_errors, variants=[(4, strategy) for strategy in STRATEGIES], **arguments))


@pytest.mark.parametrize("settings", [GATED, {"add_bias_linear": True}], ids=str)
def test_tokens_that_all_tp_ranks_hold(ranks, settings):
    arguments = {"layout": {"tp": 2, "ep": 2, "etp": 1}, "settings": settings, "routing": None}
    for errors in ranks.run(compare_replicated, dispatcher="mpmoe", **arguments):
        assert max(errors.values()) < 1e-6, errors


def test_tokens_that_all_tp_ranks_hold_go_to_all_shards_at_once(ranks):
    arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": GATED, "routing": None, "options": Options(way="joint")}
    for errors in ranks.run(compare_replicated, dispatcher="mpmoe", **arguments):
        assert max(errors.values()) < 1e-6, errors


WHOLE, BOTH = ({"tp": 2, "ep": 2, "etp": etp} for etp in (1, 2))
SHARED_OUT = [
    (WHOLE, GATED, None, {"partitions": 4}),
    (WHOLE, OVERLAPPED, None, {"partitions": 1}),
    (BOTH, Z_LOSS | RECOMPUTE, "hot", {"partitions": 4, "memory_reuse": "S3"}),
    (BOTH, {"moe_router_load_balancing_type": "seq_aux_loss"}, None, {"partitions": 8, "memory_reuse": "S2"}),
    (BOTH | {"cp": 2}, {}, None, {"partitions": 2, "memory_reuse": "S4"}),
    ({"tp": 4, "ep": 1, "etp": 4}, {}, None, {"partitions": 3}),
    ({"tp": 4, "ep": 4, "etp": 1}, {"moe_router_topk": 3}, None, {"partitions": 3, "memory_reuse": "S1"}),
]
"""Cases of tokens that all TP ranks hold, whichever way their partitions are shared out."""


@pytest.mark.parametrize(
    ("layout", "settings", "routing", "options"),
    [
        *SHARED_OUT,
        ({"tp": 4, "ep": 2, "etp": 1}, {"moe_router_topk": 3}, None, {"partitions": 3}),
        ({"tp": 2, "ep": 4, "etp": 1}, {}, None, {"partitions": 3, "network_levels": (2, 2), "domain_sizes": (2, 1)}),
    ],
    ids=str,
)
def test_tokens_that_all_tp_ranks_hold_hop_from_one_of_them(ranks, layout, settings, routing, options):
    """Each partition is shared out behind the router, and gathered over TP by itself (Parm's S2)."""
    arguments = {"layout": layout, "settings": settings, "routing": routing, "options": Options(way="hops", **options)}
    for errors in ranks.run(compare_replicated, dispatcher="mpmoe", **arguments):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize(
    ("layout", "settings", "routing", "options"),
    [
        *SHARED_OUT,
        ({"tp": 4, "ep": 2, "etp": 1}, {"moe_router_topk": 1}, None, {"partitions": 3}),
        ({"tp": 2, "ep": 4, "etp": 1}, {}, "hot", {"partitions": 8}),
        (BOTH, {}, None, {"partitions": 3, "memory_reuse": "S2", "wire": "bf16"}),
    ],
    ids=str,
)
def test_rows_of_tokens_that_all_tp_ranks_hold_are_shared_out(ranks, layout, settings, routing, options):
    """Of each partition a rank sends its part of the rows, and those of all are gathered over TP (Parm's S2)."""
    bound = 1e-2 if "wire" in options else 1e-6
    options = Options(way="shared-rows", **options)
    arguments = {"layout": layout, "settings": settings, "routing": routing, "options": options}
    for errors in ranks.run(compare_replicated, dispatcher="mpmoe", **arguments):
        assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("settings", [DROP, PAD, FORCED, JITTER, SINKHORN, PER_TOKEN], ids=str)
def test_tokens_hop_from_parts_split_before_a_router_that_would_train_another_model_on_all(ranks, settings):
    """Routers that drop, balance or draw numbers do so for each rank's part of the tokens, as in all other systems."""
    arguments = {"layout": BOTH, "settings": settings, "routing": None, "options": Options(way="hops")}
    for errors in ranks.run(compare_replicated, dispatcher="mpmoe", **arguments):
        assert max(errors.values()) < 1e-6, errors


TOP_3 = {"moe_router_topk": 3}


def in_turn(cases: list[tuple]) -> list[tuple]:
    """The cases, in turn under one of three strategies: by rows each workload meets every strategy, above."""
    variants = [(3, "none"), (2, "S2"), (3, "S3")]
    return [(*case, variants[number % len(variants)]) for number, case in enumerate(cases)]


JOINT_CASES = [
    ("tp4-etp4", TOP_3, None),
    ("etp2-ep2", TOP_3 | {"moe_router_dtype": "fp64"}, None),
    ("cp2-tp2-ep2-etp2", TOP_3, None),
    *(("tp2-ep2-etp2", TOP_3 | extra, None) for extra in (DROP, PAD, SHARED, RECOMPUTE)),
    *(("tp2-ep2-etp2", TOP_3, routing) for routing in ("hot", *RAGGED)),
]


@pytest.mark.parametrize(
    ("layout", "settings", "routing", "variant"),
    in_turn(JOINT_CASES),
    ids=str,
)
def test_rows_to_all_shards_at_once_in_layouts_and_workloads(ranks, layout, settings, routing, variant):
    arguments = {"layout": LAYOUTS[layout], "settings": settings, "routing": routing, "way": "joint"}
    check(ranks.run(worst_errors, variants=[variant], **arguments))


CHUNKED_CASES = [
    ("tp2-ep2-etp2", 2, "float32", 1, TOP_3, None),
    ("tp2-ep2-etp2", 3, "float32", 3, RECOMPUTE, None),
    ("tp2-ep2-etp2", 4, "bfloat16", 1, SHARED, None),
    ("tp2-ep2-etp2", 2, "float32", 1, DROP, "hot"),
    ("tp2-ep2-etp2", 2, "float32", 1, PAD, None),
    ("cp2-tp2-ep2-etp2", 2, "float32", 1, {}, None),
    ("tp4-etp4", 2, "float32", 1, {}, None),
    ("ep4", 3, "float32", 1, {"num_moe_experts": 4}, None),  # one local expert
    *(("tp2-ep2-etp2", 2, "float32", 1, TOP_3, routing) for routing in RAGGED),
]


@pytest.mark.parametrize(
    ("layout", "chunks", "dtype", "steps", "settings", "routing"),
    CHUNKED_CASES,
    ids=str,
)
def test_partitions_in_chunks(ranks, layout, chunks, dtype, steps, settings, routing):
    variants = [(1, "none"), (3, "none")]
    arguments = {"settings": settings, "routing": routing, "dtype": dtype, "steps": steps, "delay": steps == 1}
    results = ranks.run(worst_errors, layout=LAYOUTS[layout], variants=variants, chunks=chunks, **arguments)
    check(results, 1e-2 if dtype == "bfloat16" else 1e-6)


def collectives_of(way: str) -> set[str]:
    """Returns the collectives of a layer's forward and backward pass, whose experts are cut."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from megatron_moe_opt.topology.nodes import NodeMap
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=2, etp=2):
        megatron_moe_opt.register(Options(partitions=2, way=way))
        layer = build_layer(moe_config(moe_token_dispatcher_type="mpmoe"))
        megatron_moe_opt.register()
        with TrafficCounter(NodeMap((0, 0, 1, 1))) as counter:
            run_layer(layer, torch.randn(SEQUENCE, BATCH, layer.config.hidden_size))
    return {row.collective for row in counter.rows()}


def test_rows_to_all_shards_at_once_need_no_collective_over_expert_tp(ranks):
    counts = {"all_gather"}  # of rows, which every way gathers
    assert all(found == counts | {"all_to_all"} for found in ranks.run(collectives_of, way="joint"))
    assert all("reduce_scatter" in found for found in ranks.run(collectives_of, way="rows"))


def test_rows_to_all_shards_at_once_under_every_strategy_in_bf16_and_late(ranks):
    arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": {}, "routing": None, "way": "joint"}
    check(ranks.run(worst_errors, variants=[(8, "S4"), (3, "none")], steps=2, **arguments))
    check(ranks.run(worst_errors, variants=SOME[::2], dtype="bfloat16", **arguments), 1e-2)
    check(ranks.run(worst_errors, variants=[(4, strategy) for strategy in STRATEGIES], delay=True, **arguments))


@pytest.mark.parametrize("levels", [(4,), (2, 2)])
def test_hops_under_every_strategy(ranks, levels):
    arguments = {"layout": LAYOUTS["ep4"], "settings": TOP_3, "routing": None, "levels": levels}
    variants = [(1, "none"), (8, "S4"), *((4, strategy) for strategy in STRATEGIES)]
    check(ranks.run(worst_errors, variants=variants, **arguments))


HOPS_CASES = [
    ("tp2-ep4", {}, None),
    ("one-rank-groups", TOP_3, None),
    *(("tp2-ep2-etp2", TOP_3 | extra, None) for extra in ({}, DROP, PAD)),
    ("tp4-etp4", TOP_3, None),
    *(("tp2-ep2-etp2", TOP_3, routing) for routing in RAGGED),
    *(("ep4", TOP_3 | extra, None) for extra in (DROP, PAD, SHARED, RECOMPUTE, {"moe_router_dtype": "fp64"})),
    ("ep4", TOP_3 | {"num_moe_experts": 4}, None),  # one local expert
    *(("ep4", TOP_3, routing) for routing in ("hot", "skewed", *RAGGED)),
]


@pytest.mark.parametrize(("layout", "settings", "routing", "variant"), in_turn(HOPS_CASES), ids=str)
def test_hops_in_layouts_and_workloads(ranks, layout, settings, routing, variant):
    levels = {"one-rank-groups": (1,), "tp4-etp4": (1,), "tp2-ep2-etp2": (2,)}.get(layout, (2, 2))
    arguments = {"layout": LAYOUTS[layout], "settings": settings, "routing": routing, "levels": levels}
    check(ranks.run(worst_errors, variants=[variant], **arguments))


@pytest.mark.parametrize(("settings", "routing"), [({}, "skewed"), (PAD, None)], ids=str)
def test_hops_over_two_levels_where_experts_are_cut(eight_ranks, settings, routing):
    arguments = {"layout": {"tp": 2, "ep": 4, "etp": 2}, "settings": TOP_3 | settings, "levels": (2, 2)}
    variants = [(4, "none"), (3, "S2"), (3, "S3")]
    check(eight_ranks.run(worst_errors, routing=routing, variants=variants, **arguments))


def test_hops_of_ranks_without_rows_and_several_passes_under_way(ranks):
    arguments = {"layout": {"ep": 4}, "settings": TOP_3, "routing": None, "levels": (2, 2), "variants": SOME}
    check(ranks.run(worst_errors, silent=(0, 2), **arguments))
    check(ranks.run(worst_errors, steps=3, **arguments | {"variants": SOME[1::2]}))


def test_hops_in_bf16_and_late(ranks):
    arguments = {"layout": {"ep": 4}, "settings": TOP_3, "routing": None, "levels": (2, 2)}
    check(ranks.run(worst_errors, variants=SOME, dtype="bfloat16", **arguments), 1e-2)
    check(ranks.run(worst_errors, variants=[(4, "none"), (4, "S2")], delay=True, **arguments))


@pytest.mark.parametrize(("levels", "sizes"), [((4,), (2,)), ((4,), (4,)), ((2, 2), (2, 1)), ((2, 2), (1, 2))])
def test_experts_that_travel_through_every_strategy(ranks, levels, sizes):
    arguments = {"layout": {"ep": 4}, "settings": TOP_3, "routing": None, "levels": levels, "sizes": sizes}
    by_all = [(1, "none"), (8, "S4"), *((3, strategy) for strategy in STRATEGIES)]
    variants = by_all if sizes in ((4,), (2, 1)) else [(3, "S1"), (3, "S4")]
    check(ranks.run(worst_errors, variants=variants, **arguments))


TRAVEL_CASES = [
    *((extra, None) for extra in (DROP, PAD, SHARED, RECOMPUTE, {"add_bias_linear": True}, {"num_moe_experts": 4})),
    *(({}, routing) for routing in ("hot", "skewed", *RAGGED)),
]


@pytest.mark.parametrize(("settings", "routing", "variant"), in_turn(TRAVEL_CASES), ids=str)
def test_experts_that_travel_in_workloads(ranks, settings, routing, variant):
    arguments = {"layout": {"ep": 4}, "settings": TOP_3 | settings, "routing": routing, "levels": (2, 2)}
    check(ranks.run(worst_errors, variants=[variant], sizes=(2, 1), steps=1 if settings else 2, **arguments))


def test_experts_that_travel_to_ranks_without_rows_in_bf16_and_late(ranks):
    arguments = {"layout": {"ep": 4}, "settings": TOP_3, "routing": None, "levels": (2, 2), "sizes": (1, 2)}
    check(ranks.run(worst_errors, silent=(0, 2), variants=SOME, **arguments))
    check(ranks.run(worst_errors, variants=SOME, dtype="bfloat16", **arguments), 1e-2)
    check(ranks.run(worst_errors, variants=[(4, "none"), (4, "S1")], delay=True, **arguments))
