"""What netmoe says it sent, against what was sent; what it refuses once it sees it; its lines in a training log."""

from __future__ import annotations

import os
import types
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.kernels import LANE_BYTES
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster, World
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.row_format import SAME
from megatron_moe_opt.schedules.schedule import Schedule
from megatron_moe_opt.topology.nodes import NodeMap
from tests.multirank.test_auto import write_profile
from tests.multirank.test_expert_order import WrappedRouter
from tests.multirank.test_netmoe import LAYERS, SHARED, at_random, by_content
from tests.ranks.layers import take_turns
from tests.ranks.training import training_log

NODES = NodeMap((0, 0, 1, 1))


def build(dispatcher: str, **settings: Any) -> Any:
    """A GPT on two nodes of two ranks."""
    from megatron_moe_opt.integration.layer import linked_blocks
    from tests.ranks.gpt import gpt

    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    linked_blocks._holders.cache_clear()
    try:
        settings = LAYERS | settings | {"moe_token_dispatcher_type": dispatcher}
        return gpt(distributed_optimizer=False, micro_batch=4, **settings)
    finally:
        del os.environ["GROUP_RANK"]
        linked_blocks._holders.cache_clear()


def forward(trained: Any) -> torch.Tensor:
    batch = trained.batch(0)
    return trained.model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])


def sent(trained: Any) -> dict[str, int]:
    """Bytes of all ranks' all-to-alls in a forward pass, by link."""
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter

    with TrafficCounter(NODES) as counter:
        forward(trained)
    return {row.link: row.bytes for row in counter.reduce() if row.collective == "all_to_all"}


def measure(settings: dict, options: Options | None) -> dict[str, Any]:
    """
    Args:
        options: where rows are narrower on the wire, samples go anywhere: with whole residuals to move, few would.
    """
    import megatron_moe_opt
    from megatron_moe_opt.dispatchers import sample_placement
    from megatron_moe_opt.integration.observe import reports
    from tests.ranks.megatron import parallel

    stock_solver = sample_placement.place_samples
    if not is_exact(options):
        sample_placement.place_samples = at_random
    try:
        with parallel(ep=4):
            stock = build("alltoall", **settings)
            megatron_moe_opt.register(options)
            ours = build("netmoe", **settings)
            megatron_moe_opt.register()
            ours.model.load_state_dict(stock.model.state_dict())
            for trained in (stock, ours):
                by_content(trained.model, None)
            reports.collect()  # what models of earlier tests sent
            forward(ours)  # learns
            reports.collect()
            stock_bytes, our_bytes = sent(stock), sent(ours)
            report = reports.collect()["netmoe"]
            again = reports.collect()
    finally:
        sample_placement.place_samples = stock_solver
    return {"stock": stock_bytes, "ours": our_bytes, "report": report, "again": again}


def is_exact(options: Options | None) -> bool:
    return options is None or options.wire == SAME


HOPS = Options(way="hops", network_levels=(2, 2), chunks=2)
TOP4 = {"moe_router_topk": 4}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, None),
        (SHARED, None),
        (SHARED, Options(wire="fp8")),
        (TOP4, HOPS),
        (SHARED, HOPS),
        (TOP4, replace(HOPS, wire="fp8")),
    ],
    ids=["plain", "shared", "shared-fp8", "hops", "hops-shared", "hops-fp8"],
)
def test_reported_bytes_are_those_sent(ranks, settings, options):
    results = ranks.run(measure, settings=settings, options=options)
    for result in results:
        report = result["report"]
        assert list(report) == [1, 2, 3, 4] and result["again"] == {}
        assert {number: values.keys() for number, values in report.items()} == {
            number: results[0]["report"][1].keys() for number in report
        }
        for link in ("inter-node", "intra-node"):
            for who, name in (("stock", f"stock {link} MB"), ("ours", f"{link} MB")):
                if who == "stock" and not is_exact(options):
                    continue  # what was rounded may ask for other experts
                total = sum(values[name] for values in report.values())
                assert total * 1e6 == pytest.approx(result[who][link], rel=1e-9), (who, link)
        moved = [values["moved across nodes %"] for values in report.values()]
        assert all(0 <= share <= 100 for share in moved) and max(moved) > 0
        assert all(values["moved across nodes %"] <= values["moved across devices %"] for values in report.values())
        assert all(values["solve ms"] > 0 for values in report.values())
        if is_exact(options) and "moe_shared_expert_intermediate_size" not in settings:
            # With experts that draw samples, moving them must pay; the last layer only brings them home.
            names = "stock inter-node MB", "inter-node MB"
            stock, ours = (sum(values[name] for values in report.values()) for name in names)
            assert ours < 0.95 * stock


def seen(*_: Any) -> None:
    """A hook that looks at what passes."""


