"""What telemetry says of MoE layers, against what they did, under every dispatcher; and that it changes nothing."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.topology.nodes import NodeMap
from tests.ranks.training import training_log

NODES = NodeMap((0, 0, 1, 1))
EXPERTS = 8
DISPATCHERS = ("alltoall", "monta", "parm", "netmoe", "mpmoe", "expert-migration", "deepspeed")
TIMES = ("dispatch ms", "experts ms", "combine ms")
LINKS = ("inter-node MB", "intra-node MB")


@contextmanager
def telemetry(every_pass: bool = True, **options: Any) -> Any:
    """Layers that are built inside are watched; ranks sit on two nodes."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.observe import reports
    from megatron_moe_opt.runtime.observed import layer_pass
    from megatron_moe_opt.topology.group_cache import nodes_of

    reports.collect()  # what models of earlier tests left
    megatron_moe_opt.register(Options(telemetry=True, **options))
    nodes_of.cache_clear()
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        with mock.patch.object(layer_pass, "STRIDE", 1 if every_pass else layer_pass.STRIDE):
            yield
    finally:
        megatron_moe_opt.register()
        del os.environ["GROUP_RANK"]
        nodes_of.cache_clear()


def totals(report: dict[int, dict[str, float]]) -> dict[str, float]:
    """Bytes of all layers, forward and backward, by link."""
    return {
        name.removesuffix(" MB"): round(1e6 * sum(v[name] + v[f"backward {name}"] for v in report.values()))
        for name in LINKS
    }


def model_step(dispatcher: str, settings: dict, options: dict) -> dict[str, Any]:
    """One step of a model of two layers: the report, the bytes of its all-to-alls, and the imbalance of its routing."""
    from megatron_moe_opt.integration.observe import reports
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with parallel(ep=4), telemetry(**options):
        trained = gpt(moe_token_dispatcher_type=dispatcher, microbatches=1, distributed_optimizer=False, **settings)
        routed: dict[int, torch.Tensor] = {}
        layers = [block.mlp for block in trained.model.module.decoder.layers]
        for layer in layers:
            layer.router.register_forward_hook(
                lambda module, _, output, number=layer.layer_number: routed.__setitem__(number, output[1].sum(0))
            )
        start = time.perf_counter()
        with TrafficCounter(NODES) as counter:
            trained.forward_backward()
        seconds = time.perf_counter() - start
        sent = {row.link: row.bytes for row in counter.reduce() if row.collective == "all_to_all"}
        report = reports.collect()["telemetry"]
        again = reports.collect()
        if dispatcher != "netmoe":  # which refuses rollouts
            trained.forward_backward(forward_only=True)  # as they do, in training mode
        trained.model.eval()
        with torch.no_grad():
            trained.model(*(trained.batch(0)[name] for name in ("tokens", "position_ids")), None)
        evaluated = reports.collect()
    imbalance = {}
    for number, counts in routed.items():
        dist.all_reduce(counts)
        of_ranks = counts.view(4, -1).sum(1).double()
        imbalance[number] = [(load.max() / load.mean()).item() for load in (counts.double(), of_ranks)]
    return {"report": report, "sent": sent, "seconds": seconds, "imbalance": imbalance, "nothing": again | evaluated}


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_report_of_a_step(ranks, dispatcher):
    results = ranks.run(model_step, dispatcher=dispatcher, settings={}, options={})
    for result in results:
        report = result["report"]
        assert report == results[0]["report"] and list(report) == [1, 2]  # agreed
        assert result["nothing"] == {}  # neither twice nor of rollouts and an evaluation
        for number, values in report.items():
            assert values["passes"] == 1
            for prefix in ("", "backward "):
                stages = [values[prefix + name] for name in TIMES]
                assert min(stages) > 0 and sum(stages) <= values[f"{prefix}layer ms"] * (1 + 1e-9)
                assert 0 < values[f"{prefix}exposed ms"] < values[f"{prefix}layer ms"]
            experts, of_ranks = result["imbalance"][number]
            assert values["expert imbalance"] == pytest.approx(experts) and experts > 1
            assert values["rank imbalance"] == pytest.approx(of_ranks)
        # One by one: the slowest ranks of two layers may have been in them at the same time.
        for values in report.values():
            in_layer = values["layer ms"] + values["backward layer ms"]
            assert in_layer < 1e3 * max(result["seconds"] for result in results)
        assert totals(report) == result["sent"]


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TRAVEL = {"domain_sizes": (1, 2), "network_levels": (2, 2)}


