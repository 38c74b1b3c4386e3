"""Seeded routing with the locality that NetMoE's paper measured (Table 5), where no such model can be trained.

A sample is about a few topics (Dirichlet), a topic prefers some nodes, and on each some experts (log-normal both), and
every token draws its experts from the preferences of its sample, without replacement. Preferences are balanced so that
all experts get as many tokens on average, as a trained router's do.

From layer to layer the normal variables behind the preferences are an autoregression, rho of each with sqrt(1 - rho^2)
of a new one: every layer has preferences of the same distribution, and every two layers in a row the same correlation.
So each pair of layers is as local as any other, however deep the model.

What Table 5 counts: s_intra and s_inter of a row add up to (J - 1) / J of one all-to-all of all tokens in float32 (or,
which is the same, of a combine and the next dispatch, the two that a placement decides by eq. 5, in 16 bits): all that
leaves a device. They are means over iterations of one all-to-all, not sums over a model's layers, and no first dispatch
or last combine can be told from them. So a row is what a pair of layers should give: its combine and its dispatch.

Two numbers, how much a topic prefers nodes and experts to others, are fitted to each row of the table: with optimal
placement as many tokens cross nodes, and as many cross devices of a node, as there. Preferences for experts alone,
whatever their nodes, cannot give the table's reductions: in a default order, experts of a node are no more alike than
others.

Shapes: P passes, L MoE layers, I samples of T tokens, K experts of a token, E experts, C topics, N nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_moe_opt.planning.traces.routing_trace import UNKNOWN, RoutingTrace

TOPICS = 512  # more than samples of a pass, so that seeds differ little
TOPICS_OF_A_SAMPLE = 0.001  # concentration of their shares
CORRELATION = 0.95  # rho, of preferences of layers that follow each other; our choice, the paper does not tell


@dataclass(frozen=True)
class Table5Row:
    """A row of Table 5 and its model (Table 3): 8 GPUs a node, 2 experts and 4 samples a GPU, top-2, 1024 tokens."""

    nodes: int
    hidden: int
    stock_inter: float
    """MB (2^20 bytes) of one all-to-all between nodes in float32, all ranks together."""
    stock_intra: float
    inter: float
    """MB of the same all-to-all between nodes with NetMoE's placement."""
    intra: float
    node_taste: float
    """How much a topic prefers nodes to others; fitted, not the paper's."""
    taste: float
    """The same for the experts of a node."""

    @property
    def devices(self) -> int:
        """How many GPUs the row was measured on: the paper's J."""
        return 8 * self.nodes

    @property
    def total(self) -> float:
        """MB of all tokens, those that stay on their device too."""
        return 4 * self.devices * 1024 * 2 * self.hidden * 4 / 2**20

    @property
    def reduction(self) -> float:
        """The part of stock's bytes between nodes that NetMoE saved in the paper."""
        return 1 - self.inter / self.stock_inter


TABLE5: dict[str, dict[int, Table5Row]] = {
    "MoE-GPT-S": {
        2: Table5Row(2, 768, 191.07, 168.45, 116.37, 162.24, 1.42, 2.30),
        4: Table5Row(4, 768, 575.88, 167.07, 351.15, 219.21, 2.13, 3.30),
    },
    "MoE-GPT-M": {
        2: Table5Row(2, 1024, 258.20, 222.89, 147.33, 214.31, 1.80, 2.66),
        4: Table5Row(4, 1024, 766.87, 224.24, 492.44, 288.58, 1.76, 2.96),
    },
    "MoE-GPT-L": {
        2: Table5Row(2, 1280, 318.56, 281.81, 208.69, 236.53, 1.30, 3.30),
        4: Table5Row(4, 1280, 958.44, 280.56, 591.72, 376.66, 1.97, 2.92),
    },
    "MoE-GPT-XL": {
        2: Table5Row(2, 1600, 402.06, 347.44, 256.94, 313.00, 1.32, 2.78),
        4: Table5Row(4, 1600, 1199.12, 350.62, 791.19, 423.37, 1.66, 3.25),
    },
    "MoE-GPT-XXL": {
        2: Table5Row(2, 4096, 989.60, 922.40, 570.40, 872.00, 1.70, 2.45),
        4: Table5Row(4, 4096, 3080.00, 884.80, 1884.00, 1201.60, 2.06, 3.00),
    },
}
"""The rows of NetMoE's Table 5, by model and number of nodes."""


