"""`moe-opt bench` on 4 ranks, ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.described_cluster import describe
from megatron_moe_opt.planning.costs.known_clusters import H100_IB400
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
from megatron_moe_opt.runtime.observed.traffic_rows import TrafficRow
from megatron_moe_opt.topology.domains import levels_of_layout
from tests.ranks.devices import rank_device
from tests.ranks.pool import RankFailure

INTRA, INTER = "intra-node", "inter-node"


def _settings(**changes: Any) -> LayerSettings:
    settings = {
        "dispatchers": ("deepspeed", "monta"),
        "tokens": 24,
        "hidden": 32,
        "ffn_hidden": 64,
        "experts": 8,
        "topk": 2,
        "tp": 1,
        "ep": None,
        "expert_tp": 1,
        "dtype": "fp32",
        "routing": "uniform",
        "capacity_factor": None,
        "pad_to_capacity": False,
        "steps": 2,
        "warmup": 1,
        "seed": 1,
    }
    return LayerSettings(**settings | changes)


def _run(settings):
    """Returns the report of this rank."""
    from megatron_moe_opt.cli.bench.run import run

    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        return run(settings, rank_device())
    finally:
        del os.environ["GROUP_RANK"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dispatchers": ("deepspeed", "monta", "netmoe")},
        {"tp": 2, "expert_tp": 2},
        {"expert_tp": 4, "experts": 3, "topk": 1, "routing": "one-hot-expert"},
        {"ep": 2, "routing": "zipf", "dtype": "bf16"},
        {"capacity_factor": 0.5, "pad_to_capacity": True, "routing": "zipf"},
        {"capacity_factor": 1.0, "tp": 2, "tokens": 7, "shared_ffn_hidden": 24},
        {"dispatch_only": True, "tp": 2, "expert_tp": 2, "dtype": "bf16"},
    ],
    ids=str,
)
def test_layouts_and_workloads(ranks, changes):
    reports = ranks.run(_run, settings=_settings(**changes))
    ours = changes.get("dispatchers", ("deepspeed", "monta"))
    for report in reports:
        assert report == reports[0] or report.environment != reports[0].environment
        assert [result.dispatcher for result in report.results] == ["alltoall", *ours]
        assert report.nodes.node_of == (0, 0, 1, 1)
        stock = report.results[0]
        for result in report.results:
            assert len(result.seconds) == 2 and min(result.seconds) > 0
            assert result.ratios == tuple(a / b for a, b in zip(result.seconds, stock.seconds, strict=True))
            assert max(result.output_difference, result.gradient_difference) <= (
                1e-2 if report.settings.dtype == "bf16" else 1e-6
            )
            assert result.peak_memory_bytes >= 0
            sent = {link: sum(row.bytes for row in result.traffic if row.link == link) for link in (INTRA, INTER)}
            assert sent[INTRA] > 0
            assert (sent[INTER] > 0) == (report.settings.ep != 2)  # two ranks fit into a node
            assert result.wire_limit.seconds > 0
    # All ranks see the same times: the slowest rank's.
    assert len({tuple(result.seconds for result in report.results) for report in reports}) == 1


def test_bytes_of_a_trace(ranks, tmp_path):
    """8 tokens a rank, one choice each: experts 0 1 2 3 0 1 2 3, one expert a rank, so 2 rows to every peer.

    A row is 16 floats, 64 bytes, and crosses 4 times (dispatch and combine, forward and backward). A probability is
    4 bytes and crosses twice, in a message of its own with stock, in a lane of 16 bytes behind its row with monta.
    Before that every rank tells every other its row counts: 4 int64, 32 bytes.
    """
    trace = tmp_path / "trace.pt"
    torch.save((torch.arange(8) % 4)[:, None], trace)
    settings = _settings(
        dispatchers=("monta",), tokens=8, hidden=16, experts=4, topk=1, routing=f"trace:{trace}", steps=1, warmup=0
    )
    report = ranks.run(_run, settings=settings)[0]
    stock, monta = report.results
    intra_pairs, inter_pairs = 4, 8
    stock_bytes, monta_bytes = 2 * (4 * 64 + 2 * 4), 2 * (4 * 64 + 2 * 16)
    assert set(stock.traffic) == {
        TrafficRow("all_gather", INTRA, intra_pairs, intra_pairs * 32),
        TrafficRow("all_gather", INTER, inter_pairs, inter_pairs * 32),
        TrafficRow("all_to_all", INTRA, intra_pairs * 6, intra_pairs * stock_bytes),
        TrafficRow("all_to_all", INTER, inter_pairs * 6, inter_pairs * stock_bytes),
    }
    assert {row for row in monta.traffic if row.collective == "all_to_all"} == {
        TrafficRow("all_to_all", INTRA, intra_pairs * 4, intra_pairs * monta_bytes),
        TrafficRow("all_to_all", INTER, inter_pairs * 4, inter_pairs * monta_bytes),
    }
    # Half of the pairs between nodes lead out of one node; half of the pairs inside nodes are in one.
    limits = {
        INTER: inter_pairs / 2 * (stock_bytes + 32) / report.rates.inter_node,
        INTRA: intra_pairs / 2 * (stock_bytes + 32) / report.rates.intra_node,
    }
    assert stock.wire_limit.seconds == pytest.approx(max(limits.values()))
    assert limits[stock.wire_limit.link] == max(limits.values())


def _predicted(settings: LayerSettings) -> dict[str, Prediction]:
    layout = settings.layout(4)
    cluster = describe(replace(H100_IB400, node=2), layout, settings.hidden, settings.ffn_hidden, settings.dtype)
    workers = levels_of_layout(layout, cluster.world.nodes)
    found, _ = candidates(replace(settings.on(4).workload(), workers=workers), cluster)
    return {one.variant: one for one in found}


@pytest.mark.parametrize(
    ("changes", "variants"),
    [
        ({"ep": 2, "expert_tp": 2, "dtype": "bf16"}, ("alltoall", "monta:O1")),
        ({"tp": 2, "replicated": True}, ("expert-migration:1x1", "expert-migration:1x2", "mpmoe:2:hops")),
        (
            {"experts": 16, "topk": 8, "capacity_factor": 0.5, "pad_to_capacity": True},
            ("expert-migration:1x1", "mpmoe:2:hops"),
        ),
    ],
    ids=["sums-in-fp32", "replicated", "capacity"],
)
def test_a_step_sends_what_is_predicted(ranks, changes, variants):
    """But for counts, and draws of experts that are not all alike."""
    settings = _settings(**changes, tokens=512, hidden=512, steps=1, warmup=0, dispatchers=variants)
    report, predicted = ranks.run(_run, settings=settings)[0], _predicted(settings)
    traffic = {result.dispatcher: result.traffic for result in report.results}
    for variant in variants:
        sent = [sum(row.bytes for row in traffic[variant] if row.link == link) / 4 for link in (INTER, INTRA)]
        one = predicted[variant]
        assert sent == pytest.approx([one.inter_bytes, one.intra_bytes], rel=0.05), variant


def test_replicated_tokens_are_compared_with_the_reference_schedule(ranks):
    """Each expert gets a token from one rank of a TP group, and in the reference from all of them."""
    ours = ("parm:S1", "parm:S2", "parm:AAS", "monta")
    report = ranks.run(_run, settings=_settings(tp=2, expert_tp=2, tokens=64, replicated=True, dispatchers=ours))[0]
    assert [result.dispatcher for result in report.results] == ["deepspeed", *ours]
    assert set(report.results[0].ratios) == {1.0}
    sent = {
        result.dispatcher: sum(row.bytes for row in result.traffic if row.collective == "all_to_all")
        for result in report.results
    }
    # Parm's rows go to both shards of an expert at once; the reference sends both copies of a row, of both TP ranks.
    assert sent["parm:S2"] == sent["parm:AAS"] == pytest.approx(sent["parm:S1"], rel=0.1)
    assert sent["monta"] < sent["parm:S1"] < sent["deepspeed"]


def _differ():
    """Refuses to time a dispatcher that computes something else."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_moe_opt.cli.bench.run import _differences
    from megatron_moe_opt.integration.measuring.under_test import layers_under_test

    parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    try:
        model_parallel_cuda_manual_seed(1)
        settings = _settings(dispatchers=("monta", "monta:fp8"), ep=4)
        layers = layers_under_test(settings, device=rank_device())
        found = _differences(layers, "alltoall", tolerance=1e-6)
        assert found.keys() == {"alltoall", "monta", "monta:fp8"} and 1e-3 < max(found["monta:fp8"]) < 0.1
        if dist.get_rank() == 3:
            next(iter(layers["monta"].layer.experts.parameters())).data.mul_(1.001)
        _differences(layers, "alltoall", tolerance=1e-6)
    finally:
        parallel_state.destroy_model_parallel()


