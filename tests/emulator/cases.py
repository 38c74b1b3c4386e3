"""Random cases of every kernel: `python -m tests.emulator.cases SEEDS... [--only NAMES]` prints how many went well.

What the emulated device computes must be what the CPU computes: the same bits, where the kernels promise that.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time

from tests.emulator import plugin  # before torch

import torch  # isort: skip

from megatron_moe_opt import kernels  # isort: skip
from megatron_moe_opt.extension import load_extension  # isort: skip
from megatron_moe_opt.kernels.row_map import row_map_from_sources  # isort: skip
from megatron_moe_opt.runtime.engine import steps  # isort: skip
from megatron_moe_opt.runtime.engine.executor import executor  # isort: skip
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule  # isort: skip
from tests.unit.codec_cases import FILLS, check_decode, check_encode, pair  # isort: skip
from tests.unit.permute_cases import DTYPES, PROB_DTYPES, random_map, relative_error  # isort: skip
from tests.unit.wire_cases import NARROW, assert_same_rows, filled, results_on  # isort: skip

DEVICE = torch.device("cuda")
PLACES = (torch.device("cpu"), DEVICE)


class Draw:
    """Random sizes, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def of(self, choices):
        return choices[self.number(0, len(choices) - 1)]

    def size(self, most: int) -> int:
        """Often small, or about a power of two."""
        return min(most, max(0, self.of((0, 1, 2, 3, 31, 32, 33, 64, 65, 100, 255, 257, most)) + self.number(-1, 1)))

    def normal(self, *shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def routing(self, most_tokens: int = 150) -> torch.Tensor:
        experts = max(1, self.size(300))
        dropped = self.of((0.0, 0.0, 0.3, 1.0))
        tokens = min(most_tokens, self.size(most_tokens), 4000 // experts)
        return random_map(tokens, experts, self.number(0, 10), self.generator, dropped)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().contiguous()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def row_map(draw: Draw) -> None:
    routing = draw.routing()
    capacity = draw.of((None, None, draw.number(0, min(len(routing), 40))))
    here, there = kernels.build_row_map(routing, capacity), kernels.build_row_map(routing.to(DEVICE), capacity)
    for name in ("offsets", "rows", "experts", "sources", "expert_counts"):
        same(getattr(there, name), getattr(here, name))
    number = draw.of((2, 3, 8, 70))
    same(there.cut(number).rows, here.cut(number).rows)
    if capacity is None:
        size = draw.number(0, here.num_rows)
        offsets, rows, _, sources, counts = load_extension().build_row_map(routing.to(DEVICE), size)
        kept = here.rows < size
        same(rows, here.rows[kept])
        same(sources, here.sources[:size])
        same(counts, here.expert_counts)  # of those that were cut off, too
        assert int(offsets[-1]) == size
        promised = kernels.build_row_map(routing.to(DEVICE), num_out_tokens=size).cut(number)
        assert bool((promised.rows < size).all())


def sources(draw: Draw) -> None:
    tokens, rows = draw.of((draw.size(400), draw.number(1, 3))), draw.size(700)  # of few tokens, each has many rows
    rows = rows if tokens else 0
    given = torch.randint(0, max(tokens, 1), (rows,), generator=draw.generator)
    experts = draw.of((None, 1, 1))
    here, there = row_map_from_sources(given, tokens, experts), row_map_from_sources(given.to(DEVICE), tokens, experts)
    same(there.offsets, here.offsets)
    same(there.rows, here.rows)
    if experts:
        same(there.experts, here.experts)


def permute(draw: Draw) -> None:
    routing = draw.routing(20)
    hidden, dtype = draw.of((1, 2, 3, 8, 24, 67, 130, 256, 264, 8264, 8267)), draw.of(DTYPES)
    data, weights = draw.normal(len(routing), hidden, dtype=dtype), draw.normal(*routing.shape)
    padded = {}
    if draw.number(0, 3) == 0:
        padded = {"drop_and_pad": True, "num_out_tokens": min(5, len(routing)) * routing.size(1)}
    results, grads = [], None
    for place in PLACES:
        tokens = data.to(place).requires_grad_()
        probs = weights.to(place).requires_grad_()
        moved, moved_probs, indices = kernels.permute(tokens, routing.to(place), probs, **padded)
        if grads is None:
            grads = [draw.normal(*moved.shape, dtype=dtype), draw.normal(*moved_probs.shape)]
        got = [moved, moved_probs, indices]
        got += torch.autograd.grad([moved, moved_probs], [tokens, probs], [grad.to(place) for grad in grads])
        rows, merged = moved.detach().requires_grad_(), probs.detach().requires_grad_()
        got.append(kernels.unpermute(moved.detach(), indices, data.shape))
        flag = {"drop_and_pad": True} if padded else {}
        out = kernels.unpermute(rows, indices, data.shape, merged, routing.to(place), **flag)
        got += [out, *torch.autograd.grad(out, [rows, merged], data.to(place))]
        results.append(got)
    *exact, grad_probs = results[1]
    for actual, expected in zip(exact, results[0], strict=False):
        same(actual, expected)
    assert relative_error(grad_probs.cpu(), results[0][-1]) <= 1e-5


def packed(draw: Draw) -> None:
    routing = draw.routing(60)
    dtype, hidden = draw.of(DTYPES), draw.of((1, 2, 8, 33, 64, 136))
    data = draw.normal(len(routing), hidden, dtype=dtype)
    weights = draw.normal(*routing.shape).to(draw.of(PROB_DTYPES))
    results = []
    for place in PLACES:
        row_map = kernels.build_row_map(routing.to(place))
        rows = kernels.permute_packed(data.to(place), weights.to(place), row_map)
        sums = kernels.sum_packed_rows(rows, hidden, row_map)
        results.append([rows, sums, kernels.unpermute_probs(rows, row_map, weights.dtype)])
    for expected, actual in zip(*results, strict=True):
        same(actual, expected)


def wire(draw: Draw) -> None:
    hidden, dtype, of_wire = draw.of((1, 15, 16, 33, 128, 130, 272, 640)), draw.of(DTYPES), draw.of(NARROW)
    routing = draw.routing(8)
    rows = filled((len(routing), hidden), dtype, draw.generator)
    expected, made = (results_on(place, rows, routing, of_wire) for place in PLACES)
    for name, actual in made.items():
        assert_same_rows(actual, expected[name])


def chunks(draw: Draw) -> None:
    number = draw.of((1, 2, 5, 17, 300))
    counts = [draw.size(40 if number < 300 else 2) for _ in range(number)]
    order = torch.randperm(len(counts), generator=draw.generator)
    width, dtype = draw.of((1, 3, 8, 64, 130, 257)), draw.of((torch.uint8, torch.bfloat16, torch.float32))
    rows = torch.randint(0, 256, (sum(counts), width), generator=draw.generator).to(dtype)
    moved = kernels.copy_chunks(rows.to(DEVICE), kernels.ChunkList.from_counts(counts, order, DEVICE))
    same(moved, kernels.copy_chunks(rows, kernels.ChunkList.from_counts(counts, order)))


def sums(draw: Draw) -> None:
    dtype, width = draw.of((*DTYPES, torch.float64)), draw.of((1, 3, 8, 64, 130, 1001))
    rows, ranks = draw.of((1, 2, 7)), draw.of((1, 2, 5, 64, 65, 300))
    columns = width + draw.of((0, 0, 8))  # more than are summed, as rows on the wire have
    own = draw.normal(rows, columns).to(dtype)
    others = draw.normal((ranks - 1) * rows, columns).to(dtype)  # as a reduce-scatter receives them, but for its own
    apart = ranks <= 64 and draw.number(0, 1) == 1  # or each in memory of its own
    rank = draw.number(0, ranks - 1)
    results = []
    for place in PLACES:
        given = list(others.to(place).view(-1, rows, columns))
        given = [part.clone() for part in given] if apart else given
        given.insert(rank, own.to(place))
        out = torch.full_like(given[rank], 7)
        step = steps.sum_parts(given, out, [(0, width, dtype)])
        executor(place.type).run(Schedule("sum", (Op(Kind.COMPUTE, Lane.COPY),)), [step])
        results.append(out)
    same(results[1], results[0])


def codec(draw: Draw) -> None:
    numel = draw.of((1, 5, 100, 1024, 1030, 4097, 16_384, 17_000, 65_536 + 72))
    kept = draw.of((0, 1, numel // 50, numel // 3, numel - numel // 9, numel))
    expert, shared = pair(numel, draw.of(DTYPES), draw.of(list(FILLS)), seed=draw.number(0, 2**30))
    values, indices = check_encode(expert.to(DEVICE), shared.to(DEVICE), kept)
    check_decode(values, indices, shared.to(DEVICE), torch.empty_like(shared, device=DEVICE))


def second_round(draw: Draw) -> None:
    """More than 256 segments for a block of write_kernel: in a build with kMaxSelectBlocks 1, as in one of 512 from 134
    million elements on."""
    numel = 262_144 + 1024 * draw.number(1, 9)
    kept = draw.of((300, numel // 50))
    expert, shared = pair(numel, torch.bfloat16, draw.of(("random", "ties", "equal")), seed=draw.number(0, 2**30))
    check_encode(expert.to(DEVICE), shared.to(DEVICE), kept)


# Often enough each; the codec's cases are larger.
CASES = [row_map, sources, packed, chunks, sums] * 7 + [permute, wire] * 3 + [codec]


def run(seed: int, only: list[str] | None = None) -> str:
    """One case; returns its name. An AssertionError or a report of the emulator says what is wrong."""
    choices = [case for case in (*CASES, second_round) if case.__name__ in only] if only else CASES
    case = choices[seed % len(choices)]
    plugin.switches.emulator_seed(ctypes.c_uint64(seed))
    plugin.switches.emulator_set_multiprocessors((132, 1, 20)[(seed + seed // len(choices)) % 3])
    case(Draw(seed))
    return case.__name__


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    begin = time.process_time()
    done: dict[str, int] = {}
    for seed in range(arguments.first, arguments.first + arguments.count):
        try:
            name = run(seed, arguments.only)
        except (AssertionError, RuntimeError) as error:
            sys.exit(f"seed {seed}: {type(error).__name__}: {error}")
        done[name] = done.get(name, 0) + 1
    launches = plugin.switches.emulator_launches()
    spent = time.process_time() - begin
    print(f"{arguments.count} cases without a report, {launches} launches, {spent:.0f} s of processor time: {done}")


if __name__ == "__main__":
    main()