@pytest.mark.parametrize(
    ("dispatcher", "settings", "options"),
    [
        ("monta", RECOMPUTE, {"monta_level": "O2", "chunks": 2}),
        ("alltoall", FULL, {}),
        ("mpmoe", {}, {"memory_reuse": "S4"}),
        ("expert-migration", {"gradient_accumulation_fusion": False}, TRAVEL),
        ("monta", {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}, {}),
    ],
    ids=["recomputed", "all recomputed", "experts called again", "experts that travel", "shared experts"],
)
def test_what_runs_again_or_elsewhere(ranks, dispatcher, settings, options):
    results = ranks.run(model_step, dispatcher=dispatcher, settings=settings, options=options)
    for result in results:
        assert list(result["report"]) == [1, 2] and result["nothing"] == {}
        for values in result["report"].values():
            assert values["passes"] == 1
            for prefix in ("", "backward "):
                stages = [values[prefix + name] for name in TIMES]
                assert min(stages) > 0 and sum(stages) <= values[f"{prefix}layer ms"] * (1 + 1e-9)
                assert 0 < values[f"{prefix}exposed ms"] < values[f"{prefix}layer ms"]
        if dispatcher == "expert-migration":  # weights travel beside the rows
            assert all(totals(result["report"])[link] > result["sent"].get(link, 0) for link in ("intra-node",))
        else:
            assert totals(result["report"]) == result["sent"]


def layer_pass(dispatcher: str, layout: dict, settings: dict, then: str | None = None) -> dict[str, Any]:
    """A pass of one layer; `then` one more, under another dispatcher in its place."""
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.observe import reports
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from tests.ranks.megatron import moe_config, parallel

    with parallel(**layout), telemetry():
        settings = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"} | settings
        layers = [
            build_layer(moe_config(moe_token_dispatcher_type=name, **settings)) for name in (dispatcher, then) if name
        ]
        torch.manual_seed(dist.get_rank())
        measured = []
        for layer in layers:
            layers[0].token_dispatcher = layer.token_dispatcher
            with TrafficCounter(NODES) as counter:
                layers[0](torch.randn(12, 3, 64, requires_grad=True))[0].sum().backward()
            sent: dict[str, int] = {}
            for row in counter.reduce():
                sent[row.link] = sent.get(row.link, 0) + row.bytes
            counts = 8 * EXPERTS * 4  # int64 of each expert, from 4 ranks to 1 peer on their node and 2 on the other
            sent = {"inter-node": sent["inter-node"] - 2 * counts, "intra-node": sent["intra-node"] - counts}
            measured.append({"report": reports.collect()["telemetry"], "sent": sent})
    return measured


LAYOUT = {"tp": 2, "ep": 2, "etp": 2}


@pytest.mark.parametrize(("dispatcher", "back"), [("monta", True), ("mpmoe", False), ("expert-migration", True)])
def test_what_rounding_on_the_wire_takes(ranks, dispatcher, back):
    """And the bytes of narrower rows. Under mpmoe outputs are back before anybody could look at them."""
    from megatron_moe_opt.integration.observe.telemetry_report import lines

    for result in ranks.run(model_step, dispatcher=dispatcher, settings={}, options={"wire": "fp8"}):
        report = result["report"]
        for values in report.values():
            assert 2**-7 < values["dispatch error"] < 2**-4
            assert ("combine error" in values) == back and values.get("combine error", 2**-10) < 2**-8
        assert totals(report) == result["sent"]
        assert "rounded off" in lines(report)[1] and "e-02" in lines(report)[2]


