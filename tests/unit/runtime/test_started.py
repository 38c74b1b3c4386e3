"""Schedules that were started on streams: how far they are issued, and what waits for what."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.kernels import streams
from megatron_moe_opt.runtime.engine import started
from megatron_moe_opt.runtime.engine.executor import Executor, LaneError
from megatron_moe_opt.runtime.engine.steps import Steps
from megatron_moe_opt.schedules.expert_migration import DECODED, gathered
from megatron_moe_opt.schedules.issue_order import EXPERT_KERNELS
from megatron_moe_opt.schedules.schedule import Kind, Lane, Op, Schedule
from tests.accelerator.software import CALLER, Adversary, Device, Queues, play


@dataclass
class Cuda:
    """torch.cuda's streams and events, on a device in software, and collectives of NCCL on it."""

    device: Device
    lacks: str = ""
    """A method of streams that does nothing."""
    at: object = CALLER
    made: int = 0

    def Stream(self, _=None):  # noqa: N802
        self.made += 1
        return self._stream(f"stream {self.made}")

    def current_stream(self):
        return self._stream(self.at)

    @contextmanager
    def stream(self, stream):
        before, self.at = self.at, stream.name
        yield
        self.at = before

    def compute(self, seconds=0.0, run=None):
        """Launches kernels, one behind the other; `run` is what the last does."""
        for kernel in range(1, EXPERT_KERNELS + 1):
            self.device.launch(self.at, seconds=seconds / EXPERT_KERNELS, run=run if kernel == EXPERT_KERNELS else None)

    def collective(self, group, seconds=0.0, run=None):
        """Returns an action that puts a collective on the group's stream behind the current one, which
        waits for it when it joins.
        """
        issued = []

        def issue():
            issued.append(self.device.launch(group, [self.device.last.get(self.at)], seconds=seconds, run=run))

        return SimpleNamespace(run=issue, join=lambda: self.device.launch(self.at, issued))

    def _stream(self, name):
        last, launch = self.device.last, self.device.launch
        methods = {
            "record_event": lambda: last.get(name),
            "wait_event": lambda event: launch(name, [event]),
        }
        if self.lacks:
            methods[self.lacks] = lambda *_: None
        return SimpleNamespace(name=name, **methods)


GATHERED = gathered({0: 2, 1: 4})
"""A gather over two levels."""


