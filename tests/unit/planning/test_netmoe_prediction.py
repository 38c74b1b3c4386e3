"""How near decisions come to those of an oracle that knows the next layer's counts (run with -s for the table)."""

from __future__ import annotations

from statistics import median

import numpy as np

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.predicting.next_layer import NextLayerPrediction
from megatron_moe_opt.planning.predicting.placement_volume import placement_volume, tokens_by_device

DEVICES, NODE = 8, np.arange(8) // 4
LEARNT, MEASURED = 10, 20  # passes
SETTINGS = ((8, 0.1, 1.0), (8, 0.5, 1.0), (16, 0.2, 0.5), (4, 0.3, 0.5))
"""Topics, how a sample mixes them, and their taste for experts."""


class Frequencies:
    """The paper's way: of the tokens at expert e, how many go to each device next, averaged over passes."""

    def __init__(self, num_experts: int) -> None:
        self.pairs = np.zeros((num_experts, DEVICES))

    def observe(self, num: np.ndarray, then: np.ndarray) -> None:
        self.pairs = 0.9 * self.pairs + num.T @ then

    def predict(self, num: np.ndarray) -> np.ndarray:
        shares = self.pairs / self.pairs.sum(1, keepdims=True).clip(1e-9)
        return np.rint(num @ shares).astype(np.int64)


class Nothing:
    """This layer's combine alone."""

    def observe(self, num: np.ndarray, then: np.ndarray) -> None:
        pass

    def predict(self, num: np.ndarray) -> np.ndarray:
        return np.zeros((len(num), DEVICES), np.int64)


def passes(samples: int, experts: int, topics: int, mixture: float, taste: float):
    """Each sample mixes topics, and each topic has experts of its own in each layer; 1024 tokens, top-2."""
    generator = np.random.default_rng(samples + topics)
    layers = [generator.dirichlet(np.full(experts, taste), size=topics) for _ in range(2)]
    for _ in range(LEARNT + MEASURED):
        mixtures = generator.dirichlet(np.full(topics, mixture), size=samples)
        yield [np.stack([generator.multinomial(2048, mix @ layer) for mix in mixtures]) for layer in layers]


def shares_of_the_oracle(*setting) -> dict[str, float]:
    samples, experts = setting[:2]
    expert_device = np.repeat(np.arange(DEVICES), experts // DEVICES)
    home = np.repeat(np.arange(DEVICES), samples // DEVICES)
    ways = {"combine": Nothing(), "frequencies": Frequencies(experts)}
    ways["learnt"] = NextLayerPrediction(experts, DEVICES)
    sent = dict.fromkeys([*ways, "oracle", "home"], 0)
    for index, (num, next_num) in enumerate(passes(*setting)):
        here, then = (tokens_by_device(counts, expert_device, DEVICES) for counts in (num, next_num))
        wanted = {name: here + way.predict(num) for name, way in ways.items()} | {"oracle": here + then}
        placed = {name: place_samples(tokens, np.arange(DEVICES), NODE) for name, tokens in wanted.items()}
        if index >= LEARNT:
            for name, device in (placed | {"home": home}).items():
                sent[name] += sum(placement_volume(tokens, device, NODE).inter for tokens in (here, then))
        for way in ways.values():
            way.observe(num, then)
    best = sent["home"] - sent["oracle"]
    return {name: (sent["home"] - sent[name]) / best for name in ways}


def test_predictions_come_near_the_oracle():
    results = [
        shares_of_the_oracle(samples, experts, topics, mixture, taste)
        for samples, experts, settings in ((16, 16, SETTINGS), (64, 32, SETTINGS[:2]), (128, 64, SETTINGS[2:3]))
        for topics, mixture, taste in settings
    ]
    for name in results[0]:
        shares = [result[name] for result in results]
        print(f"{name:14} {min(shares):.0%} to {max(shares):.0%}, median {median(shares):.0%}")
    for result in results:
        assert result["learnt"] > 0.85
        assert result["learnt"] > result["frequencies"]
    assert median(result["learnt"] for result in results) > 0.95
