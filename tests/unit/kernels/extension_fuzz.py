"""Random calls of all that the extension offers, most with an argument or two spoilt. None may end the process.

    python -m tests.unit.kernels.extension_fuzz --calls 2000 --seed 1

A call depends on the seed and its own number alone: `--first N --calls 1` repeats the one that crashed. Every
public name of the extension, and of its classes, needs an entry in CALLS.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.machinery
import importlib.util
import math
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

NAME = "megatron_moe_opt._C"
SECONDS_OF_50 = 300  # calls; more is a hang, on however busy a machine
CUDA_ALONE = {"StreamExecutor", "StreamExecutor.run", "StreamExecutor.issue_meanwhile", "new_cuda_stream"}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIRES = ("same", "bf16", "fp8", "mxfp8")
DTYPES = tuple(dict.fromkeys(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)))
# Small, or more than any machine has: what lies between is granted, and takes the machine's memory.
INTEGERS = (-(1 << 70), -(1 << 63), -(1 << 31), -5, -1, 0, 1, 2, 3, 7, 16, 255, 4097, 1 << 48, 1 << 55, 1 << 56,
            (1 << 56) + 1, 1 << 61, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 70)  # fmt: skip


def load(path: Path | None) -> ModuleType:
    """The package's extension, or that of another build."""
    if path is not None:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        sys.modules[NAME] = importlib.util.module_from_spec(importlib.util.spec_from_loader(NAME, loader))
        loader.exec_module(sys.modules[NAME])
    return importlib.import_module(NAME)


def public_calls(module: ModuleType) -> set[str]:
    """Returns all that can be called: functions, classes, and their methods."""
    names = {name for name in dir(module) if not name.startswith("_")}
    classes = {name: getattr(module, name) for name in names if isinstance(getattr(module, name), type)}
    return names | {f"{name}.{method}" for name, kind in classes.items() for method in vars(kind) if method[0] != "_"}


class Draw(random.Random):
    """Draws the arguments of one call."""

    def __init__(self, extension: ModuleType, seed: str) -> None:
        super().__init__(seed)
        self.extension = extension
        self.generator = torch.Generator().manual_seed(self.getrandbits(60))

    def chance(self, probability: float) -> bool:
        """Returns True with this probability."""
        return self.random() < probability

    def size(self, least: int = 0, most: int = 20) -> int:
        """Returns a size, mostly small."""
        return self.choice((least, self.randint(least, most), self.randint(least, most), 3 * most))

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns any floats, now and then special ones."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        if self.chance(0.2) and values.numel():
            special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 6e4, -6e4, 3e38, -3e38])
            chosen = torch.rand(shape, generator=self.generator) < 0.3
            values[chosen] = special[torch.randint(10, (int(chosen.sum()),), generator=self.generator)].double()
        return values.to(dtype)

    def below(self, bound: int, *shape: int) -> torch.Tensor:
        """Returns int64 numbers in [0, bound), or none where there are none."""
        shape = shape if bound > 0 else (0,)
        return torch.randint(max(bound, 1), shape, generator=self.generator)

    def routing(self, tokens: int | None = None) -> torch.Tensor:
        """Returns a routing map, bool [T, E], now and then with bytes above 1."""
        shape = (self.size() if tokens is None else tokens), self.size()
        routed = torch.rand(shape, generator=self.generator) < self.random()
        if self.chance(0.2):
            routed = (routed * self.choice((2, 128, 255))).to(torch.uint8).view(torch.bool)
        return routed

    def row_map(self) -> tuple[tuple[Any, ...], int, int, int]:
        """Returns the tensors of a row map, and T, E, R."""
        routing = self.routing()
        offsets, rows, experts, _, _ = self.extension.build_row_map(routing, None)
        known = None if self.chance(0.2) else experts
        return (offsets, rows, known, routing.size(1)), *routing.shape, rows.numel()

    def chunks(self, num_rows: int) -> tuple[Any, ...]:
        """Returns chunks that move all rows, in another order."""
        cuts = sorted(self.randint(0, num_rows) for _ in range(self.randint(0, 5)))
        counts = [end - begin for begin, end in zip([0, *cuts], [*cuts, num_rows], strict=True)]
        order = self.sample(range(len(counts)), len(counts))
        sources = [sum(counts[:chunk]) for chunk in range(len(counts))]
        targets = [sum(counts[other] for other in order[: order.index(chunk)]) for chunk in range(len(counts))]
        return *(torch.tensor(numbers, dtype=torch.int64) for numbers in (sources, targets, counts)), num_rows

    def action(self) -> Any:
        """Returns an action of any kind."""
        name = self.choice(("exchange", "copy_rows", "convert_chunks", "sum_parts", "call_python"))
        return getattr(self.extension, name)(*CALLS[name](self))