def refusals() -> list[str]:
    from megatron_moe_opt.integration.layer import block_passes
    from tests.ranks.megatron import parallel

    texts = []
    with parallel(ep=4):
        trained = build("netmoe")
        batch, block = trained.batch(0), trained.model.module.decoder
        causal = torch.ones(4, 1, 32, 32).triu(1).bool()
        others = causal.clone()
        others[:, :, 5:, :5] = True  # as --reset-attention-mask makes them
        for mask, arguments in (
            (None, {"packed_seq_params": types.SimpleNamespace()}),
            (None, {"padding_mask": torch.zeros(4, 32, dtype=torch.bool)}),
            (None, {"rotary_pos_emb": torch.zeros(32, 4, 1, 16)}),
        ):
            try:
                block(torch.zeros(32, 4, 64), mask, **arguments)
            except ConfigurationError as error:
                texts.append(str(error))
        try:
            block_passes.BeginPass()(block, (), {"per_layer_inputs": [torch.zeros(32, 4, 2)]})
        except ConfigurationError as error:
            texts.append(str(error))
        probe = block.layers[0].mlp.register_forward_hook(seen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_passes, "say_once", lambda _, __, line: texts.append(line()))
            block_passes.BeginPass()(block, (), {})
            patch.setattr(seen, "__module__", "modelopt.torch.distill.distillation_model")
            try:
                block_passes.BeginPass()(block, (), {})
            except ConfigurationError as error:
                texts.append(str(error))
        probe.remove()
        trained.model(batch["tokens"], batch["position_ids"], causal, labels=batch["labels"])
        if dist.get_rank() == 2:  # the same object, changed between passes
            causal.copy_(others)
        with pytest.raises(ConfigurationError) as caught:
            trained.model(batch["tokens"], batch["position_ids"], causal, labels=batch["labels"])
    return [*texts, str(caught.value)]


class Sandwich(TransformerLayer):
    """A layer that norms once more after its experts."""

    def _forward_post_mlp(self, mlp_output_with_bias: Any, residual: torch.Tensor) -> torch.Tensor:
        raise AssertionError("never run: the model is refused")


class Scaled(MoELayer):
    """A MoE layer whose sums are scaled."""

    def postprocess(self, *args: Any) -> torch.Tensor:
        """Returns twice Megatron's."""
        return 2 * super().postprocess(*args)


def layers_of_their_own() -> tuple[str, list[str | None]]:
    """Returns what is said of a model that is built with such layers, and of one whose layers become so."""
    from megatron_moe_opt.integration.layer import linked_blocks
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        block = build("netmoe").model.module.decoder
        layer = block.layers[-1]
        bda = layer.mlp_bda
        said = [linked_blocks.block_adds_up_otherwise([layer.mlp])]
        for change, back in (
            (lambda: setattr(layer, "hidden_dropout", 0.1), lambda: setattr(layer, "hidden_dropout", 0.0)),
            (lambda: setattr(layer, "mlp_bda", partial(bda)), lambda: setattr(layer, "mlp_bda", bda)),
            (lambda: setattr(layer.mlp, "__class__", Scaled), lambda: setattr(layer.mlp, "__class__", MoELayer)),
        ):
            change()
            said.append(linked_blocks.adds_up_otherwise(block))
            back()
        for name in linked_blocks._OF_LAYERS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layer, name, layers_of_their_own, raising=False)
                assert f"has a TransformerLayer.{name} that is not" in linked_blocks.adds_up_otherwise(block)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigurationError) as caught:
            patch.setattr(gpt_layer_specs, "TransformerLayer", Sandwich)
            build("netmoe")
    return str(caught.value), said


def test_layers_that_add_up_otherwise_are_refused(ranks):
    for built, (none, dropout, bda, moe) in ranks.run(layers_of_their_own):
        assert none is None and "a TransformerLayer has a hidden_dropout of 0.1 of its own" in dropout
        assert "a TransformerLayer has an mlp_bda of its own" in bda
        assert "has a Scaled.postprocess that is not Megatron's" in moe
        assert "netmoe moves residuals with the sums of experts, and a Sandwich has a Sandwich._" in built


