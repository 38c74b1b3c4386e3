"""What planning an exchange costs the host behind the counts, at EP 64: microseconds, and what noise does not touch.

    python -m tools.plan_time [--calls 2000]

For a row to each expert (runtime/rows/exchange_plan.py) and for tokens that hop over 8 nodes of 8 (hop_plan.py): the
median of many calls, the operators that PyTorch is asked for in one, and the Python functions of this package.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_moe_opt.runtime.rows.exchange_plan import plan_exchange, plan_partitions
from megatron_moe_opt.runtime.rows.hop_plan import DomainTables
from megatron_moe_opt.topology.domains import ExpertDomains

NODES, OF_NODE, EXPERTS, RANK = 8, 8, 256, 13


class Operators(TorchDispatchMode):
    """Counts what PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def cases() -> dict[str, Callable[[], object]]:
    """Returns what is planned, by name."""
    generator = torch.Generator().manual_seed(1)
    ranks = NODES * OF_NODE

    def counts(*shape: int) -> torch.Tensor:
        return torch.randint(100, shape, generator=generator)

    by_rows, cut = counts(ranks, 1, EXPERTS), counts(ranks, 2, EXPERTS)
    hops = DomainTables(ExpertDomains((NODES, OF_NODE), (1, 1)), RANK, EXPERTS)
    parts = {number: counts(ranks, 1, 1, number, hops.num_counts + 1) for number in (1, 4)}
    shards = counts(ranks, 2, 1, 4, hops.num_counts + 1)
    return {
        "rows, 1 chunk": lambda: plan_exchange(by_rows, RANK, 0),
        "rows, 4 chunks": lambda: plan_exchange(by_rows, RANK, 0, 4),
        "rows, 4 partitions": lambda: plan_partitions(by_rows, RANK, 0, 4),
        "rows, 4 chunks, expert-TP 2": lambda: plan_exchange(cut, RANK, 0, 4),
        "hops": lambda: hops.plan(parts[1]),
        "hops, 4 partitions": lambda: hops.plan(parts[4]),
        "hops, 4 partitions, expert-TP 2": lambda: hops.plan(shards, 1),
    }


def python_calls(plan: Callable[[], object]) -> int:
    """Returns the number of calls of Python functions in one call of `plan`, itself among them."""
    number = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        plan()
    finally:
        sys.setprofile(None)
    return number


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    for name, plan in cases().items():
        plan()
        with Operators() as operators:
            plan()
        times = []
        for _ in range(calls):
            begin = perf_counter()
            plan()
            times.append(1e6 * (perf_counter() - begin))
        print(
            f"{name:32} {statistics.median(times):6.1f} us (least {min(times):6.1f}), {operators.number:3} operators, "
            f"{python_calls(plan):3} calls of Python functions"
        )


if __name__ == "__main__":
    main()
