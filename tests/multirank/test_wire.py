"""Rows that are narrower on the wire, against a stock layer whose rows are rounded at the same places.

Where experts are whole and tokens make a row for each expert, that is all there is to it: results are equal bit for
bit. Where sums are rounded on their way, over expert-TP and at each hop, they are as near as the format.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_moe_opt.options import Options
from megatron_moe_opt.row_format import Wire, WireFormat
from tests import kernel_reference
from tests.multirank import test_netmoe as netmoe
from tests.multirank.test_dispatchers import DROP, PAD, RECOMPUTE, SHARED
from tests.ranks.devices import CONTRACT
from tests.ranks.layers import BesideStock

NEAR = {"bf16": 2.0**-7, "fp8": 0.05, "mxfp8": 0.06}
"""The largest error of results whose rows were rounded several times, norm over norm: 2^-4 an element of 8 bits at
most, half of it in the mean, and less in norms of sums.
"""


def rounded(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """What is left of rows [..., H] that have travelled in a format."""
    flat = rows.reshape(-1, rows.size(-1))
    if wire is WireFormat.SAME or not flat.numel():
        return rows
    return kernel_reference.widen(kernel_reference.narrow(flat, wire), wire, flat.size(1)).to(rows.dtype).view_as(rows)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: WireFormat, back: WireFormat) -> torch.Tensor:
        ctx.back = back
        return rounded(rows, there)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return rounded(grad, ctx.back), None, None


def round_rows_of(stock: Any, wire: Wire) -> None:
    """Has a stock dispatcher's rows rounded where ours narrows them: tokens and sums of gradients' rows, outputs' rows
    and gradients of outputs.
    """
    same_format, out, back = WireFormat.SAME, wire.dispatch, wire.combine
    before, arrived = stock.dispatch_preprocess, stock.dispatch_postprocess
    outputs, after = stock.combine_preprocess, stock.combine_postprocess

    def dispatch_preprocess(tokens: torch.Tensor, *rest: Any) -> Any:
        return before(_Round.apply(tokens, out, same_format), *rest)

    def dispatch_postprocess(*arguments: Any) -> Any:
        tokens, *rest = arrived(*arguments)
        return _Round.apply(tokens, same_format, back), *rest

    def combine_preprocess(rows: torch.Tensor) -> Any:
        return outputs(_Round.apply(rows, back, same_format))

    def combine_postprocess(rows: torch.Tensor, *rest: Any) -> Any:
        return _Round.apply(after(rows, *rest), same_format, out)

    for method in (dispatch_preprocess, dispatch_postprocess, combine_preprocess, combine_postprocess):
        setattr(stock, method.__name__, method)


def compare(dispatcher: str, options: dict, layout: dict, settings: dict) -> dict[str, Any]:
    """Returns, on every rank, relative errors against the rounded stock layer, whether all are equal, and whether a
    second run has the same bits.
    """
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        given = Options(**options)
        beside = BesideStock({"hidden_size": 160} | settings)
        round_rows_of(beside.stock.token_dispatcher, given.wire)
        ours = beside.ours(dispatcher, given)
        found, again = beside.run(ours), beside.run(ours)
        return {
            "errors": beside.errors(found),
            "equal": not beside.differing(found),
            "again": all(torch.equal(found[name], again[name]) for name in found),
        }


O2 = {"monta_level": "O2", "chunks": 2}
EXACT = [
    ("monta", {"wire": "fp8"}, {"ep": 4}, {}),
    ("monta", {"wire": "mxfp8", **O2}, {"ep": 4}, {}),
    ("monta", {"wire": "bf16", **O2}, {"ep": 2}, SHARED | RECOMPUTE),
    ("monta", {"wire": "dispatch=fp8,combine=fp8"}, {"ep": 4}, DROP),
    ("monta", {"wire": "dispatch=same,combine=mxfp8", **O2}, {"ep": 4}, PAD),
    ("monta", {"wire": "fp8"}, {"ep": 4}, {"num_moe_experts": 4}),  # arrival order is expert order
    ("monta", {"wire": "fp8"}, {"tp": 2, "ep": 4, "etp": 1}, SHARED),
    ("parm", {"wire": "fp8"}, {"ep": 4}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2}, {"ep": 4}, {}),
    ("mpmoe", {"wire": "bf16", "partitions": 3, "memory_reuse": "S1"}, {"ep": 4}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "memory_reuse": "S2"}, {"ep": 4}, {}),
    ("mpmoe", {"wire": "mxfp8", "partitions": 2, "memory_reuse": "S3"}, {"ep": 4}, RECOMPUTE),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "memory_reuse": "S4"}, {"ep": 4}, {}),
]


def case_id(case: tuple) -> str:
    dispatcher, options, layout, settings = case[:4]
    named = (f"{key}={value}" for part in (options, layout, settings) for key, value in part.items())
    return "-".join([dispatcher, *(name.removeprefix("moe_") for name in named)])


def arguments(case: tuple) -> dict[str, Any]:
    return dict(zip(("dispatcher", "options", "layout", "settings"), case, strict=True))


@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_rows_are_rounded_once_a_way(ranks, case):
    for result in ranks.run(compare, **arguments(case)):
        assert result["again"]
        by_parts = case[0] == "mpmoe"  # gradients of weights are summed over partitions
        assert max(result["errors"].values()) < CONTRACT if by_parts else result["equal"], result["errors"]


NEARLY = [
    ("monta", {"wire": "fp8"}, {"tp": 2, "ep": 2, "etp": 2}, {}),
    ("monta", {"wire": "bf16", **O2}, {"ep": 2, "etp": 2}, {}),
    ("monta", {"wire": "dispatch=mxfp8,combine=mxfp8"}, {"ep": 2, "etp": 2}, {}),
    ("parm", {"wire": "fp8"}, {"ep": 2, "etp": 2}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "memory_reuse": "S2"}, {"ep": 2, "etp": 2}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "memory_reuse": "S4", "way": "joint"}, {"ep": 2, "etp": 2}, {}),
    ("expert-migration", {"wire": "fp8", "network_levels": (2, 2), "chunks": 3}, {"ep": 4}, {}),
    ("expert-migration", {"wire": "mxfp8"}, {"ep": 4}, PAD),
    ("expert-migration", {"wire": "bf16", "network_levels": (2, 2), "domain_sizes": (2, 1)}, {"ep": 4}, RECOMPUTE),
    ("expert-migration", {"wire": "fp8", "network_levels": (2,)}, {"ep": 2, "etp": 2}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "way": "hops", "network_levels": (2, 2)}, {"ep": 4}, {}),
    # No token hops:
    ("expert-migration", {"wire": "bf16", "network_levels": (4,), "domain_sizes": (4,)}, {"ep": 4}, {}),
    ("mpmoe", {"wire": "fp8", "partitions": 2, "way": "hops"}, {"ep": 1}, {}),
    *(
        (
            "mpmoe",
            {"wire": "fp8", "partitions": 2, "memory_reuse": reuse, "way": "hops", "network_levels": (2, 2)},
            {"ep": 4},
            {},
        )
        for reuse in ("S1", "S2", "S3", "S4")
    ),
]


@pytest.mark.parametrize("case", NEARLY, ids=case_id)
def test_sums_are_rounded_once_a_hop(ranks, case):
    wire = Wire.of(case[1]["wire"])
    for result in ranks.run(compare, **arguments(case)):
        assert result["again"]
        assert max(result["errors"].values()) < NEAR[wire.dispatch.value], result["errors"]


@pytest.mark.parametrize(
    "case",
    [
        ("monta", O2, {"ep": 2, "etp": 2}, {}),
        ("expert-migration", {"network_levels": (2, 2)}, {"ep": 4}, {}),
    ],
    ids=case_id,
)
def test_bf16_changes_nothing_of_rows_in_bf16(ranks, case):
    dispatcher, options, layout, settings = case
    for result in ranks.run(same_bits, dispatcher=dispatcher, options=options, layout=layout):
        assert result


def same_bits(dispatcher: str, options: dict, layout: dict) -> bool:
    """Whether bf16 on the wire gives a layer in bf16 the bits that it has without."""
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        beside = BesideStock({"params_dtype": torch.bfloat16}, dtype="bfloat16")
        given = (Options(**options, wire=wire) for wire in ("same", "bf16"))
        before, after = (beside.run(beside.ours(dispatcher, one)) for one in given)
    return all(torch.equal(before[name], after[name]) for name in before)


def losses(layout: dict, options: dict, settings: dict) -> list[list[float]]:
    """Returns the losses of two steps of a small GPT: without a format, and twice with it."""
    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    found = []
    for wire in ("same", "fp8", "fp8"):
        with parallel(**layout):
            megatron_moe_opt.register(Options(**options, wire=wire))
            found.append(gpt(**settings).train(2))
            megatron_moe_opt.register()
    return found


@pytest.mark.parametrize(
    ("layout", "options", "settings"),
    [
        ({"pp": 2, "ep": 2}, {}, {"moe_token_dispatcher_type": "monta"}),
        (
            {"tp": 2, "ep": 2, "etp": 2},
            {"parm_schedule": "S2"},
            {"moe_token_dispatcher_type": "parm", "sequence_parallel": False, "microbatches": 1},
        ),
    ],
    ids=["pipelined, accumulated", "tokens that all TP ranks hold"],
)
def test_training_stays_near(ranks, layout, options, settings):
    for exact, narrow, again in ranks.run(losses, layout=layout, options=options, settings=settings):
        assert narrow == again != exact
        assert narrow == pytest.approx(exact, rel=1e-2)


SPREAD = [0.0, -50.0] * 2 + [-50.0, 0.0] * 2
"""The biases of experts, so that all tokens choose alike, one of each rank: where sums are
rounded on their way, no other.
"""
NETMOE = {
    "rows-shared-recomputed": {
        "layout": {"ep": 4},
        "settings": SHARED | netmoe.RECOMPUTE_MOE | {"moe_router_topk": 4, "num_layers": 2},
        "microbatches": 1,
        "options": Options(wire="fp8", monta_level="O2", chunks=3),
    },
    "cp2": {"layout": {"cp": 2, "ep": 4}, "settings": {"num_layers": 2}, "options": Options(wire="combine=mxfp8")}
    | netmoe.ONE,
    "tp2-etp2-shared-recomputed": {
        "layout": {"tp": 2, "ep": 2, "etp": 2},
        "settings": SHARED | netmoe.RECOMPUTE_ALL | {"moe_router_topk": 4, "num_layers": 2},
        "bias": SPREAD,
        "options": Options(wire="bf16", monta_level="O3", chunks=2),
    },
    "hops-shared-uneven": {
        "layout": {"ep": 4},
        "settings": SHARED | {"moe_router_topk": 4, "num_layers": 2},
        "bias": SPREAD,
        "options": Options(wire="fp8", way="hops", network_levels=(2, 2), chunks=3),
        "sizes": (netmoe.UNEVEN, netmoe.EVEN),
        "microbatches": 1,
    },
    "hops-etp2": {
        "layout": {"ep": 2, "etp": 2},
        "settings": {"moe_router_topk": 4, "num_layers": 2},
        "bias": SPREAD,
        "options": Options(wire="dispatch=mxfp8,combine=fp8", way="hops"),
        "microbatches": 1,
    },
}


def test_samples_move_with_narrow_rows_and_whole_residuals(ranks):
    """Losses and gradients of several layers, against stock whose rows are rounded at the same places. Where no others
    are, they differ by the few elements that another order of sums has rounded to their other neighbour.
    """
    results = ranks.run(netmoe.compare, cases=list(NETMOE.values()))
    for index, (name, case) in enumerate(NETMOE.items()):
        wire = case["options"].wire
        most = max(NEAR[one.value] for one in (wire.dispatch, wire.combine) if one is not WireFormat.SAME)
        for error, what, moved in (result[index] for result in results):
            assert error < (most if "bias" in case else 4e-3), (name, what, error)
            assert moved > 0, name
