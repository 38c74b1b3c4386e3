"""NetMoE's assignment problem (eqs. 5-10) for planning on a machine without the compiled extension: scipy solves it.

Both functions take and return what `kernels.solve_placement` and `kernels.place_samples` do, on NumPy arrays, and reach
the same costs. Where several placements cost the same they may return another one. Memory grows with the square of the
samples.

Shapes: I samples, E experts, J devices, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def solvers() -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
    """Returns (solve_placement, place_samples): the extension's where there is one, else those of this module."""
    try:
        from megatron_moe_opt import kernels
    except ImportError:  # PyTorch, or the extension
        return solve_placement, place_samples
    return kernels.solve_placement, kernels.place_samples


def solve_placement(cost: np.ndarray, capacity: np.ndarray | int) -> np.ndarray:
    """Returns the sink of each sample, int64 [I], for the least total cost [I, N] with capacity[n] samples at most on
    sink n.

    Raises:
        ValueError: too little capacity.
    """
    from scipy.optimize import linear_sum_assignment

    samples, sinks = cost.shape
    places = np.minimum(np.broadcast_to(capacity, sinks), samples)
    sink_of_place = np.repeat(np.arange(sinks), places)
    if len(sink_of_place) < samples:
        raise ValueError(f"capacity for {len(sink_of_place)} samples, but there are {samples}")
    return sink_of_place[linear_sum_assignment(cost[:, sink_of_place])[1]]


def place_samples(
    num: np.ndarray, expert_device: np.ndarray, device_node: np.ndarray, capacity: np.ndarray | None = None
) -> np.ndarray:
    """Returns the device of each sample, int64 [I]: nodes by the tokens between nodes first (eq. 6), then devices of
    each node by the tokens between its devices (eq. 7).

    Args:
        num: [I, E], tokens that a sample exchanges with an expert. expert_device: [E]. device_node: [J].
        capacity: [J], samples that a device takes; None: I / J.
    """
    samples, devices = len(num), len(device_node)
    if capacity is None:
        if samples % devices:
            raise ValueError(f"{samples} samples are no multiple of {devices} devices: give capacities")
        capacity = np.full(devices, samples // devices)
    kept_on_device = num @ (expert_device[:, None] == np.arange(devices))
    on_node = device_node[:, None] == np.arange(device_node.max() + 1)
    node = solve_placement(-(kept_on_device @ on_node), capacity @ on_node)
    placed = np.empty(samples, dtype=np.int64)
    for number, members in enumerate(on_node.T):
        of_node, there = np.flatnonzero(node == number), np.flatnonzero(members)
        placed[of_node] = there[solve_placement(-kept_on_device[np.ix_(of_node, there)], capacity[there])]
    return placed
