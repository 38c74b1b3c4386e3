"""Placing samples, for tools/bench/kernels.py: the solver against scipy, counting against PyTorch.

The solver's counterpart is `scipy.optimize.linear_sum_assignment` on the matrix in which every sink is copied once for
each of its places; that matrix is ready made, while ours starts from num. Every placement is checked against scipy's
cost. Where PuLP is installed (`pip install pulp`), the integer program of NetMoE's eq. 10 is solved beside them as in
the paper's Table 4, of few problems, with building it, and checked likewise. Counting's counterpart is PyTorch's sum
of the routing map.

Shapes: I samples of L tokens, E experts, K experts of a token, J devices, N nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from megatron_moe_opt.cli.console import report_console, table_of
from tools.bench.timing import Timing, measure, time_once

Assign: TypeAlias = Callable[[np.ndarray, int], np.ndarray]
"""A function that takes a matrix of costs, with so many equal columns for each sink, and
returns the column of each row.
"""

CPU = torch.device("cpu")
TURNS = 4  # of both sides at a problem, the first of them not counted
PROGRAMS = 2  # problems that PuLP solves, which takes long
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
    ratios: Timing | None = None
    """The ratios of the counterpart's time to ours, turn by turn, where they are timed at several inputs."""

    @property
    def speedup(self) -> float | None:
        """The median of the ratios, or the counterpart's median over ours."""
        if self.ratios is not None:
            return self.ratios.median
        return None if self.stock is None else self.stock.median / self.ours.median


def measure_placement(device: torch.device, repeats: int, seed: int) -> list[PlacementRow]:
    """Returns the rows of the solver, which runs on the CPU whatever the device, and on a CPU those of counting.

    Raises:
        RuntimeError: a placement that costs more than another solver's.
    """
    rng = np.random.default_rng(seed)
    rows = [row for samples, nodes in TWO_STAGES for row in measure_two_stages(rng, samples, nodes, repeats)]
    rows += [measure_one_stage(rng, samples, sinks, repeats) for samples, sinks in ONE_STAGE]
    for samples, length, topk, experts in COUNTS if device == CPU else ():
        rows.append(measure_counts(device, samples, length, topk, experts, repeats, seed))
    return rows


def topic_counts(rng: np.random.Generator, samples: int, experts: int) -> np.ndarray:
    """Returns num [I, E] of two layers together, with the locality that placement lives on.

    A sample mixes few of 16 topics (Dirichlet, 0.1), a topic prefers some experts of each layer (Dirichlet, 0.3), and
    1024 tokens go to two experts each.
    """
    mixes = rng.dirichlet(np.full(16, 0.1), samples)
    layers = (mixes @ rng.dirichlet(np.full(experts, 0.3), 16) for _ in range(2))
    return sum(rng.multinomial(2 * 1024, layer / layer.sum(1, keepdims=True)) for layer in layers)


