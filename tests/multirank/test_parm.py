"""`parm` against stock `alltoall`; layers of models without sequence parallelism against those of models with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.multirank.test_dispatchers import (
    DROP,
    LAYOUTS,
    PAD,
    RAGGED,
    RECOMPUTE,
    SHARED,
    case_id,
    compare,
)
from tests.ranks.devices import CONTRACT, difference, on_gpus
from tests.ranks.layers import BATCH, SEQUENCE, route_to
from tests.ranks.pool import RankFailure

CASES = [
    *((layout, {"moe_router_topk": 2 - number % 2}, None) for number, layout in enumerate(LAYOUTS)),
    *(("tp2-ep2-etp2", extra, None) for extra in (DROP, SHARED | RECOMPUTE)),
    ("tp4-etp4", PAD, None),
    ("tp2-ep2-etp2", SHARED | {"moe_shared_expert_overlap": True}, None),
    ("tp2-ep2-etp2", {"moe_router_dtype": "fp64"}, None),
    ("ep4", {"num_moe_experts": 4}, None),
    ("tp4-etp4", {}, "skewed"),
    *(("tp2-ep2-etp2", {}, routing) for routing in ("hot", *RAGGED)),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_parm_equals_stock_bit_for_bit_in_fp32(ranks, case):
    layout, settings, routing = case
    arguments = {"layout": LAYOUTS[layout], "settings": settings, "routing": routing, "dtype": "float32", "steps": 2}
    for result in ranks.run(compare, dispatcher="parm", **arguments):
        assert result["equal"], result["errors"]


def test_bf16_is_within_the_contract(ranks):
    arguments = {"layout": LAYOUTS["tp2-ep2-etp2"], "settings": {}, "routing": None, "dtype": "bfloat16", "steps": 1}
    for result in ranks.run(compare, dispatcher="parm", **arguments):
        assert max(result["errors"].values()) < 1e-2, result["errors"]


@contextmanager
def phases_of_any_size() -> Iterator[None]:
    """Lets the few rows of a test come back peer by peer, as many do."""
    from megatron_moe_opt.runtime.rows import exchange_plan

    least, exchange_plan.MIN_PHASE_BYTES = exchange_plan.MIN_PHASE_BYTES, 0
    try:
        yield
    finally:
        exchange_plan.MIN_PHASE_BYTES = least


def gather_over_tp(part: torch.Tensor) -> torch.Tensor:
    """Gathers the parts of the TP ranks, one behind another."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def sum_over(group: Any, grad: torch.Tensor) -> torch.Tensor:
    """Sums gradients over the ranks of a group, as Megatron does at the end of a step: over TP
    those of replicated weights of a sequence-parallel one, over expert data parallelism those of experts.
    """
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