def _cut(draw: Draw) -> list[Any]:
    row_map, _, experts, _ = draw.row_map()
    known = torch.zeros(0, dtype=torch.int64) if row_map[2] is None else row_map[2].long()
    return [row_map, torch.bincount(known, minlength=experts), draw.size(1)]


def _permute(draw: Draw) -> list[Any]:
    row_map, tokens, experts, _ = draw.row_map()
    rows = draw.numbers(tokens, draw.size(0, 70), dtype=draw.choice(FLOATS))
    return [row_map, rows, draw.numbers(tokens, experts, dtype=draw.choice((*FLOATS, torch.float64)))]


def _unpermute(draw: Draw) -> list[Any]:
    row_map, tokens, experts, rows = draw.row_map()
    hidden = draw.size(0, 70)
    permuted = draw.numbers(rows, hidden + draw.choice((0, 8)), dtype=draw.choice(FLOATS))
    return [row_map, permuted, hidden, draw.choice((None, draw.numbers(tokens, experts)))]


def _unpermute_backward(draw: Draw) -> list[Any]:
    row_map, tokens, experts, rows = draw.row_map()
    hidden, dtype = draw.size(0, 70), draw.choice(FLOATS)
    gradient, permuted = draw.numbers(tokens, hidden, dtype=dtype), draw.numbers(rows, hidden, dtype=dtype)
    return [row_map, gradient, permuted, draw.numbers(tokens, experts)]


def _unpermute_probs(draw: Draw) -> list[Any]:
    row_map, _, _, rows = draw.row_map()
    dtype, hidden = draw.choice((*FLOATS, torch.float64)), draw.size()
    if draw.chance(0.5):
        return [row_map, draw.numbers(rows, dtype=dtype), 0, dtype]
    return [row_map, draw.numbers(rows, hidden + 8, dtype=draw.choice(FLOATS)), hidden, dtype]


