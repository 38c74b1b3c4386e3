"""`--moe-opt-wire`: what it may be, what it is refused with, what it saves, and DeepEP's bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options, split_options
from megatron_moe_opt.planning.planner import best, candidates, fastest_narrowed
from megatron_moe_opt.row_format import SAME, Wire, WireFormat, narrower
from megatron_moe_opt.runtime.hops.hop_plan import DomainTables
from megatron_moe_opt.runtime.hops.hop_way import DeviceTables
from megatron_moe_opt.runtime.hops.row_facts import RowFacts, experts_of_tokens
from megatron_moe_opt.runtime.rows.row_layout import Payload
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.topology.domains import stationary
from megatron_moe_opt.variants import kind_of, split_variant, whole_variant
from tests.unit.planning.test_planner import LAYER, cluster

FP8, BF16 = WireFormat.FP8, WireFormat.BF16


@pytest.mark.parametrize(
    ("words", "wire"),
    [
        ("same", SAME),
        ("bf16", Wire(BF16, BF16)),
        ("fp8", Wire(FP8, BF16)),
        ("mxfp8", Wire(WireFormat.MXFP8, BF16)),
        ("dispatch=fp8,combine=bf16", Wire(FP8, BF16)),
        ("combine=fp8", Wire(WireFormat.SAME, FP8)),
        ("dispatch=fp8,combine=same", Wire(FP8, WireFormat.SAME)),
    ],
)
def test_words_of_the_option(words, wire):
    options, rest = split_options(["--moe-opt-wire", words, "--bf16"])
    assert options.wire == wire == Options(wire=words).wire == Options(wire=wire).wire and rest == ["--bf16"]
    assert split_options(options.words())[0] == options


@pytest.mark.parametrize("words", ["fp16", "fp8,bf16", "dispatch=fp8,dispatch=bf16", "dispatch=e5m2", "gather=fp8", ""])
def test_other_words_are_refused(words):
    with pytest.raises(ConfigurationError, match="no format of rows on the wire: write same, bf16, fp8, mxfp8, or one"):
        split_options(["--moe-opt-wire", words])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_facts_behind_a_token_are_read_wherever_they_lie(tokens, topk):
    """Facts behind an odd number of 16-bit probabilities are not aligned to their own size."""
    facts = RowFacts(Payload(8, torch.bfloat16), topk, torch.bfloat16, has_notes=True)
    probs, experts = torch.rand(tokens, topk).bfloat16(), torch.arange(tokens * topk, dtype=torch.int32).view(-1, topk)
    layout, notes = facts.outbound(), torch.arange(tokens) + (5 << 32)
    rows = layout.pack(torch.ones(tokens, 8, dtype=torch.bfloat16), probs, experts, notes)
    assert layout.probs(rows).equal(probs) and layout.experts(rows).equal(experts.long())
    assert layout.notes(rows).equal(notes)


def test_bf16_is_nothing_to_rows_in_bf16():
    assert Wire.of("bf16").of_rows(is_bf16=True) == SAME and Wire.of("bf16").of_rows(is_bf16=False) != SAME
    assert Payload.of(torch.zeros(2, 8, dtype=torch.bfloat16), Wire.of("fp8")).wire == Wire(FP8)


@pytest.mark.parametrize(
    ("variant", "wire"),
    [
        ("monta:O2x4:fp8", "fp8"),
        ("parm:S1:bf16", "bf16"),
        ("mpmoe:4:S3:hops:mxfp8", "mxfp8"),
        ("netmoe:fp8", "fp8"),
        ("netmoe:hopsx2:fp8", "fp8"),
        ("expert-migration:1x2:fp8-same", "dispatch=fp8,combine=same"),
    ],
)
def test_variants_name_a_format(variant, wire):
    name, options = split_variant(variant, None)
    assert options.wire == Wire.of(wire)
    assert system_of(name).variant(options, 2) == variant == whole_variant(variant, 2)
    assert kind_of(variant).endswith(options.wire.word) and kind_of(variant) != kind_of(variant.rpartition(":")[0])


def test_a_format_alone_is_a_variant():
    assert split_variant("monta:fp8", None) == ("monta", Options(wire="fp8"))
    with pytest.raises(ConfigurationError, match="deepspeed:fp8"):
        split_variant("deepspeed:fp8", None)


@pytest.mark.parametrize(
    ("dispatcher", "given", "fields", "sentence"),
    [
        ("alltoall", {"wire": "fp8"}, {}, "--moe-opt-wire fp8 is for .* monta, parm, netmoe, mpmoe, expert-migration"),
        ("deepspeed", {"wire": "bf16"}, {}, "--moe-opt-wire bf16 is for .*, not deepspeed"),
        (AUTO, {"wire": "fp8"}, {}, "is lossy, which .* auto is with --moe-opt-allow-lossy alone"),
        ("monta", {"allow_lossy": True}, {}, "--moe-opt-allow-lossy True is for .* auto, not monta"),
        ("monta", {"wire": "fp8"}, {"fp16": True, "params_dtype": torch.float16}, "as many bytes with fewer digits"),
        ("monta", {"wire": "fp8"}, {"fp8": "e4m3"}, "what experts in --fp8-format round again"),
        (
            "monta",
            {"wire": "fp8"},
            {"quant_recipe": object()},
            "experts in --te-precision-config-file or --kitchen-con",
        ),
    ],
)
def test_what_a_format_does_not_go_with(dispatcher, given, fields, sentence, monkeypatch):
    import megatron_moe_opt
    from megatron_moe_opt.integration import checks
    from tests.unit.config_cases import config

    megatron_moe_opt.use_host_backend()
    megatron_moe_opt.register(Options(**given), refuse_unread=True)
    try:
        with pytest.raises(ConfigurationError, match=sentence):
            made = config(moe_token_dispatcher_type=dispatcher)
            for name, value in fields.items():
                setattr(made, name, value)
            checks.check_config(made, dispatcher, Options(**given))
    finally:
        megatron_moe_opt.register()


def deepseek_routing(tokens: int, seed: int) -> torch.Tensor:
    """bool [tokens, 256]: 8 experts of each token, in 4 of the 8 groups of 32."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.rand(tokens, 8, generator=generator).topk(4).indices
    allowed = torch.zeros(tokens, 8).scatter(1, groups, 1.0).repeat_interleave(32, 1)
    chosen = (torch.rand(tokens, 256, generator=generator) * allowed).topk(8).indices
    return torch.zeros(tokens, 256, dtype=torch.bool).scatter(1, chosen, True)