def compare_replicated(
    dispatcher: str,
    layout: dict[str, int],
    settings: dict[str, Any],
    routing: str | None,
    options: Options | None = None,
    frozen: bool = False,
    unmarked: bool = False,
    wrapped: bool = False,
) -> dict[str, float]:
    """How far our layer on all tokens, without sequence parallelism, is from stock's on each rank's part.

    The norm of the difference over the norm, of the output and of every gradient.

    Args:
        frozen: the router is not trained in a first pass.
        unmarked: parameters are replaced by others without Megatron's marks before it, as FSDP does.
        wrapped: something is around the router, and puts its groups back behind a first pass, as Megatron-Bridge's
            LoRA and evaluation in other groups do.
        options: of ours.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.multirank.test_expert_order import WrappedRouter
    from tests.ranks.megatron import moe_config, parallel

    tp = layout["tp"]
    with parallel(**layout), phases_of_any_size():
        torch.manual_seed(11 + dist.get_rank() // tp)  # routers are alike on the ranks of a TP group
        stock_config = moe_config(moe_router_pre_softmax=True, **settings)
        our_config = dataclasses.replace(stock_config, moe_token_dispatcher_type=dispatcher, sequence_parallel=False)
        stock = build_layer(stock_config)
        megatron_moe_opt.register(options)
        ours = build_layer(our_config)
        megatron_moe_opt.register()
        assert not our_config.sequence_parallel and stock_config.sequence_parallel == (tp > 1)
        ours.load_state_dict(stock.state_dict())
        for layer in (stock, ours):
            layer.train()
            if routing:
                route_to(layer, routing, seed=3)
        generator = torch.Generator().manual_seed(5 + dist.get_rank() // tp)  # the same on the ranks of a TP group
        hidden, weights = (torch.randn(SEQUENCE, BATCH, stock_config.hidden_size, generator=generator) for _ in "ab")
        found, expected = {}, {}
        if unmarked:
            for module in ours.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, torch.nn.Parameter(parameter.detach()))
        if frozen:
            ours.router.requires_grad_(False)
            ours(hidden)[0].sum().backward()
            ours.router.requires_grad_()
            ours.zero_grad()

        if wrapped:
            router, groups = ours.router, (ours.router.tp_cp_group, ours.router.tp_dp_cp_group)
            ours.router = WrappedRouter(router)
            ours(hidden)
            router.tp_cp_group, router.tp_dp_cp_group = groups

        model_parallel_cuda_manual_seed(17)  # for what a router draws
        whole = hidden.clone().requires_grad_()
        output, _ = ours(whole)
        (output * weights).sum().backward()
        found |= {"output": output.detach(), "input grad": whole.grad}
        found |= {name.replace("to_wrap.", ""): parameter.grad for name, parameter in ours.named_parameters()}

        model_parallel_cuda_manual_seed(17)
        rank = dist.get_rank() % tp
        part = hidden.chunk(tp)[rank].clone().requires_grad_()
        output, _ = stock(part)
        (output * weights.chunk(tp)[rank]).sum().backward()
        expected |= {"output": gather_over_tp(output.detach()), "input grad": gather_over_tp(part.grad)}
        for name, parameter in stock.named_parameters():
            # Stock marks biases of experts too, and would add up those of different ones.
            replicated = getattr(parameter, "sequence_parallel", False) and not name.startswith("experts.")
            over_tp = parallel_state.get_tensor_model_parallel_group()
            expected[name] = sum_over(over_tp, parameter.grad) if replicated else parameter.grad
        for name in (name for name in expected if name.startswith("experts.")):
            # Shared out behind the router, rows of a TP group that holds several groups of experts are others' than
            # stock's in each, and the same in all.
            same_experts = parallel_state.get_expert_data_parallel_group()
            found[name], expected[name] = (sum_over(same_experts, one[name]) for one in (found, expected))
    assert found.keys() == expected.keys() and any("router" in name for name in found)
    return {name: difference(found[name], expected[name]) for name in expected}


GATED = SHARED | {"moe_shared_expert_gate": True}
Z_LOSS = {"moe_z_loss_coeff": 0.01}
PER_TOKEN = Z_LOSS | {"calculate_per_token_loss": True}
FORCED, JITTER = {"moe_router_force_load_balancing": True}, {"moe_input_jitter_eps": 0.1}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
REPLICATED = [
    *(
        ({"tp": tp, "ep": ep, "etp": etp}, {}, None)
        for tp in (2, 4)
        for etp in (1, 2, 4)
        for ep in (1, 2)
        if ep * etp <= 4 and (ep > 1 or etp == tp)
    ),
    ({"tp": 2, "ep": 2, "etp": 1}, {"add_bias_linear": True}, None),
    ({"tp": 2, "ep": 2, "etp": 2}, {"moe_router_topk": 1}, "hot"),
    *(({"tp": 2, "ep": 2, "etp": 2}, extra, None) for extra in (DROP, PAD, SHARED, GATED, RECOMPUTE, Z_LOSS)),
    ({"tp": 2, "ep": 2, "etp": 1}, SHARED | {"moe_shared_expert_overlap": True}, None),
    ({"tp": 2, "ep": 2, "etp": 2, "cp": 2}, {}, None),
    *(({"tp": 2, "ep": 2, "etp": 2}, extra, None) for extra in (FORCED, JITTER, SINKHORN, PER_TOKEN)),
]


@pytest.mark.parametrize(("layout", "settings", "routing"), REPLICATED, ids=str)
def test_replicated_tokens_give_what_sequence_parallelism_gives(ranks, layout, settings, routing):
    """The layer's edge splits and gathers them, the same under every dispatcher: under monta in some of the cases."""
    by_monta = settings in ({}, RECOMPUTE, PER_TOKEN) and layout["tp"] == 2
    for dispatcher in ("parm", "monta") if by_monta else ("parm",):
        arguments = {"layout": layout, "settings": settings, "routing": routing}
        for errors in ranks.run(compare_replicated, dispatcher=dispatcher, **arguments):
            assert all(error <= CONTRACT * on_gpus() for error in errors.values()), errors


