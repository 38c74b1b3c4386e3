"""torch.utils.checkpoint without re-entry, around MoE layers and around their experts, under every dispatcher.

What a layer saves is dropped, and the layer runs again where its backward pass first asks for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import Options
from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from tests.multirank.test_dispatchers import SHARED
from tests.multirank.test_expert_migration import layers
from tests.ranks.layers import BesideStock

CUT, WHOLE = {"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 4, "etp": 1}
DISPATCHERS = [
    (CUT, "monta", {"monta_level": "O3", "chunks": 3}),
    (CUT, "parm", {"parm_schedule": "S1"}),
    (CUT, "deepspeed", {}),
    *((CUT, "mpmoe", {"partitions": 3, "memory_reuse": strategy}) for strategy in STRATEGIES),
    (WHOLE, "mpmoe", {"partitions": 1, "memory_reuse": "none"}),
    (WHOLE, "expert-migration", {"network_levels": (4,), "domain_sizes": (2,)}),
    (WHOLE, "expert-migration", {"network_levels": (4,), "domain_sizes": (2,), "resident_layers": 2}),
]


def checkpointed(module: Any) -> None:
    """Has a module drop what it saves for its backward pass."""
    forward = module.forward
    module.forward = lambda *inputs, **named: checkpoint(forward, *inputs, use_reentrant=False, **named)


def worst_errors(where: str) -> dict[str, tuple[float, str]]:
    """Returns the worst errors of two passes, whose backward passes come after both, against
    stock's without checkpoint.
    """
    from tests.ranks.megatron import parallel

    worst = {}
    for layout, dispatcher, options in DISPATCHERS:
        if (where, dispatcher) == ("experts", "expert-migration"):
            continue  # refused
        with parallel(**layout):
            beside = BesideStock(SHARED, steps=2, together=True)
            layer = beside.ours(dispatcher, Options(**options))
            checkpointed(layer.experts if where == "experts" else layer)
            errors = beside.errors(beside.run(layer))
            worst[f"{dispatcher} {options}"] = max((error, name) for name, error in errors.items())
    return worst


@pytest.mark.parametrize("where", ["layer", "experts"])
def test_results_are_stocks(ranks, where):
    for errors in ranks.run(worst_errors, where=where):
        wrong = {name: error for name, error in errors.items() if error[0] >= 1e-6}
        assert not wrong, wrong


def bytes_handed_on(residents: list[int | str]) -> list[int]:
    """Returns the bytes that hooks around a layer are given of what it saves, by the layers whose experts stay."""
    from tests.ranks.megatron import parallel

    found = []
    with parallel(ep=4):
        for resident_layers in residents:
            options = Options(network_levels=(4,), domain_sizes=(2,), resident_layers=resident_layers)
            layer, sizes = BesideStock({}).ours("expert-migration", options), []

            def hand_on(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
                sizes.append(tensor.nbytes)
                return tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(hand_on, lambda saved: saved):
                output, _ = layer(torch.randn(256, 4, layer.config.hidden_size, requires_grad=True))
            output.sum().backward()
            found.append(sum(sizes))
    return found


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="before PyTorch 2.8")
def test_what_experts_save_is_handed_on_where_others_travel(ranks):
    """Of experts that may be dropped only their weights are kept otherwise."""
    for may_go, stay in ranks.run(bytes_handed_on, residents=[2, "all"]):
        assert 0.8 * stay < may_go <= stay


def recompute_travelled_experts() -> None:
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (layer,) = layers(1)
        checkpointed(layer.experts)
        output, _ = layer(torch.randn(12, 3, 64))
        with pytest.raises(ConfigurationError, match="put torch.utils.checkpoint around the MoE layer"):
            output.sum().backward()


def test_travelled_experts_are_not_recomputed_with_other_weights(ranks):
    ranks.run(recompute_travelled_experts)


def recompute_layers_whose_samples_move() -> None:
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        trained = gpt(moe_token_dispatcher_type="netmoe", moe_aux_loss_coeff=0.0)
        checkpointed(trained.model.module.decoder.layers[0].mlp)
        with pytest.raises(ConfigurationError, match="netmoe"):
            trained.forward_backward()


def test_layers_whose_samples_move_are_not_recomputed(ranks):
    ranks.run(recompute_layers_whose_samples_move)