def generate_routing(
    *,
    passes: int,
    layers: int,
    samples: int,
    tokens: int,
    experts: int,
    nodes: int,
    node_taste: float,
    taste: float,
    topk: int = 2,
    seed: int = 0,
) -> RoutingTrace:
    """Draws a trace; equal arguments give equal traces.

    Args:
        nodes: N, which divides E; experts are on them in stock's order.
        node_taste: standard deviation of the logarithms of a topic's preferences for nodes: 0 where it likes all alike.
        taste: the same for the experts of a node.
        topk: K.
    """
    rng = np.random.default_rng(seed)
    preferences = _preferences(rng, layers, experts, nodes, node_taste, taste)
    chosen = np.empty((passes, layers, samples, tokens, topk), np.uint16)
    for p in range(passes):
        topics = rng.dirichlet(np.full(TOPICS, TOPICS_OF_A_SAMPLE), samples)
        for layer in range(layers):
            weights = (topics @ preferences[layer]).astype(np.float32).clip(1e-9)
            # The K first of exponential clocks are a draw without replacement, in proportion to their rates.
            clocks = rng.standard_exponential((samples, tokens, experts), np.float32) / weights[:, None]
            chosen[p, layer] = np.sort(np.argpartition(clocks, topk - 1, axis=2)[..., :topk], axis=2)
    return RoutingTrace(
        experts=chosen,
        num_experts=experts,
        layers=np.arange(1, layers + 1),
        iterations=np.arange(1, passes + 1),
        kinds=np.full((passes, samples), UNKNOWN, np.int16),
    )


def like_table5(
    row: Table5Row, *, passes: int, layers: int, seed: int, tokens: int = 1024, topk: int = 2
) -> RoutingTrace:
    """Returns a trace of the row's model on its GPUs. With fewer tokens a sample locality is a little higher, by
    chance; with more experts a token than the paper's 2, topics prefer what they prefer in the row.
    """
    return generate_routing(
        passes=passes,
        layers=layers,
        samples=4 * row.devices,
        tokens=tokens,
        experts=2 * row.devices,
        nodes=row.nodes,
        node_taste=row.node_taste,
        taste=row.taste,
        topk=topk,
        seed=seed,
    )


def _preferences(
    rng: np.random.Generator, layers: int, experts: int, nodes: int, node_taste: float, taste: float
) -> np.ndarray:
    """Returns the preferences [L, C, E] of topics for experts; rows add up to 1, and columns to equal sums."""

    def new() -> np.ndarray:
        """Draws normal variables [C, N, 1 + E / N]: one for each node, then one for each of its experts."""
        return rng.standard_normal((TOPICS, nodes, 1 + experts // nodes))

    normal, preferences = new(), []
    for _ in range(layers):
        of_nodes, inside = (_shares(part) for part in (node_taste * normal[..., 0], taste * normal[..., 1:]))
        preferences.append(_balanced((of_nodes[..., None] * inside).reshape(TOPICS, experts)))
        normal = CORRELATION * normal + math.sqrt(1 - CORRELATION**2) * new()
    return np.stack(preferences)


def _shares(logarithms: np.ndarray) -> np.ndarray:
    """Returns the share of each number in the sum of its row."""
    weights = np.exp(logarithms - logarithms.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _balanced(preferences: np.ndarray) -> np.ndarray:
    """Scales rows and columns in turn until their sums are equal (Sinkhorn)."""
    balanced = preferences + 1e-6
    for _ in range(200):
        balanced = balanced * (len(balanced) / balanced.shape[1] / balanced.sum(axis=0))
        balanced = balanced / balanced.sum(axis=1, keepdims=True)
    return balanced
