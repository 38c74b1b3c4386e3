"""The planner: ranks all systems on a cluster, refuses what cannot run, and keeps stock where nothing wins."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import OURS, STOCK, Cluster, ExpertGemm, World
from megatron_moe_opt.planning.costs.described_cluster import describe, levels_of_ep
from megatron_moe_opt.planning.costs.domain_curves import KINDS, measured_curves, profile_name, realisable_groups
from megatron_moe_opt.planning.costs.known_clusters import A800_IB200, H100_IB400
from megatron_moe_opt.planning.planner import best, bound_and_stock, candidates, in_fewest_parts
from megatron_moe_opt.planning.predicting import expert_migration
from megatron_moe_opt.planning.predicting.layer_on_cluster import DISPATCH, LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload, resident_part
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL, HeldMore, Prediction, Refusal, nothing_left
from megatron_moe_opt.planning.predicting.skew import Skew
from megatron_moe_opt.row_format import Wire
from megatron_moe_opt.schedules.groups import JOINT_GROUP
from megatron_moe_opt.schedules.mpmoe import token_shares
from megatron_moe_opt.schedules.schedule import COLLECTIVES, Kind, Lane
from megatron_moe_opt.systems.expert_migration import EXPERT_MIGRATION, fastest_domains, setting_of
from megatron_moe_opt.systems.expert_migration import NAME as MIGRATION
from megatron_moe_opt.systems.mpmoe import MPMOE
from megatron_moe_opt.topology.layouts import Layout
from tools.papers.formulas import hybridep_levels

MB = 10**6
NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def line(latency: float, bandwidth: float) -> tuple[tuple[int, float], ...]:
    return (1, latency), (100 * MB, latency + 100 * MB / bandwidth)


def cluster(inter: float = 25 * MB, intra: float = 200 * MB, **changed: object) -> Cluster:
    """2 nodes x 4 ranks: EP 2 between nodes, expert-TP 4 inside them."""
    slow, fast = line(1e-3, inter), line(1e-4, intra)
    gathers = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    curves = {(Kind.ALL_TO_ALL, "ep"): slow, (Kind.ALL_TO_ALL, JOINT_GROUP): slow}
    curves |= {(kind, role): fast for kind in gathers for role in ("expert-tp", "tp")}
    curves |= {(kind, None): line(1e-6, 4000 * MB) for kind in (Kind.COPY, Kind.OFFLOAD, Kind.PREFETCH)}
    gemm = ExpertGemm(1024, 256, "fp32", ((64, 1e-3), (4096, 6e-2)))
    made = Cluster(World(NODES, tp=4, ep=2, expert_tp=4), curves, saa=slow, expert_gemm=gemm)
    return dataclasses.replace(made, **changed)


LAYER = LayerWorkload(
    tokens=1024, hidden=1024, ffn=256, gated=False, experts=8, topk=2, element_bytes=4, lane_bytes=16, ep=2, etp=4
)


def by_variant(found: tuple[Prediction, ...]) -> dict[str, Prediction]:
    return {one.variant: one for one in found}


def test_all_systems_are_ranked_or_refused_with_a_reason():
    found, refused = candidates(LAYER, cluster())
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert {one.family for one in found} == {ALLTOALL, "monta", "parm", "mpmoe"}
    reasons = {one.variant: one.reason for one in refused}
    assert "expert tensor parallelism 4" in reasons["expert-migration"] and "moe-opt trace replay" in reasons["netmoe"]
    for one in found:
        assert one.seconds == pytest.approx(sum(one.terms.values()))
        assert 0 <= one.exposed <= one.seconds


def test_rows_on_the_rank_are_counted_for_all():
    measured = cluster(local_work={OURS: ((1, 0.01),), STOCK: ((1, 0.02),)})
    predicted = by_variant(candidates(LAYER, measured)[0])
    local = measured.local_work[OURS][0][1] * 2048 * 1024 * 4
    assert predicted["monta:O2x4"].terms["rows on the rank"] == pytest.approx(local)
    assert predicted[ALLTOALL].terms["rows on the rank"] == pytest.approx(2 * local)


def test_bytes_by_link():
    """EP sends half of the rows to the other node, expert-TP shares them among 3 peers inside it."""
    predicted = by_variant(candidates(LAYER, cluster())[0])
    own = 2048 * 1024 * 4
    total = 4 * own + 2 * 2048 * 16  # of four passes, two of which carry lanes
    assert predicted["monta:O1"].inter_bytes == pytest.approx(total / 2)
    assert predicted["monta:O1"].intra_bytes == pytest.approx(3 * total)
    assert predicted["monta:O3x8"].inter_bytes == pytest.approx(total / 2, rel=1e-3)
    # Parm's fused all-to-all sends every row to all 4 shards: those of the other node over the slow link.
    assert predicted["parm:S1"].inter_bytes == pytest.approx(4 * total / 2)
    assert predicted["mpmoe:4:S2"].inter_bytes > predicted["mpmoe:4"].inter_bytes  # communicates inputs again


def test_stock_sums_over_expert_tp_in_the_type_of_its_probabilities():
    """And gathers their gradients in it: two of the four times that rows go over expert-TP, in twice the bytes."""
    of_rows, wider = (
        by_variant(candidates(dataclasses.replace(LAYER, prob_bytes=prob_bytes), cluster())[0])
        for prob_bytes in (None, 8)
    )
    own, probs = 2048 * 1024 * 4, 2048 * 4
    assert of_rows[ALLTOALL].intra_bytes == 3 * (4 * own + 2 * probs)
    assert wider[ALLTOALL].intra_bytes == 3 * (6 * own + 4 * probs)
    assert wider[ALLTOALL].inter_bytes - of_rows[ALLTOALL].inter_bytes == probs  # half of two messages
    assert wider[ALLTOALL].seconds > of_rows[ALLTOALL].seconds and wider["monta:O1"] == of_rows["monta:O1"]


def test_rows_to_all_shards_at_once_in_partitions():
    predicted = by_variant(candidates(LAYER, cluster())[0])
    whole, one, four = predicted["parm:S1"], predicted["mpmoe:1:joint"], predicted["mpmoe:4:joint"]
    assert one.seconds == pytest.approx(whole.seconds) and one.inter_bytes == whole.inter_bytes
    assert four.seconds < one.seconds and four.inter_bytes == pytest.approx(one.inter_bytes, rel=1e-3)
    assert predicted["mpmoe:4:S4:joint"].inter_bytes > four.inter_bytes  # communicates inputs again
    experts_whole = dataclasses.replace(LAYER, ep=8, etp=1)
    unmeasured = cluster(curves={key: one for key, one in cluster().curves.items() if JOINT_GROUP not in key})
    for layer, measured, reason in (
        (experts_whole, cluster(), "experts are whole: its all-to-all is that of mpmoe by rows"),
        (LAYER, unmeasured, "no all-to-all over expert parallelism and expert-TP together was measured"),
    ):
        refused = {one.variant: one.reason for one in candidates(layer, measured)[1]}
        assert reason in refused["mpmoe:joint"]


def test_chunks_of_partitions_that_go_over_two_links():
    predicted = by_variant(candidates(LAYER, cluster())[0])
    for variant in ("mpmoe:2", "mpmoe:4"):
        whole, chunked = predicted[variant], predicted[f"{variant}:c2"]
        assert chunked.inter_bytes == pytest.approx(whole.inter_bytes, rel=1e-3)
        assert chunked.parts == 2 * whole.parts
    assert predicted["mpmoe:1:c2"].seconds < predicted["mpmoe:1"].seconds  # both links are busy at once
    assert not any(":c" in one for one in predicted if any(word in one for word in ("S1", "hops", "joint")))
    one_link = by_variant(candidates(dataclasses.replace(LAYER, ep=8, etp=1), cluster())[0])
    assert not any(one.startswith("mpmoe") and ":c" in one for one in one_link)


def test_rows_that_tp_ranks_share_out_are_gathered_in_the_place_of_tokens():
    layer = dataclasses.replace(LAYER, tp=4)
    predicted = by_variant(candidates(layer, cluster())[0])
    split_before, shared = predicted["mpmoe:4"], predicted["mpmoe:4:shared-rows"]
    assert shared.inter_bytes == split_before.inter_bytes
    rows, tokens = layer.tokens * layer.topk * layer.row_bytes, layer.tokens * layer.row_bytes
    more = 2 * (rows - tokens) * 3 / 4  # sums of outputs and of gradients; a rank sends its quarter to three others
    assert shared.intra_bytes - split_before.intra_bytes == pytest.approx(more, rel=0.02)
    assert shared.activation_bytes > split_before.activation_bytes  # all rows of the TP group are packed
    assert "mpmoe:4:S4:shared-rows" in predicted
    for other, reason in (
        (LAYER, "ranks have tokens of their own"),
        (dataclasses.replace(layer, routes_all=False), "trains another model"),
        (dataclasses.replace(layer, capacity_factor=1.0), "trains another model"),
    ):
        refused = {one.variant: one.reason for one in candidates(other, cluster())[1]}
        assert reason in refused["mpmoe:shared-rows"]


@settings(max_examples=10)
@given(
    st.floats(5 * MB, 500 * MB), st.floats(1.0, 4.0), st.integers(1, 4096), st.sampled_from([1, 2, 4]),
    st.floats(1.0, 3.0),
)  # fmt: skip
def test_faster_links_and_fewer_rows_never_take_longer(inter, factor, tokens, topk, imbalance):
    layer = dataclasses.replace(LAYER, tokens=tokens, topk=topk)
    slow, fast = (by_variant(candidates(layer, cluster(inter * times))[0]) for times in (1, factor))
    busier = dataclasses.replace(layer, imbalance=imbalance)
    skewed = by_variant(candidates(busier, cluster(inter))[0])
    for variant, one in slow.items():
        assert fast[variant].seconds <= one.seconds * (1 + 1e-6)
        assert one.seconds <= skewed[variant].seconds * (1 + 1e-6)  # to the rounding of chunks to whole rows


def test_tokens_hop_once_whatever_capacity_experts_have():
    """What fills a capacity up does not travel, and an expert without room has nothing of a token that others have."""
    skew = Skew(1.0, (), cluster())
    capped = (dataclasses.replace(LAYER, capacity_factor=factor).migration(skew) for factor in (0.5, 1.0, 2.0))
    assert [(one.tokens, one.kept) for one in capped] == [(1024, 0.5), (1024, 1.0), (1024, 1.0)]
    assert dataclasses.replace(LAYER, capacity_factor=0.5, tokens=0).migration(skew).tokens == 0


def test_uneven_routing_counts_under_every_schedule_of_parm():
    replicated = dataclasses.replace(LAYER, tp=4)
    even, uneven = (
        by_variant(candidates(dataclasses.replace(replicated, imbalance=imbalance), cluster())[0])
        for imbalance in (1.0, 2.0)
    )
    for schedule in ("parm:S1", "parm:S2"):
        assert uneven[schedule].inter_bytes == pytest.approx(2 * even[schedule].inter_bytes, rel=1e-2)


def test_a_budget_leaves_out_what_does_not_fit_but_never_stock():
    found, _ = candidates(LAYER, cluster())
    budget = by_variant(found)["mpmoe:4:S1"].activation_bytes
    fitting, refused = candidates(LAYER, cluster(), budget)
    assert all(one.activation_bytes <= budget for one in fitting if one.variant != ALLTOALL)
    assert ALLTOALL in by_variant(fitting) and "mpmoe:4:S1" in by_variant(fitting)
    assert any(one.variant == "monta:O1" and str(budget) in one.reason for one in refused)


def test_stock_stays_where_nothing_wins():
    stock = Prediction(ALLTOALL, 1.0, 1.0, 0, 0, 0)
    assert best([dataclasses.replace(stock, variant="monta:O1", seconds=0.98), stock]) is stock
    faster = dataclasses.replace(stock, variant="monta:O1", seconds=0.9)
    assert best([faster, stock]) is faster
    assert best([faster]) is faster


def test_trials_begin_with_no_partitions_for_a_gain_that_may_be_none():
    """Only those of the same kind are taken for equal."""
    stock = Prediction(ALLTOALL, 1.0, 1.0, 0, 0, 0)
    seconds = {"mpmoe:7:hops": 0.8, "mpmoe:3:hops": 0.82, "mpmoe:2:hops": 0.83, "mpmoe:2": 0.81}
    found = [dataclasses.replace(stock, variant=name, seconds=of, parts=int(name[6])) for name, of in seconds.items()]
    assert in_fewest_parts(best([*found, stock]), found).variant == "mpmoe:3:hops"
    assert in_fewest_parts(stock, [*found, stock]) is stock


def test_replicated_tokens_leave_stock_out_and_gather_at_the_edge():
    found, refused = candidates(dataclasses.replace(LAYER, tp=4), cluster())
    predicted = by_variant(found)
    assert ALLTOALL in {one.variant for one in refused} and "parm:S2" in predicted
    split = by_variant(candidates(dataclasses.replace(LAYER, tokens=256), cluster())[0])
    seconds = cluster().costs.curves[Kind.ALL_GATHER, "tp"].seconds
    edge = 2 * seconds(1024 * 4096) + 2 * seconds(4 * LAYER.experts * LAYER.hidden)  # tokens; the router's gradient
    assert predicted["monta:O1"].seconds == pytest.approx(split["monta:O1"].seconds + edge)


def migrating(expert_hidden: int) -> tuple[LayerWorkload, Cluster]:
    workers = (2, 4)
    layer = dataclasses.replace(LAYER, ep=8, etp=1, ffn=expert_hidden, workers=workers)
    curves = {(Kind.ALL_TO_ALL, "ep"): line(1e-3, 5 * MB)}
    curves |= {(kind, None): line(1e-6, 4000 * MB) for kind in (Kind.COPY, Kind.OFFLOAD, Kind.PREFETCH)}
    for kind in KINDS:
        for level, ranks in realisable_groups(workers):
            curves[kind, profile_name(kind, workers, level, ranks)] = line(1e-3, (5, 200)[level] * MB)
    gemm = ExpertGemm(1024, 256, "fp32", ((64, 1e-3), (4096, 6e-2)))
    return layer, Cluster(World(NODES, ep=8), curves, expert_gemm=gemm)


def test_tokens_that_hop_are_gathered_over_tp_part_by_part():
    """One partition is gathered as by S1, behind the layer; several are, beside the experts."""
    layer, measured = migrating(512)
    layer = dataclasses.replace(layer, tp=4, tokens=4096)
    curves = measured.curves | {(Kind.ALL_GATHER, "tp"): line(1e-4, 100 * MB)}
    measured = dataclasses.replace(measured, world=World(NODES, tp=4, ep=8), curves=curves)
    by_part, at_once, drops = (
        by_variant(candidates(dataclasses.replace(layer, **of), measured)[0])
        for of in ({}, {"routes_all": False}, {"capacity_factor": 1.0})
    )
    seconds = measured.costs.curves[Kind.ALL_GATHER, "tp"].seconds
    edge, router = seconds(4096 * 4096), 2 * seconds(4 * layer.experts * layer.hidden)
    assert by_part["mpmoe:1:hops"].seconds == pytest.approx(at_once["mpmoe:1:hops"].seconds, rel=1e-2)
    saved = at_once["mpmoe:4:hops"].seconds - by_part["mpmoe:4:hops"].seconds
    shares = token_shares(4, "none")
    assert edge < saved - router < 2 * edge * sum(shares[:-1]) / sum(shares)
    assert by_part["mpmoe:4"].seconds == at_once["mpmoe:4"].seconds
    assert drops["mpmoe:4:hops"].seconds == pytest.approx(at_once["mpmoe:4:hops"].seconds)


def test_small_experts_travel_and_large_ones_stay():
    of_both = (candidates(*migrating(hidden))[0] for hidden in (8, 65536))
    small, large = (next(one.variant for one in found if one.family == MIGRATION) for found in of_both)
    assert small.startswith("expert-migration:2x")
    assert not large.startswith("expert-migration:2x")
    layer, measured = migrating(8)
    one = by_variant(candidates(layer, measured)[0])["expert-migration:1x1"]
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    passes = tuple(hybridep_levels.TimedPass(layer.expert_bytes, kind) for kind in kinds)
    (own, *_) = hybridep_levels.predict(
        expert_migration.MigrationLayer(1024, 4096 + 16, 2, 1, passes),
        (2, 4), measured_curves(measured.costs, (2, 4)),
    )  # fmt: skip
    copies = sum(
        span.end - span.start for part in one.timelines[:2] for span in part.spans if span.op.kind is Kind.PERMUTE
    )
    assert one.terms[DISPATCH] - copies == pytest.approx(own.seconds, rel=0.02)  # a row has more behind it here


def test_partitions_of_tokens_that_hop_send_what_hops_do():
    layer, measured = migrating(256)
    layer = dataclasses.replace(layer, topk=4, experts=16)
    found = by_variant(candidates(layer, measured)[0])
    hops, alone, rows = (found[name] for name in ("mpmoe:4:hops", "expert-migration:1x1", "mpmoe:4"))
    assert hops.inter_bytes == pytest.approx(alone.inter_bytes, rel=0.01) and hops.inter_bytes < 0.6 * rows.inter_bytes
    assert hops.intra_bytes == pytest.approx(alone.intra_bytes, rel=0.01)
    assert hops.seconds < min(alone.seconds, rows.seconds)  # a token once over a link, beside the experts
    assert hops.activation_bytes < rows.activation_bytes
    _, refused = candidates(dataclasses.replace(layer, workers=(4, 2)), measured)
    (reason,) = (one.reason for one in refused if one.variant == "mpmoe:hops")
    assert (
        "no all-to-all of 2 ranks at network level 1 was measured" in reason or "4 ranks at network level 0" in reason
    )


@settings(max_examples=12)
@given(st.integers(1, 4096), st.sampled_from((8, 64, 512, 4096)), st.sampled_from((1.0, 25.0)))
def test_expert_migration_alone_chooses_domains_by_the_same_predictions(tokens, expert_hidden, ratio):
    layer, measured = migrating(expert_hidden)
    layer = dataclasses.replace(layer, tokens=tokens, compression=ratio, gradient_compression=ratio)
    found = [one for one in candidates(layer, measured)[0] if one.family == MIGRATION]
    choice = fastest_domains(layer, measured)
    named = by_variant(found)[f"{MIGRATION}:{setting_of(choice.domains.sizes, choice.chunks)}"]
    assert choice.seconds == pytest.approx(named.seconds)
    assert choice.seconds <= found[0].seconds * 1.03  # in fewer chunks, where more gain no more
    alike = [one for one in found if one.seconds <= found[0].seconds * (1 + 1e-9)]
    assert any(one.variant.startswith(named.variant.partition(":c")[0]) for one in alike)


def test_experts_that_do_not_stay_take_less_memory_and_one_more_gather():
    layer, measured = migrating(64)
    stays, goes = (
        by_variant(candidates(dataclasses.replace(layer, resident_part=part), measured)[0])["expert-migration:2x1"]
        for part in (resident_part(8, None), resident_part(8, 2))
    )
    kind, way = Kind.ALL_GATHER, profile_name(Kind.ALL_GATHER, (2, 4), 0, 2)
    gather = measured.costs.curves[kind, way].seconds(2 * layer.expert_bytes)
    assert goes.seconds - stays.seconds == pytest.approx(gather, rel=1e-6)
    assert goes.inter_bytes - stays.inter_bytes == layer.expert_bytes  # half of what both ranks have
    # Between nodes what waits of gradients is on the host, where not all layers' experts stay.
    assert stays.activation_bytes - goes.activation_bytes == layer.expert_bytes * 3 - layer.expert_bytes // 2
    half = dataclasses.replace(layer, element_bytes=2, resident_part=0.25)
    weights, sums = (half.resident_part * part * half.expert_bytes for part in (1, 2))  # gradients in float32
    assert (half.held_bytes_of_others(False), half.held_bytes_of_others(True)) == (weights + sums, weights)
    all_stay = dataclasses.replace(half, resident_part=1.0)
    assert all_stay.held_bytes_of_others(True) == 3 * half.expert_bytes


def test_copies_of_experts_that_travel_and_their_compression_count():
    layer, measured = migrating(64)
    assert fastest_domains(layer, measured).domains.sizes[0] == 2
    dear = dataclasses.replace(measured, curves={**measured.curves, (Kind.COPY, None): line(1e-6, 0.05 * MB)})
    stays, travels = (by_variant(candidates(layer, dear)[0])[f"expert-migration:{size}x1"].terms for size in (1, 2))
    assert travels["experts copied"] == pytest.approx(4 * layer.expert_bytes / (0.05 * MB), rel=0.01)
    assert "experts copied" not in stays
    whole, compressed = (
        by_variant(candidates(dataclasses.replace(layer, compression=ratio), measured)[0])["expert-migration:2x4"]
        for ratio in (1.0, 25.0)
    )
    assert compressed.seconds < whole.seconds and compressed.inter_bytes < whole.inter_bytes


@pytest.mark.parametrize(
    ("variant", "system", "options"),
    [
        ("expert-migration:2x4", EXPERT_MIGRATION, Options()),
        ("mpmoe:4:hops:2x4", MPMOE, Options(partitions=4, way="hops", domain_sizes=(2, 4))),
    ],
)
def test_encoding_and_decoding_costs_what_was_measured_or_copies_of_as_many_bytes(variant, system, options):
    """Encoding takes a copy of a rank's own experts, and decoding half of one of those of 7 others; of gradients for
    and from them it is 3.5 and 2, in float32.
    """
    layer, measured = migrating(64)
    layer = dataclasses.replace(layer, element_bytes=2)

    def seconds_by(kind: Kind, ratio: float) -> float:
        """Returns by how much longer it takes where every byte of this kind takes 1 ns more."""
        times = []
        for nanoseconds in (1, 2):
            slower = {**measured.curves, (kind, None): ((1, 1e-9 * nanoseconds),)}
            compressed = dataclasses.replace(layer, compression=ratio, gradient_compression=ratio)
            on = LayerOnCluster(compressed, dataclasses.replace(measured, curves=slower))
            times.append(by_variant(tuple(system.candidates(on, options)))[variant].seconds)
        return times[1] - times[0]

    copies = 1 + 7 * 0.5 + 2 * 7 * (3.5 + 2)
    longer = seconds_by(Kind.COPY, 25.0) - seconds_by(Kind.COPY, 1.0)
    # A message has no part of a byte; what is copied beside the experts' way is the same.
    assert longer == pytest.approx(1e-9 * layer.expert_bytes * copies, rel=1e-3)
    experts = {Kind.ENCODE: 1, Kind.DECODE: 7, Kind.ENCODE_GRADIENT: 2 * 7, Kind.DECODE_GRADIENT: 2 * 7}
    for kind, times in experts.items():
        assert seconds_by(kind, 25.0) == pytest.approx(1e-9 * layer.expert_bytes * times, rel=1e-3)
        assert seconds_by(kind, 1.0) == 0


def test_experts_that_travel_are_copied_and_run_once_for_every_owner():
    layer, measured = migrating(64)
    predicted = by_variant(candidates(layer, measured)[0])
    home, away = (predicted[f"expert-migration:{sizes}"] for sizes in ("1x1", "2x4"))
    assert "experts copied" not in home.terms
    copy = measured.costs.curves[Kind.COPY, None]
    assert away.terms["experts copied"] == pytest.approx(copy.seconds((8 + 2) * layer.expert_bytes))
    # The measured expert takes as long for 1 row as for 64, and here 8 times as many have an 8th of the rows each.
    few = dataclasses.replace(layer, tokens=32)
    flat = dataclasses.replace(measured, expert_gemm=ExpertGemm(1024, 64, "fp32", ((1, 1e-3), (64, 1e-3))))
    predicted = by_variant(candidates(few, flat)[0])
    once, each = (predicted[f"expert-migration:{sizes}"].terms["experts"] for sizes in ("1x1", "2x4"))
    assert each == pytest.approx(8 * once)


def test_an_expert_everybody_holds_makes_no_rank_busier():
    layer, measured = migrating(64)
    even, skewed = (
        by_variant(candidates(dataclasses.replace(layer, imbalance=imbalance), measured)[0]) for imbalance in (1.0, 3.0)
    )
    assert skewed["expert-migration:2x4"].seconds == pytest.approx(even["expert-migration:2x4"].seconds)
    assert skewed["expert-migration:1x1"].seconds > even["expert-migration:1x1"].seconds


def test_placement_saves_what_a_trace_says():
    """It saves in the schedules that the dispatcher runs: all-to-alls of fewer bytes, and all else as it is."""
    stock = by_variant(candidates(LAYER, cluster())[0])[ALLTOALL]
    netmoe, at_home = (
        by_variant(candidates(dataclasses.replace(LAYER, placement_saving=saving), cluster())[0])["netmoe"]
        for saving in (0.4, 0.0)
    )
    assert netmoe.seconds < stock.seconds
    assert netmoe.held_more.of_pass == netmoe.activation_bytes - stock.activation_bytes == 4 * 2048 * 1024 * 4
    rows = 2048 * 1024 * 4
    assert at_home.inter_bytes == (4 * rows + 3 * 2048 * 16) / 2  # all but one pass have lanes behind their rows
    assert netmoe.inter_bytes == pytest.approx(0.6 * at_home.inter_bytes, rel=1e-7)
    assert netmoe.intra_bytes == at_home.intra_bytes
    ours, theirs = ([op for part in one.timelines for op in part.schedule.ops] for one in (netmoe, at_home))
    assert [dataclasses.replace(op, size=0) for op in ours] == [dataclasses.replace(op, size=0) for op in theirs]
    smaller = {op.kind for op, other in zip(ours, theirs, strict=True) if op.size < other.size}
    assert smaller == {Kind.ALL_TO_ALL}
    assert ours[0].size == round(0.6 * (rows + 2048 * 16))


def test_what_a_candidate_takes_is_what_its_timelines_take():
    """They agree to the last digit, under every system: nothing is predicted that is not played, op by op, with its own
    terms, edges and experts.
    """
    families = set()
    moving, of_levels = dataclasses.replace(LAYER, placement_saving=0.4), migrating(64)
    skewed = dataclasses.replace(of_levels[0], imbalance=1.7), of_levels[1]
    local = cluster(local_work={OURS: ((1, 0.01),), STOCK: ((1, 0.02),)}, slowdown={(Lane.INTER, Lane.COMPUTE): 0.5})
    for layer, measured in ((moving, local), (dataclasses.replace(LAYER, tp=4), local), of_levels, skewed):
        for one in candidates(layer, measured)[0]:
            families.add(one.family)
            assert one.seconds == sum(timeline.seconds for timeline in one.timelines)
            assert sum(timeline.exposed for timeline in one.timelines) == pytest.approx(one.exposed)
            kinds = {op.kind for timeline in one.timelines for op in timeline.schedule.ops}
            assert {Kind.COMPUTE, Kind.GRADIENT} <= kinds and COLLECTIVES & kinds
    assert families == {ALLTOALL, "monta", "parm", "mpmoe", "netmoe", MIGRATION}


def test_the_world_s_groups_are_not_listed_for_each_candidate(monkeypatch):
    """Listing them for 98,304 ranks took 60 seconds in the place of 4."""
    listed, groups = [], Layout.groups
    monkeypatch.setattr(
        Layout, "groups", lambda self, *roles, **unit: listed.append(roles) or groups(self, *roles, **unit)
    )
    known = describe(H100_IB400, Layout(1024, ep=64), 7168, 2048)
    of_cluster = len(listed)
    layer = dataclasses.replace(LAYER, hidden=7168, ffn=2048, experts=256, topk=8, ep=64, etp=1, workers=(8, 8))
    assert len(candidates(layer, known)[0]) > 50 and len(listed) <= of_cluster + 1


def test_what_leaves_nothing_is_told_once():
    """Stock does not train where TP ranks hold the same tokens, and a byte is too little for all others."""
    layer = dataclasses.replace(LAYER, tp=4)
    least = min((one for one in candidates(layer, cluster())[0]), key=lambda one: one.activation_bytes)
    with pytest.raises(ConfigurationError) as refused:
        candidates(layer, cluster(), budget=1)
    assert str(refused.value) == (
        f"--activation-budget 1 (in training --moe-opt-activation-budget) is too little: {least.variant} holds least, "
        f"{least.activation_bytes} bytes of activations; raise it to that, or leave it out"
    )
    assert candidates(layer, cluster(), budget=least.activation_bytes)[0]
    alike = [Refusal(f"mpmoe:{partitions}", f"{partitions} partitions of 1 row") for partitions in (2, 4, 8)]
    assert str(nothing_left(alike)) == "mpmoe:2 and 2 more: 2 partitions of 1 row"


def test_a_cluster_without_an_expert_is_refused():
    with pytest.raises(ConfigurationError, match="no expert"):
        candidates(LAYER, cluster(expert_gemm=None))


def test_lanes_that_disturb_each_other_are_counted():
    alone = by_variant(candidates(LAYER, cluster())[0])
    disturbed = by_variant(candidates(LAYER, cluster(slowdown={(Lane.INTER, Lane.COMPUTE): 0.5}))[0])
    assert disturbed["mpmoe:4"].seconds > alone["mpmoe:4"].seconds
    assert disturbed[ALLTOALL].seconds == alone[ALLTOALL].seconds  # nothing runs beside anything


def test_experts_that_travel_are_drawn_on_their_way():
    predicted = by_variant(candidates(*migrating(64))[0])
    for sizes, travels in (("1x1", False), ("2x4", True)):
        ops = [op for timeline in predicted[f"expert-migration:{sizes}"].timelines for op in timeline.schedule.ops]
        assert ({Kind.ALL_GATHER, Kind.REDUCE_SCATTER} <= {op.kind for op in ops}) == travels
        assert (Kind.ALL_TO_ALL in {op.kind for op in ops}) != travels  # all experts are here: no token leaves


def _more(more: HeldMore) -> int:
    return more.of_pass + more.at_work + more.of_others


@pytest.mark.parametrize(
    ("known", "layout"),
    [(H100_IB400, Layout(16, ep=16)), (A800_IB200, Layout(32, ep=8, expert_tp=2))],
    ids=["hops", "expert-tp"],
)
def test_what_is_left_out_takes_as_long_as_was_said(known, layout):
    """Experts that travel among them, and rows narrower on the wire: no candidate below the limit is missing."""
    one = LayerWorkload(
        4096, 2048, 768 // layout.expert_tp, True, 64, 8, 2, 16, layout.ep, layout.expert_tp, fused=True,
        workers=levels_of_ep(known, layout),
    )  # fmt: skip
    described, wires = describe(known, layout, 2048, 768 // layout.expert_tp), [Wire.of("fp8")]
    everything, refused = candidates(one, described, wires=wires)
    stock = by_variant(everything)[ALLTOALL].seconds
    left_out = 0
    for limit in (0.5 * stock, 0.8 * stock, stock):
        found, also_refused = candidates(one, described, wires=wires, below=limit)
        assert also_refused == refused
        left_out += len(everything) - len(found)
        kept = by_variant(found)
        assert ALLTOALL in kept and kept.items() <= by_variant(everything).items()
        assert kept.keys() >= {other.variant for other in everything if other.seconds < limit}
    assert left_out > 0
    for room in (min(_more(other.held_more) for other in everything), 0):
        found, _ = candidates(one, described, wires=wires, has_room=lambda more, room=room: _more(more) <= room)
        assert len(found) < len(everything)
        expected, kept = ([other for other in of if _more(other.held_more) <= room] for of in (everything, found))
        assert (best(kept) if kept else None) == (best(expected) if expected else None)


def test_no_candidate_is_faster_than_what_bounds_them():
    """Tokens that hop are fewer than the rows of stock, which a rank copies and sorts by itself."""
    layout = Layout(64, ep=8)
    one = LayerWorkload(32768, 2048, 768, True, 128, 8, 2, 16, 8, fused=True, workers=levels_of_ep(H100_IB400, layout))
    cluster = describe(H100_IB400, layout, 2048, 768)
    (bound, stock), _ = bound_and_stock(one, cluster)
    found, _ = candidates(one, cluster)
    assert stock.seconds == by_variant(found)[ALLTOALL].seconds
    assert 0.7 * found[0].seconds < bound.seconds < found[0].seconds