@pytest.mark.parametrize(
    ("dispatcher", "settings"),
    [
        ("alltoall", {}),
        ("alltoall", {"moe_router_dtype": "fp64"}),
        ("alltoall", {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
        ("monta", {}),
        ("parm", {}),
        ("mpmoe", {}),
    ],
    ids=["stock", "stock-fp64", "stock-padded", "monta", "parm", "mpmoe"],
)
def test_bytes_with_expert_tensor_parallelism(ranks, dispatcher, settings):
    padded = "moe_pad_expert_input_to_capacity" in settings
    for (measured,) in ranks.run(layer_pass, dispatcher=dispatcher, layout=LAYOUT, settings=settings):
        expected = measured["sent"]
        if padded:  # nobody asks for counts
            expected = {"inter-node": expected["inter-node"] + 512, "intra-node": expected["intra-node"] + 256}
        assert totals(measured["report"]) == expected


def test_a_dispatcher_may_be_exchanged_between_passes(ranks):
    for ours, stock in ranks.run(layer_pass, dispatcher="monta", layout=LAYOUT, settings={}, then="alltoall"):
        assert totals(ours["report"]) == ours["sent"] and totals(stock["report"]) == stock["sent"]
        assert ours["sent"] != stock["sent"]


def bytes_of_allgather() -> dict[str, float]:
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.observe import reports
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=4), telemetry():
        layer = build_layer(moe_config(moe_token_dispatcher_type="allgather"))
        layer(torch.randn(12, 3, 64, requires_grad=True))[0].sum().backward()
        return reports.collect()["telemetry"][1]


def test_bytes_that_are_not_known_are_not_reported(ranks):
    values = ranks.run(bytes_of_allgather)[0]
    assert values["backward layer ms"] > 0 and not any(name.endswith("MB") for name in values)


def trained(layout: dict, every_pass: bool, **settings: Any) -> dict[str, Any]:
    """Losses of steps with and without telemetry, and its report: of all passes of two steps, or a sample of four."""
    from megatron_moe_opt.integration.observe import reports
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    steps = 2 if every_pass else 4
    with parallel(**layout):
        without = gpt(**settings).train(steps)
    with parallel(**layout), telemetry(every_pass):  # from the same seed
        watched = gpt(**settings).train(steps)
        report = reports.collect().get("telemetry", {})
    return {"without": without, "watched": watched, "report": report}


@pytest.mark.parametrize(
    ("layout", "every_pass", "settings"),
    [
        ({"ep": 2}, False, {"moe_token_dispatcher_type": "monta", "overlap": True}),
        ({"pp": 2, "ep": 2}, True, {"moe_token_dispatcher_type": "monta"}),
        ({"pp": 2, "ep": 2}, True, {"moe_token_dispatcher_type": "alltoall", "moe_layer_freq": [0, 1]}),
        ({"tp": 2, "ep": 4, "etp": 1}, True, {"moe_token_dispatcher_type": "parm", "sequence_parallel": False}),
    ],
    ids=["sampled", "pipeline", "stage-without-experts", "replicated-tokens"],
)
def test_training_is_the_same_and_all_stages_report(ranks, layout, every_pass, settings):
    for result in ranks.run(trained, layout=layout, every_pass=every_pass, **settings):
        assert result["watched"] == result["without"]
        assert list(result["report"]) == ([2] if "moe_layer_freq" in settings else [1, 2])
        # Of 2 micro-batches each. Of 8 passes one is the fourth, the next would be the eleventh.
        assert {values["passes"] for values in result["report"].values()} == {4 if every_pass else 1}


def logged() -> tuple[str, list[tuple[str, float, int]], list[dict[str, float]]]:
    """Lines, TensorBoard and W&B values of a training loop that logs every second iteration."""
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    to_wandb: list[dict[str, float]] = []
    with parallel(ep=4), telemetry(), training_log(to_wandb) as (log, scalars, output):
        model = gpt(moe_token_dispatcher_type="monta")
        for iteration in (1, 2):
            model.train_step()
            log(iteration)
    return output.getvalue(), scalars, to_wandb


def test_megatron_s_training_log_gets_a_table_and_its_writers_all_layers(ranks):
    for rank, (output, scalars, to_wandb) in enumerate(ranks.run(logged)):
        lines = [line for line in output.splitlines() if line.startswith("moe-opt: telemetry:")]
        assert len(lines) == (5 if rank == 3 else 0)  # the last rank prints, as in Megatron
        assert {iteration for _, _, iteration in scalars} == {2}
        names = {name for name, _, _ in scalars}
        assert names >= {f"moe-opt/{name}/layer {n}" for name in ("exposed ms", "rank imbalance") for n in (1, 2)}
        (values,) = to_wandb
        assert values == {name: value for name, value, _ in scalars}
