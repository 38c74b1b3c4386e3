"""Small routing traces for tests."""

from __future__ import annotations

import numpy as np

from megatron_moe_opt.planning.traces.routing_trace import RoutingTrace


def trace_of(experts: np.ndarray, num_experts: int, **changes) -> RoutingTrace:
    """A trace of experts [P, L, I, T, K] from iteration 1 and layer 1 on, samples alternately of two kinds."""
    passes, layers, samples, _, _ = experts.shape
    fields = {
        "experts": experts.astype(np.uint16),
        "num_experts": num_experts,
        "layers": np.arange(1, layers + 1),
        "iterations": np.arange(1, passes + 1),
        "kinds": np.tile(np.arange(samples, dtype=np.int16) % 2, (passes, 1)),
        "kind_names": ("prose", "code"),
    }
    return RoutingTrace(**fields | changes)


def random_trace(seed: int = 0, shape: tuple[int, ...] = (4, 3, 8, 16, 2), num_experts: int = 8) -> RoutingTrace:
    """Uniform routing."""
    keys = np.random.default_rng(seed).random((*shape[:-1], num_experts))
    return trace_of(keys.argsort(axis=-1)[..., : shape[-1]], num_experts)


def planted_trace(seed: int = 0, passes: int = 8, groups: int = 4) -> tuple[RoutingTrace, np.ndarray]:
    """Samples that use the experts of their group only, in 3 layers of 4 experts a group.

    Returns the trace (4 samples a group and pass) and the group of each expert [L, E], a random one for each layer.
    """
    rng = np.random.default_rng(seed)
    experts = 4 * groups
    group_of = np.stack([rng.permutation(np.repeat(np.arange(groups), 4)) for _ in range(3)])
    chosen = np.empty((passes, 3, 4 * groups, 16, 2), int)
    for p in range(passes):
        of_samples = rng.permutation(np.repeat(np.arange(groups), 4))
        for layer in range(3):
            for sample, group in enumerate(of_samples):
                ours = np.flatnonzero(group_of[layer] == group)
                chosen[p, layer, sample] = ours[rng.random((16, 4)).argsort(axis=1)[:, :2]]
    return trace_of(chosen, experts), group_of
