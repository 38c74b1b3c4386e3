"""Recorded routing under NetMoE: what every placement of the samples would have sent (NetMoE, section 3 and Table 5).

A placement decides two all-to-alls, the combine of a MoE layer and the dispatch of the next: a pair of layers. Three
placements are compared for each pair:

    stock       every sample on its own rank
    predicted   NetMoE's, from this layer's routing and what past passes make of the next one's, as in training
    oracle      NetMoE's, from this layer's routing and the next one's as it will be

The first layer's dispatch and the last one's combine are the same under all of them.

Shapes: P passes, L MoE layers, I samples, E experts, J devices, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_moe_opt.planning.predicting.next_layer import NextLayerPrediction, known_of_samples
from megatron_moe_opt.planning.predicting.placement_volume import (
    Volume,
    moved_shares,
    placement_volume,
    tokens_by_device,
)

PLANS = ("stock", "predicted", "oracle")

Place = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""A function of (tokens for each device [I, J], 0 to J - 1, device_node [J]) that returns the device of each sample
[I]; kernels.place_samples.
"""


@dataclass(frozen=True)
class Replay:
    """The tokens that were sent under each plan of placement."""

    volumes: dict[str, np.ndarray]
    """Tokens of both all-to-alls of a pair, int64 [P, L - 1, 3]: between nodes, between a node's
    devices, inside a device.
    """
    moved: dict[str, np.ndarray]
    """The shares of the samples that change their node, and their device, float64 [P, L - 1, 2]."""
    outside: np.ndarray
    """The mean share of a sample's tokens that are not for the node it has most tokens for, float64 [P, L - 1]."""
    ends: np.ndarray
    """The tokens, counted as in `volumes`, of the first layer's dispatch and the last one's combine, int64 [P, 3]."""
    heaviest: np.ndarray
    """The tokens of the device with most of them over the mean of all, float64 [P, L]."""

    def of_passes(self, begin: int, end: int) -> Replay:
        """Returns the replay of the passes [begin, end) alone, with what was learnt from those before."""
        part = slice(begin, end)
        volumes, moved = ({plan: of[part] for plan, of in whole.items()} for whole in (self.volumes, self.moved))
        return Replay(volumes, moved, self.outside[part], self.ends[part], self.heaviest[part])

    def reduction(self, plan: str, pair: int | None = None) -> float:
        """Returns the part of stock's tokens between nodes that a plan keeps inside nodes, of one pair of layers or of
        all.
        """
        stock, ours = (self._inter(name, pair) for name in ("stock", plan))
        return 1 - ours / stock if stock else 0.0

    def whole_reduction(self, plan: str) -> float:
        """Returns the reduction over all all-to-alls of the model, first dispatch and last combine included."""
        ends = int(self.ends[:, 0].sum())
        stock, ours = (self._inter(name, None) + ends for name in ("stock", plan))
        return 1 - ours / stock if stock else 0.0

    def share_of_oracle(self, pair: int | None = None) -> float:
        """Returns the predicted placement's reduction over the oracle's; 1 where there is nothing to reduce."""
        oracle = self.reduction("oracle", pair)
        return self.reduction("predicted", pair) / oracle if oracle else 1.0

    def volume(self, plan: str, pair: int | None = None) -> Volume:
        """Returns the tokens of a pass, on average and rounded: of one pair of layers, or of all together."""
        tokens = self.volumes[plan] if pair is None else self.volumes[plan][:, pair : pair + 1]
        return Volume(*(round(one) for one in tokens.sum(axis=1).mean(axis=0).tolist()))

    def _inter(self, plan: str, pair: int | None) -> int:
        tokens = self.volumes[plan][..., 0]
        return int(tokens.sum() if pair is None else tokens[:, pair].sum())