def test_different_results_are_refused(ranks):
    with pytest.raises(
        RankFailure, match="monta does not compute what alltoall computes: output differs by"
    ) as failure:
        ranks.run(_differ)
    assert len(failure.value.errors) == 4  # all ranks agree


def _gradients():
    """The imposed routing reaches the experts, and the router learns from it."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_moe_opt.integration.measuring.under_test import layers_under_test

    parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    try:
        model_parallel_cuda_manual_seed(1)
        settings = _settings(dispatchers=(), routing="one-hot-expert", topk=1, experts=4, ep=4)
        under_test = layers_under_test(settings, device=rank_device())["alltoall"]
        under_test.results()
        router, (expert, *_) = under_test.layer.router.weight, under_test.layer.experts.parameters()
        assert router.grad.abs().sum() > 0
        assert (expert.grad.abs().sum() > 0) == (dist.get_rank() == 0)  # expert 0, on rank 0, gets all tokens
        assert under_test.tokens.grad.abs().sum() > 0
    finally:
        parallel_state.destroy_model_parallel()


def test_imposed_routing_trains_the_router(ranks):
    ranks.run(_gradients)


def _rates():
    from megatron_moe_opt.cli.bench.links import measure_links
    from megatron_moe_opt.topology.nodes import NodeMap

    device = rank_device()
    return [measure_links(NodeMap(nodes), device) for nodes in ((0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1))]


def _experts_in_turns():
    """Returns the bytes of the experts that a compressed variant's step sends: alone, and
    after a step of a whole one.
    """
    from megatron_moe_opt.integration.measuring.parallel_layer import parallel_layer
    from megatron_moe_opt.topology.nodes import NodeMap
    from tests.ranks.layers import layer_with

    settings = _settings(ep=4)
    travelling = Options(network_levels=(2, 2), domain_sizes=(2, 2))
    sent = []
    with parallel_layer(1, 4, 1, seed=1):
        for_each = travelling, replace(travelling, compression_ratio=4.0)
        whole, compressed = (layer_with(settings, "expert-migration", one) for one in for_each)
        for other in (None, None, whole, compressed, whole):  # the first message is whole
            if other is not None:
                other.step()
            with TrafficCounter(NodeMap((0, 0, 1, 1))) as counter:
                compressed.step()
            sent.append(sum(row.bytes for row in counter.rows() if row.collective == "all_gather"))
    return sent[1:]


def test_a_step_sends_no_experts_of_a_variant_that_ran_before(ranks):
    for alone, *in_turns in ranks.run(_experts_in_turns):
        assert alone > 0 and in_turns == [alone] * 3


def test_links_that_are_there_are_measured(ranks):
    answers = ranks.run(_rates)
    assert all(answer == answers[0] for answer in answers)
    one_node, four_nodes, two_nodes = answers[0]
    assert one_node.inter_node is None and one_node.intra_node > 0
    assert four_nodes.intra_node is None and four_nodes.inter_node > 0
    assert two_nodes.inter_node > 0 and two_nodes.intra_node > 0


def test_variants_of_monta_run_as_they_are_named(ranks):
    variants = ("monta:O1", "monta:O2x3", "monta:O3")
    for report in ranks.run(_run, settings=_settings(dispatchers=variants, tp=2, expert_tp=2)):
        assert [result.dispatcher for result in report.results] == ["alltoall", *variants]
        sent = [{row.collective: row.messages for row in result.traffic} for result in report.results]
        # In two directions, forward and backward: one message a chunk between two ranks, and 4 chunks by default.
        assert [messages["all_to_all"] for messages in sent[1:]] == [4 * 4, 4 * 4 * 3, 4 * 4 * 4]
        assert all(result.gradient_difference == 0 for result in report.results)


@pytest.mark.parametrize("variant", ["monta:O4", "monta:O2x0", "monta:O3x00", "monta:O2xmany", "monta:O3x", "monta:x3"])
def test_unknown_variants_are_refused(variant):
    with pytest.raises(ConfigurationError, match=rf"--dispatchers {variant}: write a level \(O1, O2, O3\)"):
        _settings(dispatchers=(variant,)).check(("alltoall", "monta"), 4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dispatchers": ("monta:auto",)}, "--dispatchers monta:auto chooses by measurements: give --profile"),
        ({"dispatchers": ("flex",), "ep": 1}, "--dispatchers flex sends between ranks: start 2 or more"),
        ({"dispatch_only": True, "capacity_factor": 1.0}, "--dispatch-only has no router that drops tokens"),
    ],
)
def test_settings_that_contradict_each_other(changes, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        _settings(**changes).check(("alltoall", "monta", "deepspeed", "flex"), 4)


def test_flex_is_refused_where_it_cannot_run_and_built_as_named_where_it_can(monkeypatch):
    from types import SimpleNamespace

    from megatron_moe_opt.cli.bench.run import check
    from megatron_moe_opt.integration.measuring.under_test import layer_config

    monkeypatch.setenv("WORLD_SIZE", "4")

    def refusal(variant: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            check(_settings(dispatchers=(variant,)))
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal("flex") == (
        "--dispatchers flex: DeepEP runs on GPUs alone, and PyTorch finds none: leave it out here"
    )
    assert refusal("flex:nope").startswith("--dispatchers flex:nope: this Megatron-Core has flex on deepep, hybridep")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "DeepEP is not installed" in refusal("flex:deepep")
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=object))
    assert refusal("flex").endswith("its kernels sum rows of bfloat16 alone: add --dtype bf16")
    assert check(_settings(dispatchers=("flex",), dtype="bf16")) is None
    assert "HybridEP, the hybrid-ep branch of DeepEP is not installed" in refusal("flex:hybridep")
    config = layer_config(_settings(ep=4), "flex:hybridep")
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "hybridep")