def on_streams(monkeypatch, cuda):
    """The executor of a device in software; what was started there."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if cuda.device.queues is Queues.ONE else "32")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(streams, "STREAMED", {"cpu"})
    monkeypatch.setattr(started, "_queues", {})
    executor = Executor.__new__(Executor)
    executor._device = torch.device("cpu")
    return executor


def passes(monkeypatch, queues, layers=4):
    """Seconds of layers whose experts are gathered over two levels while the layer before them is computed."""
    cuda = Cuda(Device(queues))
    executor = on_streams(monkeypatch, cuda)

    def gather():
        collectives = cuda.collective("outer", 1.0), cuda.collective("inner", 0.5)
        return executor.start(GATHERED, [Steps((collective,)) for collective in collectives])

    running = gather()
    for _ in range(layers):
        running.wait()
        running = gather()
        cuda.compute(2.0)  # dispatch and experts
        started.advance_started()
        cuda.compute(1.0)  # combine
    running.wait()
    return max(end for _, end in play(cuda.device).values())


def test_experts_travel_beside_the_layers_whatever_the_queues(monkeypatch):
    many = passes(monkeypatch, Queues.MANY)
    assert many == 1.5 + 4 * 3.0  # the first gather, then layers alone
    assert passes(monkeypatch, Queues.ONE) <= 1.15 * many


def compressed(monkeypatch, queues, at_begin=6, decodes_apart=True, waits_at_once=False, layers=6):
    """Seconds of a step whose experts travel compressed, one layer ahead: what precedes the first layer takes 2, and
    from a layer to the next it is 0.5 and 2.5 in turn; to encode and to decode 0.2, to gather 0.9.
    """
    cuda = Cuda(Device(queues))
    executor = on_streams(monkeypatch, cuda)
    code = lambda: Steps((SimpleNamespace(run=lambda: cuda.compute(0.2), join=lambda: None),))  # noqa: E731
    sends, decodes = [], []

    def send():
        steps = [code(), Steps((cuda.collective("experts", 0.9),))]
        sends.append(executor.start(gathered({0: 2}, is_coded=True), steps))

    def decode():
        message = sends[len(decodes)]
        queue = ("decoded", None if waits_at_once else message) if decodes_apart else ()
        if waits_at_once:
            message.wait()
        decodes.append(executor.start(DECODED.sized([2]), [code()], *queue))

    for number in range(at_begin):
        send()
        if number < 2 and decodes_apart:
            decode()
    cuda.compute(2.0)
    for number in range(layers):
        started.advance_started()
        if len(decodes) == number:
            decode()
        decodes[number].wait()
        if len(sends) == number + 1 < layers:
            send()
        if len(decodes) == number + 1 < layers:
            decode()
        cuda.compute(0.25 if number % 2 else 1.25)  # dispatch and experts
        started.advance_started()
        cuda.compute(0.25 if number % 2 else 1.25)  # combine
    return max(end for _, end in play(cuda.device).values())


def test_messages_of_all_layers_at_the_begin_of_a_step_are_not_waited_for(monkeypatch):
    alone = 2.0 + 3 * (2.5 + 0.5)
    assert compressed(monkeypatch, Queues.MANY) == pytest.approx(alone)
    assert compressed(monkeypatch, Queues.MANY, at_begin=2) == pytest.approx(12.6)
    assert compressed(monkeypatch, Queues.MANY, decodes_apart=False) == pytest.approx(15.8)  # behind all messages
    # One queue for all: a message leaves when the one before it has had the time of half a layer.
    assert compressed(monkeypatch, Queues.ONE) == pytest.approx(13.275)  # 1.21 times as long
    assert compressed(monkeypatch, Queues.ONE, at_begin=2) == pytest.approx(13.6)
    assert compressed(monkeypatch, Queues.ONE, decodes_apart=False) == pytest.approx(17.15)
    assert compressed(monkeypatch, Queues.ONE, waits_at_once=True) > 13.5


def test_with_one_queue_what_was_started_is_issued_as_far_as_a_collective(monkeypatch):
    log = []

    class Logged:
        def __init__(self, name):
            self.name = name

        def run(self):
            log.append(f"{self.name} issued")

        def join(self):
            log.append(f"{self.name} joined")

    ops = ((Kind.ENCODE, None), (Kind.ALL_GATHER, "a"), (Kind.SUM, None), (Kind.ALL_GATHER, "a"), (Kind.DECODE, None))
    schedule = Schedule("test", tuple(Op(kind, Lane.EXPERTS, group=group) for kind, group in ops))
    all_of_it = [f"{number} {what}" for number in range(5) for what in ("issued", "joined")]
    next_one = [f"{number} {what}" for number in range(5, 10) for what in ("issued", "joined")]
    for queues in Queues:
        executor = on_streams(monkeypatch, Cuda(Device(queues)))
        executor.start(schedule, [Steps((Logged(number),)) for number in range(5)])
        assert log == (all_of_it if queues is Queues.MANY else all_of_it[:3])
        started.advance_started()
        assert log == (all_of_it if queues is Queues.MANY else all_of_it[:7])
        running = executor.start(schedule, [Steps((Logged(number),)) for number in range(5, 10)])
        assert log == (all_of_it + next_one if queues is Queues.MANY else all_of_it[:7])
        started.advance_started()
        assert log == all_of_it + (next_one if queues is Queues.MANY else next_one[:3])
        running.wait()
        assert log == all_of_it + next_one
        log.clear()


def test_with_one_queue_nothing_is_issued_for_what_is_behind_something_else(monkeypatch):
    """Nothing is issued until the other has been, or it is waited for."""
    log = []

    def coded(name):
        return Steps((SimpleNamespace(run=lambda: log.append(name), join=lambda: None),))

    for asks in (False, True):
        executor = on_streams(monkeypatch, Cuda(Device(Queues.ONE)))
        messages = [
            executor.start(gathered({0: 2}, is_coded=True), [coded(f"encode {one}"), coded(f"gather {one}")])
            for one in range(2)
        ]
        decoding = executor.start(DECODED.sized([2]), [coded("decode 1")], "decoded", messages[1])
        assert log == ["encode 0", "gather 0"]
        if asks:
            decoding.wait()
        else:
            started.advance_started()
            assert log == ["encode 0", "gather 0", "encode 1", "gather 1"]
            started.advance_started()
        assert log == ["encode 0", "gather 0", "encode 1", "gather 1", "decode 1"]
        log.clear()


def test_an_op_that_fails_on_a_stream_is_named(monkeypatch):
    def refuse():
        raise RuntimeError("refused")

    cuda, said = Cuda(Device(Queues.ONE)), "lane experts: all_gather of chunk 0 failed: refused"
    executor = on_streams(monkeypatch, cuda)
    failing = Steps((SimpleNamespace(run=refuse),))
    with pytest.raises(LaneError, match=said):
        executor.start(GATHERED, [failing, failing])
    # What was left running fails where it is waited for, and so does whoever waits then and later.
    coded = gathered({0: 2}, is_coded=True)
    ops = SimpleNamespace(run=lambda: None, join=lambda: None), SimpleNamespace(run=lambda: None, join=refuse)
    running = executor.start(coded, [Steps((action,)) for action in ops])
    for _ in range(2):
        with pytest.raises(LaneError, match=said):
            running.wait()


def in_order(monkeypatch, queues, seed, lacks=""):
    """Whether collectives see what the caller has queued before, and each other; and the caller sees them."""
    cuda, done, seen = Cuda(Device(queues), lacks), [], []
    executor = on_streams(monkeypatch, cuda)

    def gather(number):
        names = "outer", "inner"
        bound = [cuda.collective(name, run=lambda name=name: done.append((name, number))) for name in names]
        return executor.start(GATHERED, [Steps((collective,)) for collective in bound])

    expected = []
    for number in range(3):
        cuda.compute(run=lambda number=number: done.append(("weights", number)))
        running = gather(number)
        started.advance_started()
        running.wait()
        cuda.compute(run=lambda: seen.append(list(done)))
        expected += [("weights", number), ("outer", number), ("inner", number)]
    adversary = Adversary(cuda.device, seed)
    adversary.run_until(None)
    return seen == [expected[:3], expected[:6], expected]


@pytest.mark.parametrize("queues", Queues)
def test_what_was_started_waits_for_its_caller_and_its_caller_for_it(monkeypatch, queues):
    assert all(in_order(monkeypatch, queues, seed) for seed in range(20))


@pytest.mark.parametrize("lacks", ["wait_event", "record_event"])
def test_a_queue_without_one_of_its_waits_is_found(monkeypatch, lacks):
    assert not all(in_order(monkeypatch, Queues.MANY, seed, lacks) for seed in range(20))