S2 = Options(parm_schedule="S2")
SPLIT_AFTER_THE_GATE = [
    ({"tp": 2, "ep": 2, "etp": 2}, {"moe_router_topk": 1}, "hot"),
    *(({"tp": 2, "ep": 2, "etp": 2}, extra, None) for extra in (SHARED, GATED, RECOMPUTE, Z_LOSS)),
    ({"tp": 2, "ep": 2, "etp": 1}, SHARED | {"moe_shared_expert_overlap": True}, None),
    ({"tp": 2, "ep": 2, "etp": 2, "cp": 2}, {}, None),
    ({"tp": 4, "ep": 2, "etp": 1}, {}, None),
    ({"tp": 2, "ep": 2, "etp": 2}, {"moe_router_load_balancing_type": "seq_aux_loss"}, None),
    ({"tp": 2, "ep": 2, "etp": 2}, {"moe_router_load_balancing_type": "global_aux_loss"}, None),
]


@pytest.mark.parametrize("dispatcher", ["parm", "deepspeed"])
@pytest.mark.parametrize(("layout", "settings", "routing"), SPLIT_AFTER_THE_GATE, ids=str)
def test_split_after_the_gate_gives_what_sequence_parallelism_gives(ranks, dispatcher, layout, settings, routing):
    """S2, and the reference schedule, whose ranks all do everything: sums are taken in another order."""
    arguments = {"layout": layout, "settings": settings, "routing": routing, "options": S2}
    for errors in ranks.run(compare_replicated, dispatcher=dispatcher, **arguments):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("options", [None, S2], ids=["S1", "S2"])
def test_a_router_that_was_frozen_is_trained_as_others_later(ranks, options):
    arguments = {"layout": {"tp": 2, "ep": 2, "etp": 2}, "settings": SHARED, "routing": None, "options": options}
    for errors in ranks.run(compare_replicated, dispatcher="parm", frozen=True, **arguments):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("options", [None, S2], ids=["S1", "S2"])
