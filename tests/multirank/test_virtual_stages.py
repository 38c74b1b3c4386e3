"""Interleaved pipelines: two virtual stages a rank, whose outputs are sent while Megatron goes on and frees them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

from megatron_moe_opt.options import Options
from tests.ranks.pool import RankPool

# As Megatron-LM configures a pipeline without stages to interleave, and one with them.
PLAIN = {"deallocate_pipeline_outputs": True}
INTERLEAVED = PLAIN | {"overlap_p2p_comm": True, "batch_p2p_comm": False}
RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP_RANKS_HOLD_ALL = {"tp": 2, "sequence_parallel": False}
FLUSH = INTERLEAVED | {"overlap_p2p_comm_warmup_flush": True}


def named_parameters(trained: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by the name that they have in the whole model, whatever stage holds their layer."""
    found = {}
    for chunk in trained.chunks:
        layers = chunk.module.decoder.layers
        for name, parameter in chunk.module.named_parameters():
            head, _, rest = name.partition("decoder.layers.")
            if rest:
                index, _, rest = rest.partition(".")
                name = f"{head}decoder.layers.{layers[int(index)].layer_number}.{rest}"
            found[name] = parameter
    return found


def train(
    dispatcher: str, vpp: int | None, options: Options | None = None, steps: int = 2, tp: int = 1, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of steps from weights that depend on names alone, and this rank's gradients of the last."""
    from megatron.core import parallel_state

    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with parallel(pp=2, tp=tp, ep=2, vpp=vpp):
        megatron_moe_opt.register(options)
        try:
            trained = gpt(
                moe_token_dispatcher_type=dispatcher,
                microbatches=4,
                distributed_optimizer=False,
                **settings,
            )
        finally:
            megatron_moe_opt.register()
        for name, parameter in named_parameters(trained).items():
            if parameter.dim() > 1:
                experts = parallel_state.get_expert_model_parallel_rank() if ".local_experts." in name else 0
                seed = zlib.crc32(name.encode()) + experts
                parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
        losses = trained.train(steps)
        return losses, {name: parameter.main_grad.clone() for name, parameter in named_parameters(trained).items()}


def of_all_ranks(results: list[tuple[list[float], dict[str, torch.Tensor]]]) -> dict[tuple[int, str], torch.Tensor]:
    """Gradients of the whole model by the place of a rank in its expert-parallel group, and name."""
    return {
        (rank % 2, name): gradient for rank, (_, of_rank) in enumerate(results) for name, gradient in of_rank.items()
    }


def plains(ranks: RankPool, **model: Any) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """What each rank of a plain pipeline under stock has from `train`, once for all tests of the same model."""
    if (key := str(model)) not in _plains:
        _plains[key] = ranks.run(train, dispatcher="alltoall", vpp=None, **PLAIN, **model)
    return _plains[key]


_plains: dict[str, list[tuple[list[float], dict[str, torch.Tensor]]]] = {}


@pytest.mark.parametrize(
    ("dispatcher", "settings"),
    [
        ("alltoall", FLUSH),
        ("monta", INTERLEAVED | {"options": Options(monta_level="O2", chunks=2)}),
        ("mpmoe", INTERLEAVED | {"options": Options(partitions=2, memory_reuse="S4", way="hops")}),
        ("mpmoe", INTERLEAVED | {"options": Options(partitions=2, chunks=2)}),
        ("mpmoe", INTERLEAVED | TP_RANKS_HOLD_ALL | {"options": Options(partitions=2, way="shared-rows")}),
        ("expert-migration", INTERLEAVED | {"options": Options(network_levels=(2,), domain_sizes=(2,))}),
        ("netmoe", INTERLEAVED | RECOMPUTE_ALL | {"options": Options(way="hops", chunks=2)}),
    ],
)
def test_training_is_that_of_a_plain_pipeline(ranks, dispatcher, settings):
    common = {"num_layers": 4, "tp": settings.get("tp", 1)}
    if dispatcher == "netmoe":  # moves samples between the layers of one stage
        common |= {"steps": 1, "num_layers": 8, "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
    plain = plains(ranks, **common)
    ours = ranks.run(train, dispatcher=dispatcher, vpp=2, **settings | common)
    assert ours[0][0] == pytest.approx(plain[0][0], rel=1e-6)
    expected, got = of_all_ranks(plain), of_all_ranks(ours)
    assert set(got) == set(expected)
    for key, gradient in expected.items():
        error = (got[key] - gradient).norm() / gradient.norm().clamp_min(1e-20)
        assert error < 1e-4, f"{key}: {error}"