def replay(counts: np.ndarray, expert_device: np.ndarray, device_node: np.ndarray, place: Place) -> Replay:
    """Returns the tokens that each plan of placement would have sent in recorded passes.

    The passes are played in their order, and predictions learn from each after its samples were placed, as in training.

    Args:
        counts: int64 [P, L, I, E], see RoutingTrace.counts; I is a multiple of J, L at least 2.
        expert_device: the device of each expert of each layer, integers [L, E].
        device_node: the node of each device, integers [J].
        place: the solver that places samples.
    """
    passes, layers, samples, _ = counts.shape
    home = np.arange(samples) * len(device_node) // samples
    devices = np.arange(len(device_node))
    inputs = [known_of_samples(counts[0, pair], _before(counts[0], pair)).shape[1] for pair in range(layers - 1)]
    predictions = [NextLayerPrediction(width, len(device_node)) for width in inputs]
    volumes = {plan: np.zeros((passes, layers - 1, 3), np.int64) for plan in PLANS}
    moved = {plan: np.zeros((passes, layers - 1, 2)) for plan in PLANS}
    outside = np.zeros((passes, layers - 1))
    ends = np.zeros((passes, 3), np.int64)
    heaviest = np.zeros((passes, layers))

    def of_layer(p: int, layer: int) -> np.ndarray:
        return tokens_by_device(counts[p, layer], expert_device[layer], len(device_node))

    for p in range(passes):
        on_device = [of_layer(p, layer) for layer in range(layers)]
        ends[p] = np.add(*(_row(placement_volume(on_device[end], home, device_node)) for end in (0, -1)))
        loads = np.array([one.sum(axis=0) for one in on_device])
        heaviest[p] = loads.max(axis=1) / loads.mean(axis=1)
        at = dict.fromkeys(PLANS, home)
        for pair in range(layers - 1):
            known, following = known_of_samples(counts[p, pair], _before(counts[p], pair)), on_device[pair + 1]
            both = on_device[pair] + following
            outside[p, pair] = _outside_best_node(both, device_node)
            asked = {"predicted": predictions[pair].predict(known), "oracle": following}
            for plan in PLANS:
                before = at[plan]
                if plan in asked:
                    at[plan] = place(on_device[pair] + asked[plan], devices, device_node)
                volumes[plan][p, pair] = _row(placement_volume(both, at[plan], device_node))
                moved[plan][p, pair] = moved_shares(before, at[plan], device_node)
            predictions[pair].observe(known, following)
    return Replay(volumes, moved, outside, ends, heaviest)


def decided_share(counts: np.ndarray, expert_device: np.ndarray, device_node: np.ndarray) -> float:
    """Returns the share of stock's tokens between nodes that placements decide: those of all all-to-alls but the first
    layer's dispatch and the last one's combine. About (L - 1) / L; 0 where nothing crosses nodes.

    Args:
        counts: int64 [P, L, I, E]; I is a multiple of J.
        expert_device: the device of each expert of each layer, integers [L, E].
        device_node: the node of each device, integers [J].
    """
    home = np.arange(counts.shape[2]) * len(device_node) // counts.shape[2]
    inter = np.zeros(counts.shape[:2], np.int64)
    for p, layer in np.ndindex(inter.shape):
        on_device = tokens_by_device(counts[p, layer], expert_device[layer], len(device_node))
        inter[p, layer] = placement_volume(on_device, home, device_node).inter
    both = 2 * int(inter.sum())
    return 1 - int(inter[:, [0, -1]].sum()) / both if both else 0.0


def _before(counts: np.ndarray, layer: int) -> np.ndarray | None:
    """Returns the counts of the layer before this one, of a pass [L, I, E]; None in the first layer."""
    return counts[layer - 1] if layer else None


def _row(volume: Volume) -> np.ndarray:
    return np.array([volume.inter, volume.intra, volume.local])


def _outside_best_node(on_device: np.ndarray, device_node: np.ndarray) -> float:
    on_node = np.zeros((len(on_device), int(device_node.max()) + 1))
    np.add.at(on_node.T, device_node, on_device.T)
    return float((1 - on_node.max(axis=1) / on_node.sum(axis=1)).mean())