def kept_at_home() -> tuple[list[bool], float]:
    """Returns whether samples move in passes with causal masks and with one rank's unlike,
    under `auto`, and its error.
    """
    from megatron_moe_opt.integration.layer import block_passes, netmoe_layer
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        stock, ours = build("alltoall"), build("netmoe")
        ours.model.load_state_dict(stock.model.state_dict())
        for trained in (stock, ours):
            by_content(trained.model, None)
        block, batch = ours.model.module.decoder, ours.batch(0)
        placement = netmoe_layer.placement_of(block.layers[0])
        placement.order.stays_home, moved = True, []
        mask = torch.ones(4, 1, 32, 32).triu(1).bool()
        for unlike in (False, True):
            if unlike and dist.get_rank() == 2:
                mask[:, :, 5:, :5] = True
            expected, got = (
                trained.model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
                for trained in (stock, ours)
            )
            move = placement.order.running.decided[placement].decision.result().move
            moved.append(bool((move != np.arange(len(move))).any()))
        at_home = []
        probe = block.layers[0].register_forward_hook(seen)
        block_passes.BeginPass()(block, (), {})
        at_home.append(bool(placement.order.running.unlike))
        probe.remove()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_passes, "balances_ranks", lambda router: True)
            for samples in (1, 2):  # a loss of those that share a rank
                block_passes.BeginPass()(block, (), {"hidden_states": torch.zeros(32, samples, 64)})
                at_home.append(bool(placement.order.running.unlike) == (samples == 2))
        for given in ({"packed_seq_params": 1}, {"extract_layer_indices": {0}}, {}):
            if not given:
                replay = types.SimpleNamespace(router_replay_action="replay_forward")
                moe = block.layers[0].mlp
                moe.router.router_replay = replay
                moe.router = WrappedRouter(moe.router)
            block_passes.BeginPass()(block, (), given)
            at_home.append(bool(placement.order.running.unlike))
        return [*moved, all(at_home)], ((got - expected).norm() / expected.norm()).item()


def test_passes_whose_samples_cannot_move_do_not_end_auto(ranks):
    for (causal, unlike, packed), error in ranks.run(kept_at_home):
        assert causal and not unlike and packed and error < 1e-6


def routed_to_fewer() -> None:
    from megatron_moe_opt.runtime.moving_samples import sample_rows
    from tests.ranks.megatron import parallel

    stock = sample_rows.build_row_map_by_sample

    def promised(*given: Any) -> Any:
        row_map = stock(*given)
        return replace(row_map, num_rows=row_map.num_rows + 1)

    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_rows, "build_row_map_by_sample", promised)
        with pytest.raises(RuntimeError, match="were routed where --moe-router-topk gives .* NaNs"):
            forward(build("netmoe"))


def test_fewer_rows_than_promised_are_said_to_be_of_nans(ranks):
    ranks.run(routed_to_fewer)


def routed_to_more() -> str:
    """What is said where tokens of rank 1 alone have more experts than one that hops takes along."""
    import megatron_moe_opt
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        megatron_moe_opt.register(HOPS)
        try:
            trained = build("netmoe")
        finally:
            megatron_moe_opt.register()
        layers = [module for module in trained.model.modules() if isinstance(module, MoELayer)]
        take_turns(layers[-1], (3, 1) if dist.get_rank() == 1 else (2,))
        with pytest.raises(ConfigurationError) as raised:
            forward(trained)
    return str(raised.value)


def test_more_experts_than_a_token_that_hops_takes_along_are_refused_on_all_ranks(ranks):
    for said in ranks.run(routed_to_more):
        assert "tokens more experts than --moe-router-topk 2, which a token that hops takes along" in said


def test_what_would_have_to_move_is_refused(ranks):
    for texts in ranks.run(refusals):
        packed, padding, positions, others, hook, distilled, masks = texts
        assert "a hook on layers.0.mlp (tests.multirank.test_netmoe_traffic.seen) sees the samples" in hook
        assert "what a hook on layers.0.mlp (modelopt.torch.distill.distillation_model.seen) sees" in distilled
        assert "positions of each sample would not follow: use monta" in positions
        assert "per_layer_inputs of TransformerBlock would not follow: use monta" in others
        assert "but rank 2 has another: drop --reset-attention-mask, or use monta" in masks
        assert "packed sequences would not follow: use monta" in packed
        assert "padding masks would not follow: use monta" in padding


def logged() -> tuple[list[str], list[tuple[str, float, int]]]:
    """The lines and TensorBoard values of a training loop that logs every second iteration."""
    from megatron_moe_opt.integration.observe import reports
    from tests.ranks.megatron import parallel

    with parallel(ep=4), training_log() as (log, scalars, output):
        trained = build("netmoe", num_layers=2)
        reports.collect()
        trained.forward_backward(forward_only=True)  # in training mode, as rollouts: none of its passes counts
        assert not reports.collect()
        for iteration in (1, 2):
            forward(trained)
            log(iteration)
    return [line for line in output.getvalue().splitlines() if "netmoe: 2 layer(s)" in line], scalars


def test_megatron_s_training_log_is_followed_by_ours(ranks):
    results = ranks.run(logged)
    for rank, (lines, scalars) in enumerate(results):
        assert len(lines) == (rank == 3)  # the last rank prints, as in Megatron
        assert {iteration for _, _, iteration in scalars} == {2}
        assert {name for name, _, _ in scalars} >= {"netmoe/inter-node MB/layer 1", "netmoe/solve ms/layer 2"}
    assert "netmoe: 2 layer(s): inter-node " in results[3][0][0]


