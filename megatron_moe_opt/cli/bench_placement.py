"""The part of `moe-opt bench kernels` about placing samples: the solver against scipy, counting against PyTorch.

The solver's counterpart is `scipy.optimize.linear_sum_assignment` on the matrix in which every sink is copied once for
each of its places; that matrix is ready made, while ours starts from num. Every placement is checked against scipy's
cost. Counting's counterparts are `torch.bincount` of sample * E + expert, with that index ready made or with its
arithmetic, and the sum of a routing map.

Shapes: I samples of L tokens, E experts, K experts of a token, J devices, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatron_moe_opt.cli.kernel_timing import Timing, measure

CPU = torch.device("cpu")
NUM_DEVICES = 16
NUM_EXPERTS = 64
TWO_STAGES = [(32, 2), (64, 2), (128, 2), (256, 2), (384, 2), (384, 4)]  # I, N; the sizes of the paper's table 4
ONE_STAGE = [(16384, 16), (65536, 64)]  # I, N; out of scipy's reach
COUNTS = [(32, 1024, 2, 16), (64, 4096, 8, 64), (16, 4096, 8, 256)]  # I, L, K, E


@dataclass(frozen=True)
class PlacementRow:
    """One operation of one size, and what it is compared with. `stock` is None where that is not installed."""

    op: str
    size: str
    counterpart: str
    ours: Timing
    stock: Timing | None

    @property
    def speedup(self) -> float | None:
        """The counterpart's median over ours."""
        return None if self.stock is None else self.stock.median / self.ours.median


def measure_placement(device: torch.device, repeats: int, seed: int) -> list[PlacementRow]:
    """The rows of the solver, which runs on the CPU whatever the device, and those of counting on the device.

    Raises:
        RuntimeError: a placement that costs more than scipy's.
    """
    rng = np.random.default_rng(seed)
    rows = [measure_two_stages(rng, samples, nodes, repeats) for samples, nodes in TWO_STAGES]
    rows += [measure_one_stage(rng, samples, sinks, repeats) for samples, sinks in ONE_STAGE]
    for samples, length, topk, experts in COUNTS:
        for batch_first in (False, True):
            rows += measure_counts(device, samples, length, topk, experts, batch_first, repeats, seed)
    return rows


def topic_counts(rng: np.random.Generator, samples: int, experts: int) -> np.ndarray:
    """num [I, E] of two layers together, with the locality that placement lives on.

    A sample mixes few of 16 topics (Dirichlet, 0.1), a topic prefers some experts of each layer (Dirichlet, 0.3), and
    1024 tokens go to two experts each.
    """
    mixes = rng.dirichlet(np.full(16, 0.1), samples)
    layers = (mixes @ rng.dirichlet(np.full(experts, 0.3), 16) for _ in range(2))
    return sum(rng.multinomial(2 * 1024, layer / layer.sum(1, keepdims=True)) for layer in layers)


def linear_sum_assignment() -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None:
    """scipy's, or None where scipy is not installed."""
    try:
        from scipy import optimize
    except ImportError:
        return None
    return optimize.linear_sum_assignment