def test_bytes_between_nodes_are_deepeps():
    """A DeepSeek-V3 layer on 8 nodes of 8: at most 1 % above a token once to each node it needs in e4m3 with its
    scales, and once back in bf16.
    """
    hidden, nodes, of_node, tokens = 7168, 8, 8, 64
    world, domains = nodes * of_node, stationary((nodes, of_node))
    facts = RowFacts(Payload(hidden, torch.bfloat16, Wire.of("fp8").of_rows(is_bf16=True)), 8, torch.float32)
    routings = [deepseek_routing(tokens, rank) for rank in range(world)]
    tables = [DomainTables(domains, rank, 256) for rank in range(world)]
    counts = torch.stack(
        [
            DeviceTables(table, torch.device("cpu")).count(experts_of_tokens(routing, 8), routing, [tokens])[:-1]
            for table, routing in zip(tables, routings, strict=True)
        ]
    )
    plans = [table.plan(counts.view(world, 1, 1, 1, -1))[0] for table in tables]
    crossing = sum(sum(plan.hops[0].sent) - plan.hops[0].sent[rank // of_node] for rank, plan in enumerate(plans))
    needed = 0
    for rank, routing in enumerate(routings):
        wants = routing.view(tokens, nodes, -1).any(2)
        needed += int(wants.sum() - wants[:, rank // of_node].sum())
    assert crossing == needed > 0
    deepep = needed * (hidden + hidden // 128 * 4 + 2 * hidden)
    ours = crossing * (facts.outbound().row_bytes + facts.homebound(has_probs=False).row_bytes)
    assert deepep < ours <= 1.01 * deepep
    backward = crossing * (facts.outbound(has_facts=False).row_bytes + facts.homebound(has_probs=True).row_bytes)
    assert backward <= 1.01 * deepep


def test_auto_has_formats_among_its_candidates_where_it_may_lose():
    plain, _ = candidates(LAYER, cluster())
    assert not any(split_variant(one.variant, None)[1].wire != SAME for one in plain if system_of(one.variant))
    wires = narrower(LAYER.element_bytes)
    found, _ = candidates(LAYER, cluster(), wires=wires)
    narrowed = {one.variant: one for one in found if one.variant.endswith(":fp8")}
    assert {one.family for one in narrowed.values()} >= {"monta", "mpmoe"} and not any(
        "netmoe" in one for one in narrowed
    )
    before = {one.variant: one for one in plain}
    for name, one in narrowed.items():
        exact = before[name.removesuffix(":fp8")]
        assert one.inter_bytes < 0.85 * exact.inter_bytes
    assert best(found).variant in narrowed
    fastest = {wire: next(one for one in found if one.variant.endswith(f":{wire.word}")) for wire in wires}
    assert fastest_narrowed(LAYER, cluster(), None, wires) == fastest


@pytest.mark.parametrize(("element_bytes", "words"), [(4, ["bf16", "fp8"]), (2, ["fp8"])])
def test_bytes_that_the_planner_counts_are_the_rows(element_bytes, words):
    dtype = {2: torch.bfloat16, 4: torch.float32}[element_bytes]
    assert [str(wire) for wire in narrower(element_bytes)] == words
    for wire in (SAME, *map(Wire.of, words)):
        layer = dataclasses.replace(LAYER, element_bytes=element_bytes, wire=wire, topk=2)
        facts = RowFacts(Payload(layer.hidden, dtype, wire), 2, torch.float32)
        assert layer.outbound_bytes == facts.outbound(has_facts=False).row_bytes
        assert layer.homebound_bytes == facts.homebound(has_probs=False).row_bytes


def test_the_planner_has_netmoes_residuals_in_their_dtype():
    moving = dataclasses.replace(LAYER, placement_saving=0.4)
    found, _ = candidates(moving, cluster(), wires=[Wire.of("fp8")])
    (one,) = (one for one in found if one.variant == "netmoe:fp8")
    rows = 2048 * (2 * 1056 + 2 * 2048 + 3 * 16)  # there and back, forward and backward; all but one pass have lanes
    residuals = 2 * 1024 * 1024 * 4  # of all tokens, in float32
    assert one.inter_bytes == pytest.approx((0.6 * rows + residuals) / 2, rel=1e-6)
