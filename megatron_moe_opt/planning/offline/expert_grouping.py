"""Experts that the same samples use, put on the same node and rank (for NetMoE, over whole training runs).

What NetMoE sends between nodes depends on the nodes of the experts and on those of the samples, which it chooses anew
for every pass and pair of layers. Here both are chosen, the experts once for all passes. With either of them given, the
other is a transportation problem that is solved exactly, so the two take turns until nothing gets better (as in
k-means); the sum of what stays inside the groups grows with every turn. That ends in a local optimum: several starts
are tried, the order at hand among them, and the best one is taken. Ranks inside a node come after nodes, in the same
way.

Everything is whole numbers, in float64 where they are multiplied: equal traces give equal groups everywhere.

Shapes: P passes, L MoE layers, Q = L - 1 pairs of consecutive ones, I samples, E experts, G groups, S samples that are
to be shared out over the groups in a pass and pair, F experts of a layer that are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STARTS = 8

Solve = Callable[[np.ndarray, int], np.ndarray]
"""A function: (cost [I, N], places of each sink) -> the sink of each row [I]; see kernels.solve_placement."""


def group_experts(counts: np.ndarray, nodes: int, ranks_per_node: int, solve: Solve) -> np.ndarray:
    """Returns the device of each expert, such that NetMoE's placement of the samples sends little.

    Args:
        counts: int64 [P, L, I, E], see RoutingTrace.counts; I and E are multiples of the devices, L is at least 2.
        solve: the solver of transportation problems.

    Returns:
        int64 [L, E], counted node after node; every device has as many experts of a layer.
    """
    passes, layers, samples, experts = counts.shape
    rng = np.random.default_rng(0)  # a trace has one answer
    counted = counts.astype(np.float64)
    everybody = np.broadcast_to(np.arange(samples), (passes, layers - 1, samples))
    everything = np.broadcast_to(np.arange(experts), (layers, experts))
    by_node = _group(_Counted(counted, everybody, everything), nodes, solve, rng)
    device = np.empty((layers, experts), np.int64)
    for node in range(nodes):
        ours = by_node.experts == node
        members = np.stack([np.flatnonzero(row) for row in ours])
        placed = by_node.samples == node
        inside = np.stack([[np.flatnonzero(pair) for pair in of_pass] for of_pass in placed])
        by_rank = _group(_Counted(counted, inside, members), ranks_per_node, solve, rng)
        np.put_along_axis(device, members, node * ranks_per_node + by_rank.experts, axis=1)
    return device


class _Counted:
    """The samples and experts that are to be shared out."""

    def __init__(self, counts: np.ndarray, samples: np.ndarray, experts: np.ndarray) -> None:
        """Takes the numbers of the samples [P, Q, S] and of the experts [L, F] that are shared out."""
        self.num_layers = len(experts)
        passes = np.arange(len(counts))[:, None]
        self.references = np.stack([counts[:, layer][..., experts[layer]] for layer in range(self.num_layers)], axis=2)
        """The tokens of all samples for the experts, [P, I, L, F], by which a start is chosen."""
        self.reference_numbers = samples[:, 0]

        def of(layer: int, pair: int) -> np.ndarray:
            return counts[:, layer][passes, samples[:, pair]][..., experts[layer]]

        self.pairs = [(of(pair, pair), of(pair + 1, pair)) for pair in range(self.num_layers - 1)]
        """The tokens of the first layer and of the second of each pair, [P, S, F]."""


@dataclass(frozen=True)
class _Groups:
    kept: int
    """Number of tokens whose sample and expert are in the same group."""
    experts: np.ndarray
    """The group of each expert in each layer, int64 [L, F]."""
    samples: np.ndarray
    """The group of each sample in each pass and pair of layers, int64 [P, Q, S]."""


def _group(part: _Counted, groups: int, solve: Solve, rng: np.random.Generator) -> _Groups:
    num_experts = part.references.shape[3]
    at_hand = np.tile(np.arange(num_experts) * groups // num_experts, (part.num_layers, 1))
    starts = [at_hand, *(_start(part, groups, solve, rng) for _ in range(STARTS if groups > 1 else 0))]
    found = [_take_turns(part, groups, start, solve) for start in starts]
    return max(found, key=lambda one: one.kept)  # the first of equals


def _start(part: _Counted, groups: int, solve: Solve, rng: np.random.Generator) -> np.ndarray:
    """Gives experts to the samples that use them most: one sample a group, of one pass, as
    unlike the others as can be.
    """
    of_pass = int(rng.integers(len(part.references)))
    profiles = part.references[of_pass, part.reference_numbers[of_pass]]  # [S, L, F]
    flat = profiles.reshape(len(profiles), -1)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-9)
    chosen = [int(rng.integers(len(flat)))]
    while len(chosen) < groups:
        likeness = (flat @ flat[chosen].T).max(axis=1)
        likeness[chosen] = np.inf
        chosen.append(int(likeness.argmin()))
    places = profiles.shape[2] // groups
    return np.stack([solve(-profiles[chosen, layer].T.astype(np.int64), places) for layer in range(part.num_layers)])


def _take_turns(part: _Counted, groups: int, experts: np.ndarray, solve: Solve) -> _Groups:
    best = _Groups(-1, experts, np.empty(0))
    while True:
        placed = _place_samples(part, groups, experts, solve)
        if placed.kept <= best.kept:
            return best
        best = placed
        experts = _place_experts(part, groups, placed.samples, solve)


def _place_samples(part: _Counted, groups: int, experts: np.ndarray, solve: Solve) -> _Groups:
    kept, placed = 0, []
    for pair, (first, second) in enumerate(part.pairs):
        gain = (first @ _one_hot(experts[pair], groups) + second @ _one_hot(experts[pair + 1], groups)).astype(np.int64)
        sinks = np.stack([solve(-of_pass, of_pass.shape[0] // groups) for of_pass in gain])
        kept += int(np.take_along_axis(gain, sinks[..., None], axis=2).sum())
        placed.append(sinks)
    return _Groups(kept, experts, np.stack(placed, axis=1))


def _place_experts(part: _Counted, groups: int, samples: np.ndarray, solve: Solve) -> np.ndarray:
    num_experts = part.references.shape[3]
    gain = np.zeros((part.num_layers, num_experts, groups))
    for pair, of_layers in enumerate(part.pairs):
        sinks = _one_hot(samples[:, pair], groups)
        for layer, tokens in zip((pair, pair + 1), of_layers, strict=True):
            gain[layer] += np.tensordot(tokens, sinks, axes=((0, 1), (0, 1)))
    return np.stack([solve(-of_layer.astype(np.int64), num_experts // groups) for of_layer in gain])


def _one_hot(numbers: np.ndarray, groups: int) -> np.ndarray:
    return (numbers[..., None] == np.arange(groups)).astype(np.float64)