def measure_two_stages(rng: np.random.Generator, samples: int, nodes: int, repeats: int) -> PlacementRow:
    """Samples to nodes, then to the devices of each node; 64 experts on 16 devices."""
    from megatron_moe_opt.kernels import place_samples, transfer_costs

    num = topic_counts(rng, samples, NUM_EXPERTS)
    expert_device = np.arange(NUM_EXPERTS) * NUM_DEVICES // NUM_EXPERTS
    device_node = np.arange(NUM_DEVICES) * nodes // NUM_DEVICES
    inter, intra = (c.numpy() for c in transfer_costs(*map(torch.from_numpy, (num, expert_device, device_node))))
    inter = np.repeat(inter, samples // nodes, axis=1).astype(float)  # a column for each place
    intra = np.repeat(intra, samples // NUM_DEVICES, axis=1).astype(float)
    assign = linear_sum_assignment()

    def ours() -> np.ndarray:
        return place_samples(num, expert_device, device_node)

    def devices_of_node(node: int, of_samples: np.ndarray) -> np.ndarray:
        columns = slice(node * samples // nodes, (node + 1) * samples // nodes)
        return columns.start + assign(intra[of_samples, columns])[1]

    def scipys() -> list[np.ndarray]:
        node_of = assign(inter)[1] // (samples // nodes)
        return [devices_of_node(node, np.flatnonzero(node_of == node)) for node in range(nodes)]

    sides: dict[str, Callable[[], Any]] = {"ours": ours}
    if assign is not None:
        device_of = ours()
        node_of = device_node[device_of]
        check_cost(inter, node_of * (samples // nodes), assign(inter)[1])
        for node in range(nodes):
            inside = np.flatnonzero(node_of == node)
            place = device_of[inside] * (samples // NUM_DEVICES)
            check_cost(intra[inside], place, devices_of_node(node, inside))
        sides["stock"] = scipys
    timings = measure(sides, repeats, CPU)
    size = f"I {samples}, J {NUM_DEVICES}, N {nodes}"
    return PlacementRow("place samples, two stages", size, "scipy", timings["ours"], timings.get("stock"))


def check_cost(cost: np.ndarray, columns: np.ndarray, best: np.ndarray) -> None:
    """Raises RuntimeError unless both choices of a column for each row cost the same."""
    rows = np.arange(len(cost))
    if cost[rows, columns].sum() != cost[rows, best].sum():
        raise RuntimeError(f"a placement costs {cost[rows, columns].sum():.0f}, scipy's {cost[rows, best].sum():.0f}")


def measure_one_stage(rng: np.random.Generator, samples: int, sinks: int, repeats: int) -> PlacementRow:
    """Samples to as many sinks as experts, I / N to each; without a counterpart."""
    from megatron_moe_opt.kernels import solve_placement

    cost = -topic_counts(rng, samples, sinks)
    timings = measure({"ours": lambda: solve_placement(cost, samples // sinks)}, repeats, CPU)
    return PlacementRow("place samples, one stage", f"I {samples}, N {sinks}", "", timings["ours"], None)


def measure_counts(
    device: torch.device, samples: int, length: int, topk: int, experts: int, batch_first: bool, repeats: int, seed: int
) -> list[PlacementRow]:
    """Counting from the experts of each token and from a routing map."""
    from megatron_moe_opt.kernels import count_routing_map, count_topk

    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(samples * length, experts, generator=generator).topk(topk).indices.to(device)
    routing_map = torch.zeros(len(chosen), experts, dtype=torch.bool, device=device).scatter_(1, chosen, True)
    numbers = torch.arange(samples, device=device)
    first = (numbers.repeat_interleave(length) if batch_first else numbers.repeat(length)).unsqueeze(1) * experts
    index = (first + chosen).flatten()
    by_sample = routing_map.view(samples, length, -1) if batch_first else routing_map.view(length, samples, -1)

    def bincount(of: torch.Tensor) -> torch.Tensor:
        return torch.bincount(of, minlength=samples * experts)

    size = f"I {samples}, L {length}, K {topk}, E {experts}" + (", batch first" if batch_first else "")
    from_topk = {
        "ours": lambda: count_topk(chosen, experts, samples, batch_first=batch_first),
        "bincount": lambda: bincount(index),
        "index, bincount": lambda: bincount((first + chosen).flatten()),
    }
    from_map = {
        "ours": lambda: count_routing_map(routing_map, samples, batch_first=batch_first),
        "sum": lambda: by_sample.sum(1 if batch_first else 0),
    }
    rows = []
    for op, sides in (("count from top-k", from_topk), ("count from a map", from_map)):
        timings = measure(sides, repeats, device)
        ours = timings.pop("ours")
        rows += [PlacementRow(op, size, f"torch {name}", ours, timing) for name, timing in timings.items()]
    return rows


def print_placement(rows: list[PlacementRow]) -> None:
    """One line an operation and counterpart; times in milliseconds, quartiles in brackets."""
    table = Table(title="placing samples")
    for heading in ("op", "size", "compared with", "its ms", "ours ms", "speed-up"):
        table.add_column(heading, justify="right" if heading.endswith(("ms", "up")) else "left", no_wrap=True)

    def show(timing: Timing) -> str:
        return f"{timing.median * 1e3:.3f} [{timing.low * 1e3:.3f} {timing.high * 1e3:.3f}]"

    for row in rows:
        stock = "" if row.stock is None else show(row.stock)
        speedup = "" if row.speedup is None else f"{row.speedup:.1f}x"
        table.add_row(row.op, row.size, row.counterpart, stock, show(row.ours), speedup)
    Console(width=150).print(table)
