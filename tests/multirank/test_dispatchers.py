"""Our dispatchers against stock `alltoall` in the same process group: output, input gradient, every weight gradient.

`monta` moves data as stock does and adds in stock's order: float32 results are equal bit for bit. `deepspeed` adds
partial outputs in another order: it is held to the numerics contract (1e-6 in float32, 1e-2 in bfloat16).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.host.devices import FACTORIES
from megatron_moe_opt.options import Options
from megatron_moe_opt.versions import megatron_version
from tests.ranks.devices import difference, rank_device, same
from tests.ranks.layers import BATCH, OWN_ROUTING, SEQUENCE, BesideStock, run_layer, take_turns


def compare(
    dispatcher: str,
    layout: dict,
    settings: dict,
    routing: str | None = None,
    dtype: str = "float32",
    steps: int = 1,
    options: Options | None = None,
) -> dict[str, Any]:
    """Returns, on every rank, the relative error of each result, and whether all are stock's; see BesideStock."""
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        beside = BesideStock(settings, routing, dtype, steps)
        found = beside.run(beside.ours(dispatcher, options))
        return {"errors": beside.errors(found), "equal": not beside.differing(found)}


DROP = {"moe_expert_capacity_factor": 0.7}
PAD = DROP | {"moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 32}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

LAYOUTS = {
    "ep4": {"ep": 4},
    "ep2": {"ep": 2},
    "tp2-ep2-etp2": {"tp": 2, "ep": 2, "etp": 2},
    "tp2-ep4": {"tp": 2, "ep": 4, "etp": 1},
    "tp4-etp4": {"tp": 4, "etp": 4},
    "etp2-ep2": {"ep": 2, "etp": 2},
    "cp2-ep2": {"cp": 2, "ep": 2},
    "cp2-tp2-ep2-etp2": {"cp": 2, "tp": 2, "ep": 2, "etp": 2},
    "one-rank-groups": {},
}

# From 0.17 on stock `alltoall` takes exactly top-k experts a token for granted, unless it drops tokens.
RAGGED = ("ragged",) if megatron_version().startswith("0.16") else ()

CASES = [
    *((layout, {"moe_router_topk": 1 + number % 2}, None) for number, layout in enumerate(LAYOUTS)),
    ("tp2-ep2-etp2", {"moe_router_topk": 5}, None),
    ("tp4-etp4", PAD, None),
    ("ep4", SHARED | {"moe_shared_expert_overlap": True}, None),
    ("tp2-ep2-etp2", SHARED | RECOMPUTE | DROP, None),
    ("tp2-ep4", {}, "skewed"),
    *(("ep4", {}, routing) for routing in ("hot", *RAGGED)),
]
"""Cases of `monta` in one piece; test_monta_levels.py has its chunks, under more settings."""


def case_id(case: tuple) -> str:
    layout, settings, routing = case
    return "-".join([layout, *(f"{k.removeprefix('moe_')}={v}" for k, v in settings.items()), routing or "router"])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_monta_equals_stock_bit_for_bit_in_fp32(ranks, case):
    layout, settings, routing = case
    for result in ranks.run(
        compare,
        dispatcher="monta",
        layout=LAYOUTS[layout],
        settings=settings,
        routing=routing,
        dtype="float32",
        steps=2,
    ):
        assert result["equal"], result["errors"]


@pytest.mark.parametrize("dispatcher", ["monta", "deepspeed"])
@pytest.mark.parametrize(("layout", "router_dtype"), [("ep4", "fp32"), ("tp2-ep2-etp2", None), ("tp4-etp4", "fp32")])
def test_bf16_is_within_the_contract(ranks, dispatcher, layout, router_dtype):
    for result in ranks.run(
        compare,
        dispatcher=dispatcher,
        layout=LAYOUTS[layout],
        settings={"moe_router_dtype": router_dtype},
        routing=None,
        dtype="bfloat16",
        steps=1,
    ):
        assert max(result["errors"].values()) < 1e-2, result["errors"]


@pytest.mark.parametrize(
    "case",
    [
        *((layout, {}, None) for layout in ("ep4", "tp2-ep4", "etp2-ep2", "cp2-tp2-ep2-etp2")),
        ("tp2-ep2-etp2", DROP, None),
        ("tp2-ep2-etp2", PAD, None),
        ("tp2-ep2-etp2", {}, "hot"),
        ("tp4-etp4", SHARED, None),
        *(("tp4-etp4", {}, routing) for routing in RAGGED),
    ],
    ids=case_id,
)
def test_deepspeed_reference_is_within_the_contract_in_fp32(ranks, case):
    layout, settings, routing = case
    for result in ranks.run(
        compare,
        dispatcher="deepspeed",
        layout=LAYOUTS[layout],
        settings=settings,
        routing=routing,
        dtype="float32",
        steps=1,
    ):
        assert max(result["errors"].values()) < 1e-6, result["errors"]


def one_layer(dispatcher: str) -> list[bytes]:
    """The bytes of output and gradients of one run."""
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=2, ep=2, etp=2):
        layer = build_layer(moe_config(moe_token_dispatcher_type=dispatcher))
        torch.manual_seed(5 + dist.get_rank())
        results = run_layer(layer, torch.randn(SEQUENCE // 2, BATCH, 64))
    return [results[name].cpu().numpy().tobytes() for name in sorted(results)]


def test_same_seed_same_bits(ranks):
    assert ranks.run(one_layer, dispatcher="monta") == ranks.run(one_layer, dispatcher="monta")


def state_names(dispatcher: str) -> list[tuple[str, tuple[int, ...]]]:
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=2, ep=2, etp=2):
        layer = build_layer(moe_config(moe_token_dispatcher_type=dispatcher, **SHARED))
        sharded = layer.sharded_state_dict()
        return [(name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items() if tensor is not None] + [
            (tensor.key, tuple(tensor.global_shape)) for tensor in sharded.values() if hasattr(tensor, "global_shape")
        ]


def test_state_is_stock(ranks):
    assert ranks.run(state_names, dispatcher="monta") == ranks.run(state_names, dispatcher="alltoall")


class OnMeta(TorchFunctionMode):
    """`torch.device("meta")`, which does not know the factories that the host backend has replaced."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name == "cuda" and args[0].is_meta:
            return args[0]
        if name in FACTORIES and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def outputs_of_layer_and_of_one_built_on_meta(
    dispatcher: str, layout: dict[str, int], options: dict[str, Any]
) -> list[torch.Tensor]:
    """What a layer makes of tokens, and one that was built without memory, as --init-model-with-meta-device does."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    megatron_moe_opt.register(Options(**options))
    try:
        with parallel(**layout):
            config = moe_config(moe_token_dispatcher_type=dispatcher, **SHARED)
            built = build_layer(config)
            with OnMeta():
                on_meta = build_layer(config)
            assert on_meta.router.weight.is_meta
            on_meta = on_meta.to_empty(device=rank_device())
            on_meta.load_state_dict(built.state_dict())
            torch.manual_seed(dist.get_rank())
            hidden = torch.randn(SEQUENCE, BATCH, config.hidden_size)
            return [layer(hidden)[0].detach() for layer in (built, on_meta)]
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("dispatcher", "options"),
    [
        ("monta", {"monta_level": "O3", "chunks": 2}),
        ("netmoe", {"way": "hops", "network_levels": (2, 2)}),
        ("mpmoe", {"way": "hops", "network_levels": (2, 2)}),
        ("expert-migration", {"domain_sizes": (2, 1), "network_levels": (2, 2)}),
    ],
)
def test_layers_may_be_built_on_the_meta_device(ranks, dispatcher, options):
    for built, on_meta in ranks.run(
        outputs_of_layer_and_of_one_built_on_meta, dispatcher=dispatcher, layout=LAYOUTS["ep4"], options=options
    ):
        assert same(built, on_meta)


def nan_alarms(cases: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Whether each dispatcher's results are stock's where fresh memory is full of NaNs and autograd looks for them."""
    from unittest import mock

    from megatron_moe_opt.runtime.rows import row_layout

    def not_numbers(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    equal = []
    for dispatcher, options in cases:
        with mock.patch.object(row_layout, "empty", not_numbers), torch.autograd.detect_anomaly(check_nan=True):
            arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": {}, "options": Options(**options)}
            errors = compare(dispatcher, **arguments)["errors"]
        equal.append(max(errors.values()) < 1e-6)
    return equal


def test_no_byte_of_a_row_is_left_unwritten(ranks):
    cases = [("monta", {"monta_level": "O3", "chunks": 2}), ("parm", {}), ("mpmoe", {"partitions": 2}),
             ("mpmoe", {"partitions": 2, "memory_reuse": "S2"})]  # fmt: skip
    assert ranks.run(nan_alarms, cases=cases) == [[True] * len(cases)] * 4


def put_another(what: str, layer: Any, patch: pytest.MonkeyPatch) -> None:
    """Puts something of its own in the place of a part of a layer's router, as others do after the layer was built."""
    from megatron.core.transformer.moe import router as megatrons

    from megatron_moe_opt.integration.layer.overlapped_batches import before_pass

    def wrapped(function: Any) -> Any:
        return functools.wraps(function)(lambda *given, **named: function(*given, **named))

    if what == "hook":
        layer.router.register_forward_hook(lambda router, inputs, outputs: outputs)
    elif what == "topk":
        layer.router.topk = 3
    elif what == "ours":
        layer.config.overlap_moe_expert_parallel_comm = True
        before_pass(layer, lambda *_: None)
    else:
        owner = {"class": megatrons.TopKRouter, "module": megatrons, "router": layer.router, "layer": layer}
        place, name = what.split()
        patch.setattr(owner[place], name, wrapped(getattr(owner[place], name)))


def rows_promised(replaced: Sequence[str | None]) -> list[bool]:
    """Whether a dispatcher is promised the number of its rows where a part of the layer's router was replaced."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    promised: list[bool] = []
    with parallel(ep=4):
        megatron_moe_opt.register()
        for what in replaced:
            layer = build_layer(moe_config(moe_token_dispatcher_type="monta"))
            dispatcher = layer.token_dispatcher.dispatcher
            permute = dispatcher.permute

            def note(*given: Any, permute: Any = permute, **sizes: Any) -> Any:
                promised.append(sizes["num_rows"] is not None)
                return permute(*given, **sizes)

            dispatcher.permute = note
            with pytest.MonkeyPatch.context() as patch:
                if what is not None:
                    put_another(what, layer, patch)
                layer(torch.randn(SEQUENCE, BATCH, layer.config.hidden_size))
    return promised


def test_a_routing_that_others_have_put_in_place_may_choose_more_or_fewer_experts(ranks):
    """As a replay of routing does that names an expert twice for a token, or a router that takes the top of p."""
    replaced = ["hook", "topk", "class forward", "class routing", "router forward", "router routing", "layer route"]
    replaced += ["module topk_routing_with_score_function", "ours", None]
    assert ranks.run(rows_promised, replaced=replaced) == [[False] * 8 + [True] * 2] * 4


HOPPING = [
    ("expert-migration", {"network_levels": (2, 2)}),
    ("mpmoe", {"partitions": 2, "way": "hops", "network_levels": (2, 2)}),
]


def what_hops_say_of_more_experts() -> list[str]:
    """What is said where a token of rank 1 alone has more experts than top-k."""
    from tests.ranks.megatron import parallel

    said = []
    with parallel(ep=4):
        beside = BesideStock(OWN_ROUTING)
        for dispatcher, options in HOPPING:
            layer = beside.ours(dispatcher, Options(**options))
            take_turns(layer, (3, 1) if dist.get_rank() == 1 else (2,))
            with pytest.raises(ConfigurationError) as raised:
                beside.run(layer)
            said.append(str(raised.value))
    return said


def test_more_experts_than_a_token_that_hops_takes_along_are_refused_on_all_ranks(ranks):
    for said in ranks.run(what_hops_say_of_more_experts):
        assert all(
            one.startswith("the routing gave 36 tokens more experts than --moe-router-topk 2") for one in said
        ), said


def under_autocast() -> dict[str, tuple[bool, float]]:
    """Returns of each dispatcher whether its layer returns stock's dtype under autocast, and its error."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        beside = BesideStock({"moe_shared_expert_intermediate_size": 32})
        expected = beside.stock(beside._hidden)[0]
        found = {name: beside.ours(name)(beside._hidden)[0] for name in ("monta", "parm", "mpmoe", "expert-migration")}
    return {name: (one.dtype is expected.dtype, difference(one, expected)) for name, one in found.items()}


def test_under_autocast_a_layer_returns_what_stock_s_does(ranks):
    """float32 parameters: what a pipeline stage sends is in the dtype that the next one has room for."""
    for found in ranks.run(under_autocast):
        assert all(is_stocks and error < 1e-2 for is_stocks, error in found.values()), found
