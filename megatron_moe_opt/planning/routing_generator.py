"""Seeded routing with the locality that NetMoE's paper measured (Table 5), where no such model can be trained.

A sample is about a few topics (Dirichlet), a topic prefers some nodes, and on each some experts (Dirichlet both), and
every token draws its experts from the preferences of its sample, without replacement. The next layer's preferences are
part this layer's, part its own. Preferences are balanced so that all experts get as many tokens on average, as a
trained router's do.

Two numbers, how evenly a topic likes nodes and experts, are fitted to each row of the table: with optimal placement as
many tokens cross nodes, and as many cross devices of a node, as there. Preferences for experts alone, whatever their
nodes, cannot give the table's reductions: in a default order, experts of a node are no more alike than others.

Shapes: P passes, L MoE layers, I samples of T tokens, K experts of a token, E experts, C topics, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_moe_opt.planning.routing_trace import UNKNOWN, RoutingTrace

TOPICS = 512  # more than samples of a pass, so that seeds differ little
TOPICS_OF_A_SAMPLE = 0.001  # concentration of their shares
CORRELATION = 0.8  # the part of a layer's preferences that the next one shares


@dataclass(frozen=True)
class Table5Row:
    """A row of Table 5 and its model (Table 3): 8 GPUs a node, 2 experts and 4 samples a GPU, top-2, 1024 tokens."""

    nodes: int
    hidden: int
    stock_inter: float
    """MB (2^20 bytes) of one all-to-all between nodes in float32, all ranks together."""
    stock_intra: float
    inter: float
    """With NetMoE."""
    intra: float
    node_evenness: float
    """Concentration of a topic's preferences for nodes; fitted, not the paper's."""
    evenness: float
    """Of those for the experts of a node."""

    @property
    def devices(self) -> int:
        """J."""
        return 8 * self.nodes

    @property
    def total(self) -> float:
        """MB of all tokens, those that stay on their device too."""
        return 4 * self.devices * 1024 * 2 * self.hidden * 4 / 2**20

    @property
    def reduction(self) -> float:
        """Of what crosses nodes."""
        return 1 - self.inter / self.stock_inter


TABLE5: dict[str, dict[int, Table5Row]] = {
    "MoE-GPT-S": {
        2: Table5Row(2, 768, 191.07, 168.45, 116.37, 162.24, 0.58, 0.11),
        4: Table5Row(4, 768, 575.88, 167.07, 351.15, 219.21, 0.275, 0.073),
    },
    "MoE-GPT-M": {
        2: Table5Row(2, 1024, 258.20, 222.89, 147.33, 214.31, 0.43, 0.085),
        4: Table5Row(4, 1024, 766.87, 224.24, 492.44, 288.58, 0.37, 0.083),
    },
    "MoE-GPT-L": {
        2: Table5Row(2, 1280, 318.56, 281.81, 208.69, 236.53, 0.73, 0.064),
        4: Table5Row(4, 1280, 958.44, 280.56, 591.72, 376.66, 0.285, 0.088),
    },
    "MoE-GPT-XL": {
        2: Table5Row(2, 1600, 402.06, 347.44, 256.94, 313.00, 0.69, 0.08),
        4: Table5Row(4, 1600, 1199.12, 350.62, 791.19, 423.37, 0.44, 0.074),
    },
    "MoE-GPT-XXL": {
        2: Table5Row(2, 4096, 989.60, 922.40, 570.40, 872.00, 0.45, 0.11),
        4: Table5Row(4, 4096, 3080.00, 884.80, 1884.00, 1201.60, 0.285, 0.087),
    },
}
"""By model and number of nodes."""


def generate_routing(
    *,
    passes: int,
    layers: int,
    samples: int,
    tokens: int,
    experts: int,
    nodes: int,
    node_evenness: float,
    evenness: float,
    topk: int = 2,
    seed: int = 0,
) -> RoutingTrace:
    """Draws a trace; equal arguments give equal traces.

    Args:
        nodes: N, which divides E; experts are on them in stock's order.
        node_evenness: concentration of a topic's preferences for nodes: towards 0 it likes one, above 1 all of them.
        evenness: the same for the experts of a node.
        topk: K.
    """
    rng = np.random.default_rng(seed)
    preferences = _preferences(rng, layers, experts, nodes, node_evenness, evenness)
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


def like_table5(row: Table5Row, *, passes: int, layers: int, seed: int, tokens: int = 1024) -> RoutingTrace:
    """A trace of the row's model on its GPUs; with fewer tokens a sample, locality is a little higher by chance."""
    return generate_routing(
        passes=passes,
        layers=layers,
        samples=4 * row.devices,
        tokens=tokens,
        experts=2 * row.devices,
        nodes=row.nodes,
        node_evenness=row.node_evenness,
        evenness=row.evenness,
        seed=seed,
    )


def _preferences(
    rng: np.random.Generator, layers: int, experts: int, nodes: int, node_evenness: float, evenness: float
) -> np.ndarray:
    """[L, C, E], rows that add up to 1, columns that are equal sums."""

    def own() -> np.ndarray:
        of_nodes = rng.dirichlet(np.full(nodes, node_evenness), TOPICS)
        inside = rng.dirichlet(np.full(experts // nodes, evenness), (TOPICS, nodes))
        return _balanced((of_nodes[..., None] * inside).reshape(TOPICS, experts))

    preferences = [own()]
    for _ in range(layers - 1):
        preferences.append(CORRELATION * preferences[-1] + (1 - CORRELATION) * own())
    return np.stack(preferences)


def _balanced(preferences: np.ndarray) -> np.ndarray:
    """Rows and columns scaled in turn (Sinkhorn)."""
    balanced = preferences + 1e-6
    for _ in range(200):
        balanced = balanced * (len(balanced) / balanced.shape[1] / balanced.sum(axis=0))
        balanced = balanced / balanced.sum(axis=1, keepdims=True)
    return balanced