def test_gradients_are_complete_where_parameters_have_lost_their_marks(ranks, options):
    """What is left to be added over TP goes by the marks that Megatron puts when it builds a layer."""
    arguments = {"layout": {"tp": 2, "ep": 2, "etp": 2}, "settings": GATED, "routing": None, "options": options}
    for errors in ranks.run(compare_replicated, dispatcher="parm", unmarked=True, **arguments):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("loss", ["aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("options", [None, S2], ids=["S1", "S2"])
def test_a_router_inside_of_something_has_losses_over_the_same_ranks_in_each_pass(ranks, options, loss):
    settings = {"moe_router_load_balancing_type": loss, "moe_aux_loss_coeff": 0.1}
    arguments = {"layout": {"tp": 2, "ep": 2, "etp": 2}, "settings": settings, "routing": None, "options": options}
    for errors in ranks.run(compare_replicated, dispatcher="parm", wrapped=True, **arguments):
        assert max(errors.values()) < 1e-6, errors


def one_routes_differently(layout: dict[str, int], dispatcher: str, options: Options) -> None:
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    megatron_moe_opt.register(options)
    try:
        with parallel(**layout):
            layer = build_layer(moe_config(moe_token_dispatcher_type=dispatcher, sequence_parallel=False))
            if dist.get_rank() == 3:
                route_to(layer, "hot", seed=3)
            layer(torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(dist.get_rank() // layout["tp"])))
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("flag", "asked"),
    [
        ("--moe-opt-parm-schedule S2", {"dispatcher": "parm", "options": S2}),
        ("--moe-opt-way hops", {"dispatcher": "mpmoe", "options": Options(way="hops")}),
    ],
)
@pytest.mark.parametrize(("layout", "first"), [((2, 2, 2), 2), ((4, 2, 1), 0)])  # TP inside EP x expert-TP, and around
def test_tp_ranks_that_route_the_same_tokens_differently_say_so_together(ranks, layout, first, flag, asked):
    with pytest.raises(RankFailure) as caught:
        ranks.run(one_routes_differently, layout=dict(zip(("tp", "ep", "etp"), layout, strict=True)), **asked)
    assert [rank for rank, kind, _ in caught.value.errors if kind == "RoutingError"] == [0, 1, 2, 3]
    for _, _, message in caught.value.errors:
        expected = "takes all ranks of a TP group to route their tokens alike, but ranks"
        assert message.startswith(f"{flag} {expected} {first} and 3, which hold the same tokens")


class Scaled(torch.nn.Module):
    """A linear module of Megatron's whose output is scaled, as IA3 does."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.scale = linear, torch.nn.Parameter(torch.ones(64))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.to_wrap(hidden_states)[0] * self.scale, None


class AdaptedRouter(torch.nn.Module):
    """A router beside which a linear module is trained."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = router, torch.nn.Linear(64, 8, bias=False)

    def forward(self, hidden_states: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.to_wrap.routing(self.to_wrap.gating(hidden_states) + self.adapter(hidden_states))


ADDED = {"router": "router.adapter.weight", "shared_experts": "shared_experts.linear_fc2.scale"}


def with_an_adapter(place: str, dispatcher: str, options: Options | None, is_marked: bool) -> torch.Tensor | str:
    """Returns the gradient of what is put into a layer and trained, or why it is refused."""
    import megatron_moe_opt
    from megatron_moe_opt.errors import ConfigurationError
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=2, ep=2, etp=2):
        megatron_moe_opt.register(options)
        torch.manual_seed(5)
        layer = build_layer(moe_config(moe_token_dispatcher_type=dispatcher, sequence_parallel=False, **SHARED))
        megatron_moe_opt.register()
        if place == "router":
            layer.router = AdaptedRouter(layer.router)
        else:
            layer.shared_experts.linear_fc2 = Scaled(layer.shared_experts.linear_fc2)
        added = layer.get_parameter(ADDED[place])
        added.sequence_parallel = is_marked
        try:
            output, _ = layer(torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(dist.get_rank() // 2)))
        except ConfigurationError as error:
            return str(error)
        output.square().sum().backward()
        return added.grad


@pytest.mark.parametrize("place", ADDED)
@pytest.mark.parametrize(
    ("dispatcher", "options"),
    [("parm", None), ("parm", S2), ("mpmoe", Options(way="hops"))],
    ids=["S1", "S2", "hops"],
)
def test_what_is_added_to_a_layer_sees_all_tokens_or_is_refused(ranks, dispatcher, options, place):
    sees_all = options is not None and place == "router"
    for is_marked in (False, True):
        asked = {"place": place, "dispatcher": dispatcher, "options": options, "is_marked": is_marked}
        first, second, *_ = ranks.run(with_an_adapter, **asked)  # of one TP group
        if sees_all or is_marked:
            assert torch.allclose(first, second, rtol=1e-6, atol=0)
        else:
            assert first == second and first.startswith(f"{ADDED[place]} was added to a MoE layer")


def summed_over_tp() -> list[float]:
    """Returns the sums over TP of gradients in bfloat16 of which one rank's is 1 and those of the three others are too
    small to be added to it one by one, whoever begins.
    """
    from megatron.core import parallel_state

    from megatron_moe_opt.integration.layer.replicated_tokens import _Edge
    from tests.ranks.megatron import parallel

    with parallel(tp=4):
        edge = object.__new__(_Edge)
        edge._group, edge._splits_rows = parallel_state.get_tensor_model_parallel_group(), False
        own = torch.full((16,), 2.0**-9, dtype=torch.bfloat16)
        own[dist.get_rank() :: 4] = 1.0
        total = edge._complete("router.weight", own)
        assert total.dtype is own.dtype
        return total.tolist()


def test_gradients_of_half_precision_are_rounded_once_over_tp(ranks):
    assert ranks.run(summed_over_tp) == [[1 + 2.0**-7] * 16] * 4


def odd_length() -> None:
    from megatron_moe_opt.errors import ConfigurationError
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(tp=2, ep=2, etp=2):
        layer = build_layer(moe_config(moe_token_dispatcher_type="parm", sequence_parallel=False))
        with pytest.raises(ConfigurationError, match="the 7 tokens of a sequence on a rank cannot be split"):
            layer(torch.zeros(7, 1, 64))
        with pytest.raises(ConfigurationError, match="takes no intermediate tensors"):
            layer(torch.zeros(8, 1, 64), intermediate_tensors=(torch.zeros(8, 1, 64),))


def test_what_cannot_be_split_is_refused(ranks):
    ranks.run(odd_length)


def generation() -> None:
    """What Megatron's engine does: all linears take all tokens from the prompt on, then there is a token at a time."""
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    from megatron_moe_opt.errors import ConfigurationError
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    refused = (
        "--moe-token-dispatcher-type parm without --sequence-parallel splits a sequence over "
        "--tensor-model-parallel-size 2, which text generation does not go with: generate with "
        "--moe-token-dispatcher-type alltoall"
    )
    with parallel(tp=2, ep=2, etp=2), torch.no_grad():
        config = moe_config(moe_token_dispatcher_type="parm", sequence_parallel=False, **SHARED)
        layer = build_layer(config).eval()
        layer(torch.zeros(8, 1, 64))
        with pytest.raises(ConfigurationError, match=refused):
            layer(torch.zeros(1, 1, 64))
        layer.position_embedding_type = "rope"  # what the function asks a model for
        set_model_to_sequence_parallel(layer, False)
        for again in (layer, layer.train()):
            with pytest.raises(ConfigurationError, match=refused):
                again(torch.zeros(8, 1, 64))


def test_text_generation_is_refused(ranks):
    ranks.run(generation)
