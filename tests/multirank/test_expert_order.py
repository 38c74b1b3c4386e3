"""Experts on other ranks than stock's: the same training, checkpoints that cross orders; and recorded routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankFailure

EXPERTS, LAYERS = 8, 2
SETTINGS = {"moe_aux_loss_coeff": 0.01, "optimizer_format": "fully_reshardable"}


def write_order(path: Path, ranks: int, seed: int, layers: int = LAYERS) -> Path:
    """A random order for the first layers."""
    rng = np.random.default_rng(seed)
    orders = {str(layer): rng.permutation(EXPERTS).reshape(ranks, -1).tolist() for layer in range(1, layers + 1)}
    order = {"format": "moe-opt expert order", "version": 1, "num_experts": EXPERTS, "nodes": 1, "ranks": ranks}
    path.write_text(json.dumps(order | {"layers": orders}))
    return path


def build(dispatcher: str, order: Path | None, **settings):
    import megatron_moe_opt
    from megatron_moe_opt.options import Options
    from tests.ranks.gpt import gpt

    megatron_moe_opt.register(Options(expert_order=order))
    try:
        return gpt(moe_token_dispatcher_type=dispatcher, **SETTINGS | settings)
    finally:
        megatron_moe_opt.register()


def train(
    layout: dict,
    dispatcher: str,
    order: Path | None,
    steps: int,
    save: str = "",
    load: str = "",
    wraps=False,
    first_batch: int = 0,
    **settings,
):
    """Losses of `steps` steps of one micro-batch; a checkpoint after the second one, or continued from one.

    Args:
        wraps: routers are of WrappedRouter.
    """
    from tests.ranks.megatron import parallel

    with parallel(**layout):
        job = build(dispatcher, order, microbatches=1, **settings)
        for layer in [one for one in job.model.modules() if wraps and hasattr(one, "router")]:
            layer.router = WrappedRouter(layer.router)
        job.step = first_batch
        if load:
            job.load(load)
            job.step = 2
        losses = job.train(2 if save else steps)
        if save:
            job.save(save)
            losses += job.train(steps - 2)
        return losses


class WrappedRouter(torch.nn.Module):
    """Calls parts of a router, and never the router itself, as LoRA's in Megatron Bridge does."""

    def __init__(self, router: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap = router

    def forward(self, hidden_states: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.to_wrap.routing(self.to_wrap.gating(hidden_states))


@pytest.mark.parametrize(
    ("layout", "dispatchers"),
    [({"ep": 4}, {"netmoe": False, "monta": True}), ({"pp": 2, "ep": 2}, {"parm": False})],
    ids=["ep4-netmoe-monta", "pp2-ep2-parm"],
)
def test_training_is_stocks(ranks, tmp_path, layout, dispatchers):
    """`dispatchers` tells of each whether routers are wrapped."""
    order = write_order(tmp_path / "order.json", layout["ep"], 1)
    # Without the loss of a rank's batch, of which netmoe makes another one. From batch 70 on a token's second and third
    # experts are 5e-5 apart at least; in batch 2 two are 7e-7 apart: on some processors rounding chooses.
    common = {"layout": layout, "steps": 3, "moe_aux_loss_coeff": 0.0, "first_batch": 70}
    stock = ranks.run(train, dispatcher="alltoall", order=None, **common)[0]
    for dispatcher, wraps in dispatchers.items():
        ours = ranks.run(train, dispatcher=dispatcher, order=order, wraps=wraps, **common)[0]
        assert torch.allclose(torch.tensor(ours), torch.tensor(stock), rtol=1e-6, atol=0), dispatcher


def test_checkpoints_cross_orders(ranks, tmp_path):
    layout = {"tp": 2, "ep": 2, "etp": 2}
    one, other = (write_order(tmp_path / f"{seed}.json", 2, seed) for seed in (1, 2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    def losses(dispatcher, order, **more):
        results = ranks.run(train, layout=layout, dispatcher=dispatcher, order=order, **more)
        assert all(result == results[0] for result in results)
        return torch.tensor(results[0])

    stock = losses("alltoall", None, steps=4)
    assert torch.allclose(losses("monta", one, steps=4, save=str(folder)), stock, rtol=1e-6, atol=0)
    # Stock finds every expert under its number, and so does another order.
    for dispatcher, order in (("alltoall", None), ("monta", other)):
        continued = losses(dispatcher, order, steps=2, load=str(folder))
        assert torch.allclose(continued, stock[2:], rtol=1e-6, atol=0), dispatcher


def refusals(folder: str) -> list[str]:
    """What is refused while a model is built or saved, on this rank."""
    from megatron_moe_opt.errors import ConfigurationError
    from tests.ranks.megatron import parallel

    texts = []
    with parallel(ep=4):
        job = build("monta", Path(folder, "order.json"), optimizer_format="dp_reshardable")
        state = build("alltoall", None).model.module.state_dict()
        mine = "order.json" if dist.get_rank() else "changed.json"
        saved = build("monta", Path(folder, "order.json"), microbatches=1)
        saved.sharded_state()
        saved.train(1)
        for attempt in (
            lambda: job.sharded_state(),
            lambda: job.model.module.state_dict(),
            lambda: job.model.module.load_state_dict(state),
            lambda: saved.model.module.load_state_dict(state),
            lambda: build("monta", Path(folder, mine)),
        ):
            with pytest.raises(ConfigurationError) as refused:
                attempt()
            texts.append(str(refused.value))
    return texts


def test_what_knows_experts_by_place_is_refused(ranks, tmp_path):
    write_order(tmp_path / "order.json", 4, 1)
    write_order(tmp_path / "changed.json", 4, 2)
    for texts in ranks.run(refusals, folder=str(tmp_path)):
        bucketed, plain, loaded, loaded_later, different = texts
        assert "optimizer states of format dp_reshardable" in bucketed
        assert "a plain state_dict names experts by their place" in plain
        assert "loads distributed checkpoints only" in loaded and loaded_later == loaded
        assert "--moe-opt-expert-order is a file with SHA-256 " in different


@pytest.mark.parametrize(
    ("dispatcher", "changes", "settings", "problem"),
    [
        (
            "alltoall",
            {},
            {},
            "is for --moe-token-dispatcher-type monta, parm, netmoe, mpmoe",
        ),
        ("monta", {"ranks": 2}, {}, "is for 2 ranks, but --expert-model-parallel-size is 4"),
        ("monta", {}, {"num_moe_experts": 16}, "is of 8 experts, but --num-experts is 16"),
        ("monta", {}, {"moe_grouped_gemm": True}, "does not work with --moe-grouped-gemm"),
        ("monta", {"layers": 1}, {}, "has no order for MoE layer 2, only for 1"),
    ],
)
def test_settings_are_refused_when_the_model_is_built(ranks, tmp_path, dispatcher, changes, settings, problem):
    order = write_order(tmp_path / "order.json", **{"ranks": 4, "seed": 1} | changes)
    with pytest.raises(RankFailure) as failure:
        ranks.run(train, layout={"ep": 4}, dispatcher=dispatcher, order=order, steps=0, **settings)
    assert len(failure.value.errors) == 4
    for _, kind, text in failure.value.errors:
        assert kind == "ConfigurationError" and problem in text and "\n" not in text


def record(file: Path, layout: dict, dispatcher: str, order: Path | None):
    """The trace of steps 2 and 3 of three, on rank 0; passes of the third are run twice, as Megatron's check for spikes
    of the loss has it.
    """
    from megatron_moe_opt.integration.observe.routing_recorder import RoutingRecorder, note_kinds
    from megatron_moe_opt.planning.traces.routing_trace import read_routing_trace
    from tests.ranks.megatron import parallel

    with parallel(**layout), RoutingRecorder(file, range(2, 4)):
        job = build(dispatcher, order)
        take = job.batch

        def batch(microbatch):
            taken = take(microbatch)
            note_kinds(taken["tokens"][:, 0] % 2, ("even", "odd"))
            return taken

        job.batch = batch
        for step in range(3):
            job.forward_backward(forward_only=True)  # as rollouts do, in training mode
            if step == 2:
                job.optimizer.zero_grad()
                job.forward_backward()
            job.train_step()
    return read_routing_trace(file) if dist.get_rank() == 0 else None


def test_recorded_routing_does_not_depend_on_layout_or_order(ranks, tmp_path):
    order = write_order(tmp_path / "order.json", 2, 1)
    file = tmp_path / "routing.npz"
    alone, *others = ranks.run(record, file=file, layout={"ep": 2}, dispatcher="alltoall", order=None)
    assert others == [None] * 3
    assert alone.experts.shape == (4, LAYERS, 8, 32, 2)  # 2 iterations of 2 passes; 4 ranks of 2 samples
    assert alone.iterations.tolist() == [2, 2, 3, 3] and alone.layers.tolist() == [1, 2]
    assert alone.kinds.shape == (4, 8) and set(alone.kinds.flatten().tolist()) == {0, 1}
    ordered = ranks.run(record, file=file, layout={"ep": 2}, dispatcher="monta", order=order)[0]
    assert np.array_equal(ordered.experts, alone.experts) and np.array_equal(ordered.kinds, alone.kinds)
    # 2 data-parallel ranks, each with half of the samples that 4 ranks have.
    for layout in ({"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "ep": 2}):
        trace = ranks.run(record, file=file, layout=layout, dispatcher="alltoall", order=None)[0]
        assert trace.experts.shape == (4, LAYERS, 4, 32, 2)
        assert trace.layers.tolist() == [1, 2]