def test_a_placement_that_sends_more_between_nodes_is_warned_of():
    from megatron_moe_opt.integration.observe import netmoe_report

    numbers = ("moved across nodes %", "moved across devices %", "solve ms", "exposed ms", "intra-node MB")
    same = dict.fromkeys((*numbers, "stock intra-node MB"), 1.0)
    less = same | {"inter-node MB": 1.0, "stock inter-node MB": 2.0}
    more = same | {"inter-node MB": 3.5, "stock inter-node MB": 2.0}
    assert netmoe_report.lines({}) == []
    (line,) = netmoe_report.lines({1: less, 2: less})
    assert line.startswith("netmoe: 2 layer(s): inter-node 4.000 -> 2.000 MB (-50.0 %)")
    assert "warning: placement adds traffic between nodes" in netmoe_report.lines({1: less, 2: more})[1]


def recorded_step(layout: dict[str, int], options: Options | None) -> list[Schedule]:
    """The schedules of a forward and a backward pass."""
    import megatron_moe_opt
    from megatron_moe_opt.runtime.engine.recording import recording
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        megatron_moe_opt.register(options)
        trained = build("netmoe", moe_ffn_hidden_size=64, num_layers=2)
        megatron_moe_opt.register()
        by_content(trained.model, None)
        with recording() as timelines:
            forward(trained).sum().backward()
        return [timeline.schedule for timeline in timelines]


def test_the_ops_that_run_are_those_that_the_planner_plays(ranks, tmp_path):
    """Four passes a layer, whose ops are equal but for the number of their rows."""
    file = write_profile(tmp_path / "cluster.json", World((0, 0, 1, 1), ep=2, expert_tp=2), (2,))
    layer = LayerWorkload(128, 64, 32, False, 8, 2, 4, LANE_BYTES, 2, 2, placement_saving=0.25)
    (one,) = (one for one in candidates(layer, Cluster.load(file))[0] if one.variant == "netmoe")
    out, back, *backward = (part.schedule for part in one.timelines if any(op.group for op in part.schedule.ops))
    for schedules in ranks.run(recorded_step, layout={"ep": 2, "etp": 2}, options=None):
        layers = len(schedules) // 4
        played = [out, back] * layers + backward * layers
        assert layers == 2 and len(schedules) == len(played)
        for ran, predicted in zip(schedules, played, strict=True):
            assert [replace(op, size=0) for op in ran.ops] == [replace(op, size=0) for op in predicted.ops]
            width = layer.row_bytes if predicted is backward[0] else layer.packed_row_bytes
            assert all(op.size % width == 0 for op in ran.ops)
    whole = 128 * 2  # rows; of each a quarter's bytes between nodes are saved
    assert [part.ops[0].size for part in (out, backward[0])] == [
        round(0.75 * whole * width) for width in (layer.packed_row_bytes, layer.row_bytes)
    ]


@pytest.mark.parametrize(("etp", "workers", "inside"), [(1, (2, 2), "tokens.1"), (2, (2,), "expert-tp")])
def test_the_hops_that_run_are_those_that_the_planner_plays(ranks, tmp_path, etp, workers, inside):
    sizes, world = {"ep": 4 // etp, "etp": etp}, World((0, 0, 1, 1), ep=4 // etp, expert_tp=etp)
    file = write_profile(tmp_path / "cluster.json", world, workers)
    layer = LayerWorkload(
        128, 64, 64 // etp, False, 8, 2, 4, LANE_BYTES, 4 // etp, etp, workers=workers, placement_saving=0.25
    )
    (one,) = (one for one in candidates(layer, Cluster.load(file))[0] if one.variant == "netmoe:hopsx2")
    out, back, *backward = (part.schedule for part in one.timelines if any(op.group for op in part.schedule.ops))
    for schedules in ranks.run(recorded_step, layout=sizes, options=replace(HOPS, network_levels=workers)):
        layers, token = 2, 64 * 4
        played = [(out, token + 32), (back, token + 16)] * layers  # facts and a note; a key
        played += [(backward[0], token), (backward[1], token + 16)] * layers  # gradients of probabilities
        assert len(schedules) == len(played)
        for ran, (predicted, width) in zip(schedules, played, strict=True):
            assert [replace(op, size=0) for op in ran.ops] == [replace(op, size=0) for op in predicted.ops]
            assert all(op.size % width == 0 for op in ran.ops)
            sizes_inside = [op.size for op in predicted.ops if op.group == inside]
            assert sizes_inside and all(size % width == 0 for size in sizes_inside)
