"""Schedules on CUDA streams: order, waiting, recording, failures; and what their steps compute."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
import torch.cuda._gpu_trace as gpu_trace
from torch.cuda._sanitizer import EventHandler

from megatron_moe_opt import kernels
from megatron_moe_opt.kernels import LANE_BYTES, ChunkList, build_row_map, permute_packed
from megatron_moe_opt.kernels.streams import own_stream
from megatron_moe_opt.kernels.wire_format import narrow_rows
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import LaneError, executor
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tests.gpu import EMULATED, sized
from tests.unit.permute_cases import equal_bits, random_map

SPIN = 100_000_000  # cycles: about 50 ms, long against every kernel of these tests
LONG_SPIN = 2_000_000_000  # about a second: long against what a busy host takes to issue them, too
ROWS, WIDTH, CHUNKS = sized(999, 90), 256, 4
needs_streams = pytest.mark.skipif(EMULATED, reason="the emulator works while it issues: it has kernels, not streams")
LANES = (Lane.INTER, Lane.INTRA, Lane.COPY)


class Chains:
    """Each chunk's rows go through all lanes, and are put into another order in each."""

    def __init__(self, device, lanes):
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(CHUNKS)]
        self.expected = []
        self.inputs, self.outputs = [], []
        ops, self.steps = [], []
        for chunk, rows in enumerate(self.rows):
            source = torch.zeros(ROWS, WIDTH, device=device)
            self.inputs.append(source)
            for stage, lane in enumerate(lanes):
                order = torch.randperm(9, generator=generator)
                rows = kernels.copy_chunks(rows, ChunkList.from_counts([ROWS // 9] * 9, order))
                target = torch.zeros_like(source)
                ops.append(Op(Kind.COPY, lane, chunk, waits_for=(len(ops) - 1,) if stage else ()))
                self.steps.append(
                    steps.copy_rows(source, target, ChunkList.from_counts([ROWS // 9] * 9, order, device))
                )
                source = target
            self.outputs.append(source)
            self.expected.append(rows)
        self.schedule = Schedule("chains", tuple(ops))

    def delay(self, op, cycles=SPIN):
        """Lets this op begin late."""
        self.steps[op] = steps.call(lambda: torch.cuda._sleep(cycles)) + self.steps[op]

    def fill(self):
        for place, rows in zip(self.inputs, self.rows, strict=True):
            place.copy_(rows)

    def check(self, outputs):
        torch.cuda.synchronize()
        for found, wanted in zip(outputs, self.expected, strict=True):
            assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("lanes", [LANES, (*LANES, Lane.COMPUTE)], ids=["without compute", "with compute"])
def test_lanes_wait_for_the_current_stream_and_it_for_them(device, lanes):
    """Inputs are filled late and cleared right behind the schedule: whoever does not wait reads zeros."""
    chains = Chains(device, lanes)
    for op in (0, len(lanes) - 1):  # the first chunk begins late in its first lane, and in its last
        chains.delay(op)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN)
    chains.fill()
    executor("cuda").run(chains.schedule, chains.steps)
    seen = [output.clone() for output in chains.outputs]
    for tensor in chains.inputs:
        tensor.zero_()
    chains.check(seen)


@pytest.mark.parametrize("record", [False, True])
def test_pytorchs_cuda_sanitizer_is_told_what_waits_for_what(device, monkeypatch, record):
    """Its own logic, fed by PyTorch's trace, finds no race in a schedule, and one where a wait is not told."""
    schedule = Schedule(
        "a diamond",
        (
            Op(Kind.COPY, Lane.INTER, 0, writes=("left",)),
            Op(Kind.COPY, Lane.INTRA, 0, writes=("right",)),
            Op(Kind.COPY, Lane.COPY, 0, waits_for=(0, 1), reads=("left", "right"), writes=("both",)),
        ),
    )
    numbers = {"left": 1, "right": 2, "both": 3}
    torch._C._activate_gpu_trace()

    def races_without(*untold: object) -> list[object]:
        sanitizer, found = EventHandler(), []
        for registry, told in (
            (gpu_trace.EventCreationCallbacks, sanitizer._handle_event_creation),
            (gpu_trace.EventDeletionCallbacks, sanitizer._handle_event_deletion),
            (gpu_trace.EventRecordCallbacks, sanitizer._handle_event_record),
            (gpu_trace.EventWaitCallbacks, sanitizer._handle_event_wait),
            (gpu_trace.StreamSynchronizationCallbacks, sanitizer._handle_stream_synchronization),
        ):
            monkeypatch.setattr(registry, "callback_list", [] if registry in untold else [told])

        def touch(reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
            names = {numbers[name]: [name] for name in (*reads, *writes)}
            written = {numbers[name] for name in writes}
            on = torch.cuda.current_stream().cuda_stream
            found.extend(sanitizer._handle_kernel_launch(on, set(names) - written, written, set(), "", names))

        touch((), tuple(numbers))
        of_ops = [steps.call(lambda op=op: touch(op.reads, op.writes)) for op in schedule.ops]
        executor("cuda").run(schedule, of_ops, record)
        touch((), tuple(numbers))
        return found

    assert not races_without()
    assert races_without(gpu_trace.EventWaitCallbacks)


def test_on_a_side_stream(device):
    chains = Chains(device, LANES)
    chains.delay(0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        chains.fill()
        executor("cuda").run(chains.schedule, chains.steps)
        assert torch.cuda.current_stream() == side
        seen = [output.clone() for output in chains.outputs]
    chains.check(seen)


@needs_streams
def test_the_host_does_not_wait(device):
    chains = Chains(device, LANES)
    chains.delay(0, LONG_SPIN)
    chains.fill()
    torch.cuda.synchronize()
    executor("cuda").run(chains.schedule, chains.steps)
    assert not torch.cuda.current_stream().query()
    chains.check(chains.outputs)


def test_recording_orders_the_ops(device):
    chains = Chains(device, LANES)
    chains.fill()
    timeline = executor("cuda").run(chains.schedule, chains.steps, record=True)
    chains.check(chains.outputs)
    assert [span.op for span in timeline.spans] == list(chains.schedule.ops)
    resolution = 2e-6  # of CUDA's timestamps
    for span in timeline.spans:
        assert -resolution <= span.start <= span.end + resolution
        for other in span.op.waits_for:
            assert timeline.spans[other].end <= span.start + resolution
    for lane in LANES:
        spans = timeline.lane(lane)
        assert len(spans) == CHUNKS
        assert all(first.end <= second.start + resolution for first, second in zip(spans, spans[1:], strict=False))


def test_ops_are_issued_halfway_through_one_whose_backward_pass_says_so(device):
    """Which autograd runs on a thread of its own, on a GPU."""
    log, chains = [], Chains(device, LANES)
    tell = executor("cuda").issue_meanwhile

    def halfway(_):
        log.append(threading.get_ident())
        tell()

    def backward():
        rows = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
        half = rows * 2
        half.register_hook(halfway)
        half.sum().backward()
        log.append("second half")
        assert rows.grad.eq(2).all()

    ops = [replace(op, waits_for=tuple(other + 1 for other in op.waits_for)) for op in chains.schedule.ops]
    chains.steps[0] = steps.call(lambda: log.append("copy")) + chains.steps[0]
    chains.fill()
    schedule = Schedule("halves", (Op(Kind.GRADIENT, Lane.COMPUTE, meanwhile=len(ops)), *ops))
    executor("cuda").run(schedule, [steps.call(backward), *chains.steps])
    thread, *told = log
    assert told == ["copy", "second half"] and (EMULATED or thread != threading.get_ident())
    chains.check(chains.outputs)


@needs_streams
def test_lanes_run_side_by_side(device):
    schedule = Schedule("sleep", tuple(Op(Kind.COMPUTE, lane) for lane in LANES))
    sleep = [steps.call(lambda: torch.cuda._sleep(LONG_SPIN)) for _ in LANES]
    first, *others = executor("cuda").run(schedule, sleep, record=True).spans
    assert first.end > first.start
    for other in others:
        assert other.start < first.end and first.start < other.end


def test_a_failure_names_its_op_and_the_executor_lives_on(device):
    def broken():
        raise KeyError("nothing there")

    ran = []
    chains = Chains(device, LANES)
    chains.fill()
    chains.steps[4] = steps.call(broken)  # chunk 1 in the second lane
    chains.steps[5] = steps.call(lambda: ran.append(5))
    with pytest.raises(LaneError, match="^chains: lane intra: copy of chunk 1 failed: KeyError: ") as caught:
        executor("cuda").run(chains.schedule, chains.steps)
    assert isinstance(caught.value.__cause__, KeyError)
    assert not ran
    torch.cuda.synchronize()
    again = Chains(device, LANES)
    again.fill()
    executor("cuda").run(again.schedule, again.steps)
    again.check(again.outputs)


def sum_on(where, parts, columns):
    parts = [part.to(where) for part in parts]
    summed = torch.full_like(parts[0], 7)
    schedule = Schedule("sum", (Op(Kind.COMPUTE, Lane.COPY),))
    executor(summed.device.type).run(schedule, [steps.sum_parts(parts, summed, columns)])
    return summed.cpu()


@pytest.mark.parametrize("width", [1, 3, 64, 1001, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_sums_equal_the_cpu(device, ranks, dtype, width):
    generator = torch.Generator().manual_seed(ranks * width)
    parts = list(torch.randn(ranks, sized(37, 3), width, generator=generator, dtype=torch.float64).to(dtype))
    columns = [(0, width, dtype)]
    assert torch.equal(sum_on(device, parts, columns), sum_on("cpu", parts, columns))


@pytest.mark.parametrize("hidden", [1, 2, 4, 8, 33])
@pytest.mark.parametrize("prob_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_packed_rows_equal_the_cpu(device, dtype, prob_dtype, hidden):
    """The probability's lane lies wherever the row ends: at any even address."""
    width = hidden + LANE_BYTES // dtype.itemsize
    parts = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        part = torch.zeros(29, width, dtype=dtype)
        part[:, :hidden] = torch.randn(29, hidden, generator=generator).to(dtype)
        lane = torch.randn(29, 1, generator=generator).to(prob_dtype).view(torch.uint8)
        part.view(torch.uint8)[:, hidden * dtype.itemsize :][:, : prob_dtype.itemsize] = lane
        parts.append(part)
    columns = [(0, hidden, dtype), (hidden * dtype.itemsize, 1, prob_dtype)]
    found, wanted = sum_on(device, parts, columns), sum_on("cpu", parts, columns)
    assert equal_bits(found, wanted)


@pytest.mark.parametrize("rank", [0, 70, 299])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, kernels.WireFormat.FP8])
def test_parts_of_any_number_of_ranks_are_summed(device, kind, rank):
    """Parts lie as a reduce-scatter has them: in one buffer, but for this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(300 * 2, 64, generator=generator)
    if isinstance(kind, torch.dtype):
        rows = rows.to(kind)
    else:
        plain, rows = rows, torch.zeros(len(rows), kind.payload_bytes(64, rows.dtype), dtype=torch.uint8)
        narrow_rows(plain, kind, rows)
    sums = []
    for place in ("cpu", device):
        parts = list(rows[2:].to(place).view(299, 2, -1))
        parts.insert(rank, rows[:2].to(place))
        sums.append(sum_on(place, parts, [(0, 64, kind)]))
    assert equal_bits(*sums)


def test_parts_in_too_many_runs_are_refused(device):
    """No caller has them so: each two of these lie at a distance of their own."""
    rows = torch.zeros(130 * 131 // 2, 8, device=device)
    parts = [rows[number * (number + 1) // 2][None] for number in range(130)]
    with pytest.raises(LaneError, match="parts in at most 64 runs at equal distances; these 130 have more"):
        sum_on(device, parts, [(0, 8, torch.float32)])
    sum_on(device, parts[:128], [(0, 8, torch.float32)])


@pytest.mark.parametrize("num_chunks", [2, 4, 50])
@pytest.mark.parametrize("capacity", [None, 40])
def test_cut_row_maps_equal_the_cpu(device, capacity, num_chunks):
    generator = torch.Generator().manual_seed(num_chunks)
    routing_map = random_map(300, 16, 4, generator)
    tokens, probs = torch.randn(300, 64, generator=generator), torch.rand(300, 16, generator=generator)
    here = build_row_map(routing_map, capacity).cut(num_chunks)
    whole = build_row_map(routing_map.to(device), capacity)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = whole.cut(num_chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.num_chunks == num_chunks
    for name in ("offsets", "rows", "experts", "expert_counts"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name
    packed = permute_packed(tokens.to(device), probs.to(device), there)
    assert equal_bits(packed.cpu(), permute_packed(tokens, probs, here))


@needs_streams
def test_streams_are_not_pytorch_s(device):
    """Its own come from a pool of 32 a priority; whoever has one shares it with every 32nd that asks."""
    of_the_pool = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
    assert len(of_the_pool) < 128
    ours = {own_stream(torch.device("cuda", torch.cuda.current_device())).cuda_stream for _ in range(3)}
    assert len(ours) == 3 and not ours & of_the_pool
