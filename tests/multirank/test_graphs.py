"""A router in a CUDA graph (--cuda-graph-scope moe_router): what Megatron captures, and goes on with when it replays.

No graph is captured on a CPU. Megatron's own capture and replay of the Python around it are played: a layer that is
being captured ends behind its router, and one that replays takes what the graph has left in its store.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from tests.ranks.devices import same


def replay(dispatcher: str, options: Options | None, layout: dict[str, int]) -> list[str]:
    """What differs between a pass in one piece and one in two: the router's, and what goes on behind it."""
    from megatron.core.transformer.moe import moe_utils

    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config, parallel

    with parallel(**layout), pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(11 + dist.get_rank())
        megatron_moe_opt.register(options)
        config = moe_config(
            moe_token_dispatcher_type=dispatcher,
            moe_shared_expert_intermediate_size=32,
            cuda_graph_impl="transformer_engine",
            cuda_graph_scope=["moe_router"],
        )
        layer = build_layer(config)
        megatron_moe_opt.register()
        tokens = torch.randn(24, 3, config.hidden_size)
        results = []
        for graphed in (False, True):
            hidden = tokens.clone().requires_grad_()
            if graphed:
                store = layer.cudagraph_tensor_store
                with patch.context() as capturing:
                    capturing.setattr(moe_utils, "is_graph_capturing", lambda: True)
                    capturing.setattr(layer.token_dispatcher, "dispatch_preprocess", None)  # called by no capture
                    through, probs, routing_map, shared = layer(hidden)
                assert through is hidden
                store.set(probs=probs, routing_map=routing_map, shared_expert_output=shared)
                output, _ = layer(through)
                store.clear()
            else:
                output, _ = layer(hidden)
            layer.zero_grad()
            output.square().sum().backward()
            gradients = {name: one.grad.clone() for name, one in layer.named_parameters() if one.grad is not None}
            results.append({"output": output.detach(), "input": hidden.grad, **gradients})
    plain, split = results
    assert plain.keys() == split.keys() and any("router" in name for name in plain)
    return [name for name in plain if not same(plain[name], split[name])]


@pytest.mark.parametrize(
    ("dispatcher", "options", "layout"),
    [
        ("monta", Options(monta_level="O3", chunks=2), {"ep": 2, "etp": 2}),
        ("parm", None, {"tp": 2, "ep": 2, "etp": 2}),
        ("mpmoe", Options(partitions=2), {"ep": 4}),
        ("expert-migration", Options(network_levels=(2, 2), domain_sizes=(2, 1)), {"ep": 4}),
    ],
)
def test_a_pass_goes_on_behind_a_graph_of_its_router(ranks, dispatcher, options, layout):
    assert ranks.run(replay, dispatcher=dispatcher, options=options, layout=layout) == [[]] * 4