def _wire_rows(draw: Draw, rows: int, hidden: int, wire: str) -> torch.Tensor:
    """Returns rows of a format, mostly wider than their payload."""
    if wire in ("same", "bf16"):
        return draw.numbers(
            rows, hidden + draw.choice((0, 8)), dtype=torch.bfloat16 if wire == "bf16" else torch.float32
        )
    block, scale = (128, 4) if wire == "fp8" else (32, 1)
    payload = -(-(-(-hidden // scale) * scale + -(-hidden // block) * scale) // 16) * 16
    return draw.below(256, rows, payload + draw.choice((0, 16))).to(torch.uint8)


def _two_formats(draw: Draw) -> tuple[str, str]:
    wires = ["same", draw.choice(WIRES[1:])]
    draw.shuffle(wires)
    return wires[0], wires[1]


def _convert_rows(draw: Draw) -> list[Any]:
    (source, target), rows, hidden = _two_formats(draw), draw.size(), draw.size(0, 300)
    sources = draw.choice((None, draw.below(rows, draw.size())))
    given = _wire_rows(draw, rows, hidden, source)
    made = _wire_rows(draw, rows if sources is None else sources.numel(), hidden, target)
    return [given, source, hidden, sources, target, made]


def _convert_chunks(draw: Draw) -> list[Any]:
    (source, target), rows, hidden = _two_formats(draw), draw.size(), draw.size(0, 300)
    sides = [_wire_rows(draw, rows, hidden, source), source, _wire_rows(draw, rows, hidden, target), target]
    return [*sides, hidden, draw.chunks(rows)]


def _sum_rows(draw: Draw) -> list[Any]:
    row_map, tokens, _, rows = draw.row_map()
    hidden, wire = draw.size(0, 300), draw.choice(WIRES)
    out_wire = draw.choice(("same", "bf16", wire))
    out = _wire_rows(draw, tokens, hidden, out_wire)
    return [row_map, _wire_rows(draw, rows, hidden, wire), hidden, wire, out_wire, out]


def _spread_rows(draw: Draw) -> list[Any]:
    row_map, tokens, _, rows = draw.row_map()
    width, dtype = draw.size(0, 70), draw.choice((*FLOATS, torch.uint8))
    given = draw.numbers(tokens, width, dtype=dtype)
    return [row_map, given, torch.zeros(rows, max(0, width - draw.choice((0, 0, 2, 1, -1))), dtype=dtype)]


def _copy_chunks(draw: Draw) -> list[Any]:
    rows = draw.size()
    return [draw.numbers(rows, draw.size(), dtype=draw.choice((*FLOATS, torch.complex64))), draw.chunks(rows)]


def _codec_shape(draw: Draw) -> tuple[int, ...]:
    return (draw.choice((65536, 65537, 140000)),) if draw.chance(0.03) else (draw.size(), draw.size())


def _encode(draw: Draw) -> list[Any]:
    shape, dtype = _codec_shape(draw), draw.choice(FLOATS)
    expert, shared = draw.numbers(*shape, dtype=dtype), draw.numbers(*shape, dtype=dtype)
    return [expert, shared, draw.randint(0, expert.numel())]


def _decode(draw: Draw) -> list[Any]:
    expert, shared, kept = _encode(draw)
    values, indices = draw.extension.sr_encode(expert, shared, kept)
    return [values, indices, shared]


def _count_map(draw: Draw) -> list[Any]:
    samples = draw.size(1)
    return [draw.routing(samples * draw.size()), samples]


def _counts(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.numbers(*shape, dtype=torch.float64) if draw.chance(0.5) else draw.below(1000, *shape)


def _placement(draw: Draw) -> list[Any]:
    samples, sinks = draw.size(), draw.size(1)
    return [_counts(draw, samples, sinks), draw.below(2 + 2 * samples // sinks, sinks) + 1]


def _place(draw: Draw) -> list[Any]:
    devices, experts = draw.size(1), draw.size(1)
    samples = devices * draw.size(0, 5)
    nodes = draw.below(draw.randint(1, devices), devices)
    capacity = draw.choice((None, draw.below(samples + 2, devices) + 1))
    return [_counts(draw, samples, experts), draw.below(devices, experts), nodes, capacity]


def _plan(draw: Draw) -> list[Any]:
    ep, etp = draw.randint(1, 4), draw.randint(1, 3)
    counts = draw.below(50, ep, etp, ep * draw.randint(0, 3))
    targets = draw.randint(1, 3)
    chunks = targets * draw.randint(1, 3) + draw.chance(0.1)
    return [counts, draw.randrange(ep), draw.randrange(etp), chunks, targets, torch.device("cpu")]


def _shares(draw: Draw) -> list[Any]:
    ep, etp, tp = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 4)
    counts = draw.below(50, ep, etp, ep * draw.randint(0, 3))
    return [counts, draw.below(tp, ep, etp), tp, draw.randint(1, 3), draw.randrange(ep), draw.randrange(etp)]


def _hops(draw: Draw) -> list[Any]:
    workers = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    sizes = [draw.choice([size for size in range(1, number + 1) if number % size == 0]) for number in workers]
    world, etp = math.prod(workers), draw.randint(1, 2)
    experts, regions, columns = world * draw.randint(1, 2), 1, 0
    for number, size in zip(workers, sizes, strict=True):
        regions *= number // size
        columns += regions if number > size else 0
    counts = draw.below(50, world, etp, draw.randint(1, 2), draw.randint(1, 3), columns + experts + draw.randint(0, 1))
    return [counts, workers, sizes, experts, draw.randrange(world), draw.randrange(etp)]


def _exchange(draw: Draw) -> list[Any]:
    rows, width, dtype = draw.size(), draw.size(), draw.choice(FLOATS)
    blocks = []
    count = draw.randint(0, rows)
    for _ in range(2):
        blocks.append([(draw.randint(0, rows - count), count)])
    sent, received = draw.numbers(rows, width, dtype=dtype), draw.numbers(rows, width, dtype=dtype)
    return [dist.group.WORLD, sent, blocks[0], received, blocks[1]]


def _copy_rows(draw: Draw) -> list[Any]:
    rows, widths = draw.size(), (draw.size(), draw.size())
    source, target = (draw.numbers(rows, width, dtype=draw.choice(FLOATS)) for width in widths)
    strides = [tensor.size(1) * tensor.element_size() for tensor in (source, target)]
    count = draw.randint(0, min(strides))
    first = [draw.randint(0, stride - count) for stride in strides]
    return [source, first[0], target, first[1], count, draw.chunks(rows)]


def _sum_parts(draw: Draw) -> list[Any]:
    if draw.chance(0.3):
        wire, hidden = draw.choice(WIRES[2:]), draw.size(0, 300)
        part = _wire_rows(draw, draw.size(), hidden, wire)
        return [[part, part.clone()], draw.choice((part, part.clone())), 0, hidden, wire]
    rows, width, dtype = draw.size(), draw.size(1), draw.choice(FLOATS)
    parts = [draw.numbers(rows, width, dtype=dtype) for _ in range(draw.randint(1, 4))]
    size = parts[0].element_size()
    count = draw.randint(0, width)
    return [parts, draw.choice((parts[0], parts[0].clone())), draw.randint(0, width - count) * size, count, dtype]


def _function(draw: Draw) -> list[Any]:
    return [draw.choice((lambda: None, lambda: 1 / 0, dict, torch.cuda.current_device, sys.exit, len))]


def _executor_run(draw: Draw) -> list[Any]:
    lanes = draw.randint(1, 4)
    ops = []
    for op in range(draw.randint(0, 5)):
        waits_for = draw.sample(range(op), draw.randint(0, op))
        actions = [draw.action() for _ in range(draw.randint(0, 2))]
        ops.append((draw.randrange(lanes), waits_for, actions, draw.choice((0, 0, 0, 1, -1))))
    kind = draw.extension.Executor
    executor = kind.__new__(kind) if draw.chance(0.02) else kind(lanes)
    return [executor, ops, draw.randint(-1, lanes), draw.chance(0.5)]


def _run(draw: Draw) -> list[Any]:
    kind = draw.extension.Action
    return [kind.__new__(kind) if draw.chance(0.05) else draw.action()]


def _begun(draw: Draw) -> list[Any]:
    kind = draw.extension.Exchange
    return [kind.__new__(kind) if draw.chance(0.05) else draw.extension.exchange(*_exchange(draw))]


def _stream_executor(draw: Draw) -> list[Any]:
    kind = draw.extension.StreamExecutor
    return [kind.__new__(kind) if draw.chance(0.05) else kind([0, 0, 0, 0])]


CALLS: dict[str, Callable[[Draw], list[Any]]] = {
    "empty": lambda draw: [
        [draw.size() for _ in range(draw.randint(0, 4))], draw.choice(DTYPES),
        torch.device(draw.choice(("cpu", "cpu", "cpu:3", "meta", "cuda:7"))),
    ],
    "build_row_map": lambda draw: [draw.routing(), draw.choice((None, draw.size()))],
    "build_padded_row_map": lambda draw: [(routing := draw.routing()), draw.randint(0, routing.size(0))],
    "build_row_map_from_sources": lambda draw: [
        draw.below(tokens := draw.size(), draw.size()), tokens, draw.choice((0, draw.size(1))),
    ],
    "cut_rows": _cut,
    "permute_rows": lambda draw: _permute(draw) if draw.chance(0.7) else [*_permute(draw)[:2], None],
    "spread_rows": _spread_rows,
    "permute_packed": lambda draw: [*_permute(draw), draw.choice(WIRES)],
    "unpermute_rows": _unpermute,
    "sum_rows": _sum_rows,
    "unpermute_rows_backward": _unpermute_backward,
    "unpermute_probs": _unpermute_probs,
    "copy_chunks": _copy_chunks,
    "convert_rows": _convert_rows,
    "sr_encode": _encode,
    "sr_decode": _decode,
    "count_routing_map": _count_map,
    "solve_placement": _placement,
    "place_samples": _place,
    "plan_exchange": _plan,
    "share_out": _shares,
    "plan_hops": _hops,
    "Action": lambda draw: [],
    "Action.run": _run,
    "Action.join": _run,
    "exchange": _exchange,
    "copy_rows": _copy_rows,
    "convert_chunks": _convert_chunks,
    "sum_parts": _sum_parts,
    "Exchange": lambda draw: [],
    "Exchange.begin": _begun,
    "Exchange.wait": _begun,
    "give_up_waits": lambda draw: [],
    "call_python": _function,
    "named": lambda draw: [draw.choice(("an op", "", "\0", "é")), draw.action()],
    "Executor": lambda draw: [draw.randint(0, 4)],
    "Executor.run": _executor_run,
    "Executor.give_up": lambda draw: [draw.extension.Executor(draw.randint(0, 4))],
    "StreamExecutor": lambda draw: [[draw.randint(-3, 1) for _ in range(draw.randint(0, 4))]],
    "StreamExecutor.run": lambda draw: [draw.extension.StreamExecutor([0, 0, 0, 0]), *_executor_run(draw)[1:]],
    "StreamExecutor.issue_meanwhile": _stream_executor,
    "new_cuda_stream": lambda draw: [draw.randint(-3, 1)],
    "build_info": lambda draw: [],
    "select_cpu_kernels": lambda draw: [draw.choice(("generic", "avx2", "avx512", "best", "", "a\0b", "\udc80"))],
    "keep_uncaught_exceptions": lambda draw: [],
    "uncaught_exception": lambda draw: [],
    "let_end": lambda draw: [],
    "host_pool_stats": lambda draw: [],
}  # fmt: skip


def missing(extension: ModuleType) -> set[str]:
    """Returns the calls that have no entry in CALLS."""
    return public_calls(extension) - set(CALLS)


class Wrapper(torch.Tensor):
    """Stands for another tensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def _freed(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def _of_values(tensor: torch.Tensor, values: list[int]) -> torch.Tensor:
    tensor = tensor.clone()
    if tensor.numel():
        view = tensor.view(-1).view(torch.uint8) if tensor.dtype == torch.bool else tensor.view(-1)
        for place, value in enumerate(values):
            limits = torch.iinfo(view.dtype) if not view.dtype.is_floating_point else None
            view[place % len(view)] = value if limits is None else min(max(value, limits.min), limits.max)
    return tensor


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.zeros(tensor.nbytes + 17, dtype=torch.uint8).numpy()
    return torch.frombuffer(memory, dtype=tensor.dtype, offset=1, count=tensor.numel()).view(tensor.shape)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode.from_tensor(tensor)


TENSORS: tuple[Callable[[torch.Tensor, Draw], Any], ...] = (
    lambda t, draw: t.to("meta"),
    lambda t, draw: _fake(t),
    lambda t, draw: Wrapper(t),
    lambda t, draw: t.to_sparse(),
    lambda t, draw: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint8),
    lambda t, draw: torch.nested.nested_tensor([t, t]),
    lambda t, draw: torch._efficientzerotensor(*t.shape),
    lambda t, draw: _freed(t, draw.choice((0, 1, max(t.nbytes - 1, 0)))),
    lambda t, draw: _misaligned(t),
    lambda t, draw: torch._neg_view(t),
    lambda t, draw: torch.complex(t.float(), t.float()).conj(),
    lambda t, draw: torch.complex(t.float(), t.float()).conj().imag,
    lambda t, draw: t._lazy_clone(),
    lambda t, draw: t.to(draw.choice(DTYPES)),
    lambda t, draw: t.t(),
    lambda t, draw: t[::2],
    lambda t, draw: t[1:],
    lambda t, draw: t[:0],
    lambda t, draw: t[..., :-1],
    lambda t, draw: t[..., :0],
    lambda t, draw: torch.cat([t, t]),
    lambda t, draw: t.unsqueeze(draw.randint(0, t.dim())),
    lambda t, draw: t.flatten(),
    lambda t, draw: t.sum(),
    lambda t, draw: t[:1].expand(draw.choice(INTEGERS), *t.shape[1:]),
    lambda t, draw: t.new_empty(0).as_strided([draw.choice(INTEGERS) for _ in t.shape], [1] * t.dim()),
    lambda t, draw: t.new_empty(draw.choice((0, 1 << 40, 1 << 55, 1 << 62)), *([0] * (t.dim() - 1))),
    lambda t, draw: t.new_empty(*([0] * (t.dim() - 1)), draw.choice((1 << 50, 1 << 55, 1 << 62))),
    lambda t, draw: _of_values(t, draw.choices(INTEGERS, k=3)),
    lambda t, draw: _of_values(t, [draw.randint(-2, 30) for _ in range(3)]),
    lambda t, draw: t.clone().requires_grad_(),
    lambda t, draw: torch.nn.Parameter(t, requires_grad=False),
    lambda t, draw: t.tolist(),
    lambda t, draw: t.numpy(),
)  # fmt: skip

ANYTHING: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: 1.5, lambda: float("nan"), lambda: "x", lambda: b"x", lambda: [], lambda: (),
    lambda: [None], lambda: {}, object, lambda: torch.float32, lambda: torch.device("meta"), lambda: torch.ones(3),
    lambda: torch.tensor(2), lambda: int, lambda: 1j, lambda: [[1, 2], [3]], lambda: range(5), lambda: iter([1]),
    torch.Generator, lambda: torch.ones(2).untyped_storage(), lambda: dist.group.WORLD,
)  # fmt: skip


def _places(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yields the places where something can be put in place of what is there, the list of all arguments aside."""
    if place:
        yield place
    if isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _places(part, (*place, index))


def _spoilt(value: Any, place: tuple[int, ...], draw: Draw) -> Any:
    """Returns `value` with something else at a place."""
    if place:
        parts = list(value)
        parts[place[0]] = _spoilt(parts[place[0]], place[1:], draw)
        return parts if isinstance(value, list) else tuple(parts)
    if draw.chance(0.1):
        return draw.choice(ANYTHING)()
    if isinstance(value, torch.Tensor):
        try:
            return draw.choice(TENSORS)(value, draw)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError):
            return draw.choice(ANYTHING)()  # PyTorch makes no such tensor
    if isinstance(value, int) and not isinstance(value, bool):
        return draw.choice(INTEGERS)
    if isinstance(value, (list, tuple)) and value:
        parts = list(value)
        parts = draw.choice((parts[:-1], parts + parts[:1], parts[::-1], parts * 2))
        return parts if isinstance(value, list) else tuple(parts)
    return draw.choice(ANYTHING)()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _change(arguments: list[Any], draw: Draw) -> None:
    """Changes what an action was given, behind its back."""
    tensors = [tensor for tensor in _tensors(arguments) if type(tensor) is torch.Tensor]
    for tensor in draw.sample(tensors, min(len(tensors), draw.randint(0, 2))):
        way = draw.randrange(4)
        if way == 0:
            tensor.untyped_storage().resize_(draw.choice((0, 1)))
        elif way == 1:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        elif way == 2 and tensor.dtype == torch.int64 and tensor.nbytes <= tensor.untyped_storage().nbytes():
            tensor.fill_(draw.choice((-1, 1 << 40, (1 << 63) - 1)))
        elif way == 3:
            tensor.resize_(0)


def _use(result: Any, arguments: list[Any], draw: Draw) -> None:
    """Runs an action; reads every byte of a tensor."""
    if isinstance(result, draw.extension.Action):
        if draw.chance(0.3):
            _change(arguments, draw)
        if draw.chance(0.5):
            draw.extension.Executor(2).run([(draw.randrange(2), [], [result], 0)], 0, True)
        else:
            result.run()
        if draw.chance(0.1):
            result.run()
    for tensor in _tensors(result):
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_contiguous():
            tensor.detach().flatten().view(torch.uint8).sum()


def call(extension: ModuleType, seed: int, number: int) -> str:
    """Makes one call; says which, and how it ended."""
    draw = Draw(extension, f"{seed}:{number}")
    name = draw.choice(sorted(set(CALLS) & public_calls(extension)))
    arguments = CALLS[name](draw)
    places = list(_places(arguments))
    chosen = draw.sample(places, min(len(places), draw.choice((0, 0, 1, 1, 1, 1, 2, 3))))
    for place in chosen:
        # What is spoilt already, or lies in something that is, is left: PyTorch itself crashes on some of these.
        if not any(
            other != place and (other[: len(place)] == place or place[: len(other)] == other) for other in chosen
        ):
            arguments = _spoilt(arguments, place, draw)
    if draw.chance(0.01):
        arguments = draw.choice((arguments[:-1], [*arguments, None]))
    function: Any = extension
    for part in name.split("."):
        function = getattr(function, part)
    try:
        _use(function(*arguments), arguments, draw)
    except SystemError:
        raise
    except SystemExit as error:
        raise RuntimeError("call_python let SystemExit through") from error
    except Exception as error:
        return f"{name}: {type(error).__name__}"
    return f"{name}: done"


def main() -> None:
    """Makes the calls, and says how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--extension", type=Path, help="another build of it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    extension = load(options.extension)
    if missing(extension):
        sys.exit(f"CALLS has no entry for {', '.join(sorted(missing(extension)))}")
    gone = set(CALLS) - CUDA_ALONE - public_calls(extension)
    if gone:
        sys.exit(f"the extension no longer has {', '.join(sorted(gone))}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ends: Counter[str] = Counter()
    try:
        for number in range(options.first, options.first + options.calls):
            os.write(2, f"\rseed {options.seed}, call {number}".encode())  # which it was, however it ends
            if number % 50 == 0:
                faulthandler.dump_traceback_later(SECONDS_OF_50, exit=True)
            ends[call(extension, options.seed, number)] += 1
    finally:
        print(file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    print(f"seed {options.seed}: {options.calls} calls")
    for end, count in sorted(ends.items()):
        print(f"{count:7} {end}")
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.enable()
    main()