def transfer_costs(
    num: torch.Tensor, expert_device: torch.Tensor, device_node: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what a sample would transfer if it were on each node and on each device (eq. 8).

    Args:
        num: [I, E], tokens that sample i exchanges with expert e. expert_device: int64 [E]. device_node: int64 [J].

    Returns:
        In the dtype of `num`: c [I, N], tokens between nodes if sample i is on node n, and c' [I, J], tokens between
        devices of the same node if sample i is on device j.
    """
    num_nodes = int(device_node.max()) + 1 if device_node.numel() else 0
    on_device = num.new_zeros(num.size(0), device_node.numel()).index_add_(1, expert_device, num)
    on_node = num.new_zeros(num.size(0), num_nodes).index_add_(1, device_node, on_device)
    return num.sum(1, keepdim=True) - on_node, on_node[:, device_node] - on_device


def linear_sum_assignment() -> Assign | None:
    """Returns scipy's solver, or None where scipy is not installed."""
    try:
        from scipy import optimize
    except ImportError:
        return None
    return lambda cost, _: optimize.linear_sum_assignment(cost)[1]


def integer_program() -> Assign | None:
    """Returns eq. 10 as PuLP solves it: p[i, n] in {0, 1}, one n for each i, so many i for each n; or None."""
    try:
        import pulp
    except ImportError:
        return None

    def assign(cost: np.ndarray, places: int) -> np.ndarray:
        samples, sinks = range(len(cost)), range(cost.shape[1] // places)
        program = pulp.LpProblem("placement", pulp.LpMinimize)
        chosen = pulp.LpVariable.dicts("p", (samples, sinks), cat="Binary")
        program += pulp.lpSum(cost[i, n * places] * chosen[i][n] for i in samples for n in sinks)
        for i in samples:
            program += pulp.lpSum(chosen[i][n] for n in sinks) == 1
        for n in sinks:
            program += pulp.lpSum(chosen[i][n] for i in samples) == places
        program.solve(pulp.PULP_CBC_CMD(msg=False))
        columns = np.empty(len(cost), dtype=int)
        for n in sinks:
            columns[[i for i in samples if chosen[i][n].value() > 0.5]] = n * places + np.arange(places)
        return columns

    return assign


class TwoStages:
    """A problem of placing samples on nodes, then on the devices of each node; 64 experts on 16 devices."""

    def __init__(self, rng: np.random.Generator, samples: int, nodes: int) -> None:
        from megatron_moe_opt.kernels import place_samples

        self.place_samples = place_samples
        self.samples, self.nodes = samples, nodes
        self.num = torch.from_numpy(topic_counts(rng, samples, NUM_EXPERTS))  # as counting returns it
        self.expert_device = torch.arange(NUM_EXPERTS) * NUM_DEVICES // NUM_EXPERTS
        self.device_node = torch.arange(NUM_DEVICES) * nodes // NUM_DEVICES
        inter, intra = (c.numpy() for c in transfer_costs(self.num, self.expert_device, self.device_node))
        self.inter = np.repeat(inter, samples // nodes, axis=1).astype(float)  # a column for each place
        self.intra = np.repeat(intra, samples // NUM_DEVICES, axis=1).astype(float)

    def ours(self) -> torch.Tensor:
        """Returns the device of each sample, as our solver places it."""
        return self.place_samples(self.num, self.expert_device, self.device_node)

    def theirs(self, assign: Assign) -> list[np.ndarray]:
        """Returns the places of the samples of each node, as another solver has them."""
        node_of = self._nodes(assign) // (self.samples // self.nodes)
        return [self._places(node, np.flatnonzero(node_of == node), assign) for node in range(self.nodes)]

    def check(self, assign: Assign) -> None:
        """Raises RuntimeError unless both stages of our placement cost what the other solver's do."""
        device_of = np.asarray(self.ours())
        node_of = self.device_node.numpy()[device_of]
        check_cost(self.inter, node_of * (self.samples // self.nodes), self._nodes(assign))
        for node in range(self.nodes):
            inside = np.flatnonzero(node_of == node)
            places = device_of[inside] * (self.samples // NUM_DEVICES)
            check_cost(self.intra[inside], places, self._places(node, inside, assign))

    def _nodes(self, assign: Assign) -> np.ndarray:
        return assign(self.inter, self.samples // self.nodes)

    def _places(self, node: int, of_samples: np.ndarray, assign: Assign) -> np.ndarray:
        columns = slice(node * self.samples // self.nodes, (node + 1) * self.samples // self.nodes)
        return columns.start + assign(self.intra[of_samples, columns], self.samples // NUM_DEVICES)


def measure_two_stages(rng: np.random.Generator, samples: int, nodes: int, repeats: int) -> list[PlacementRow]:
    """Returns a row a counterpart, of several problems, as how long it takes depends on them."""
    problems = [TwoStages(rng, samples, nodes) for _ in range(repeats)]
    rows = [_two_stages(problems, "scipy", linear_sum_assignment())]
    program = integer_program()
    return [*rows, _two_stages(problems[:PROGRAMS], "PuLP", program)] if program else rows


def _two_stages(problems: list[TwoStages], counterpart: str, assign: Assign | None) -> PlacementRow:
    """Times both sides on the same problems."""
    ours, stock = [], []
    for problem in problems:
        if assign:
            problem.check(assign)
        for turn in range(TURNS):
            its = time_once(functools.partial(problem.theirs, assign), CPU) if assign else 0.0
            own = time_once(problem.ours, CPU)
            if turn:  # the first one finds nothing in the caches
                ours.append(own)
                stock.append(its)
    size = f"I {problem.samples}, J {NUM_DEVICES}, N {problem.nodes}"
    row = PlacementRow("place samples, two stages", size, counterpart, Timing.of(ours), None)
    if not assign:
        return row
    ratios = Timing.of([its / own for own, its in zip(ours, stock, strict=True)])
    return replace(row, stock=Timing.of(stock), ratios=ratios)


def check_cost(cost: np.ndarray, columns: np.ndarray, best: np.ndarray) -> None:
    """Raises RuntimeError unless both choices of a column for each row cost the same."""
    rows = np.arange(len(cost))
    if cost[rows, columns].sum() != cost[rows, best].sum():
        raise RuntimeError(f"a placement costs {cost[rows, columns].sum():.0f}, another {cost[rows, best].sum():.0f}")


def measure_one_stage(rng: np.random.Generator, samples: int, sinks: int, repeats: int) -> PlacementRow:
    """Returns the row of samples to as many sinks as experts, I / N to each; without a counterpart."""
    from megatron_moe_opt.kernels import solve_placement

    cost = -topic_counts(rng, samples, sinks)
    timings = measure({"ours": lambda: solve_placement(cost, samples // sinks)}, repeats, CPU)
    return PlacementRow("place samples, one stage", f"I {samples}, N {sinks}", "", timings["ours"], None)


def measure_counts(
    device: torch.device, samples: int, length: int, topk: int, experts: int, repeats: int, seed: int
) -> PlacementRow:
    """Returns the row of counting from a routing map."""
    from megatron_moe_opt.kernels import count_routing_map

    chosen = torch.rand(samples * length, experts, generator=torch.Generator().manual_seed(seed)).topk(topk).indices
    routing_map = torch.zeros(len(chosen), experts, dtype=torch.bool).scatter_(1, chosen, True).to(device)
    by_sample = routing_map.view(length, samples, experts)
    sides = {"ours": lambda: count_routing_map(routing_map, samples), "sum": lambda: by_sample.sum(0)}
    timings = measure(sides, repeats, device)
    size = f"I {samples}, L {length}, K {topk}, E {experts}"
    return PlacementRow("count from a map", size, "torch sum", timings["ours"], timings["sum"])


def print_placement(rows: list[PlacementRow]) -> None:
    """Prints a line an operation and counterpart; times in milliseconds, quartiles in brackets."""
    headers = ("op", "size", "compared with", "its ms", "ours ms", "speed-up")
    table = table_of("placing samples", headers, names=3)

    for row in rows:
        stock = "" if row.stock is None else row.stock.text(3)
        speedup = "" if row.speedup is None else f"{row.speedup:.1f}x"
        if row.ratios is not None:
            speedup += f" [{row.ratios.low:.1f} {row.ratios.high:.1f}]"
        table.add_row(row.op, row.size, row.counterpart, stock, row.ours.text(3), speedup)
    report_console(150).print(table)
