"""Tasks in stages: who runs them decides when their collectives are waited for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_moe_opt.runtime.engine import communication_lane
from megatron_moe_opt.runtime.engine.collectives import CollectiveError, Pending, named_errors
from megatron_moe_opt.runtime.engine.communication_lane import HostLane, StreamLane
from megatron_moe_opt.runtime.observed.stages import Staged
from tests.accelerator.software import CALLER, Adversary, Device, Queues, play


def collective(log, name, result=1.0, error=None):
    def wait():
        log.append(f"{name} waited for")
        if error is not None:
            raise error

    log.append(f"{name} issued")
    return Pending(name, None, SimpleNamespace(wait=wait), lambda: torch.tensor(result))


def two_stages(log):
    first = yield collective(log, "first", 2.0)
    second = yield collective(log, "second", 3.0)
    return first * second


def test_a_stage_is_issued_when_the_one_before_it_was_waited_for():
    log = []
    task = Staged(lambda: two_stages(log))
    assert log == ["first issued"] and task.result is None
    task.advance()
    assert log[1:] == ["first waited for", "second issued"]
    assert task.finish() == task.finish() == 6 and log[3:] == ["second waited for"]
    assert Staged(lambda: torch.tensor(4.0)).result == 4
    assert HostLane("test").submit(lambda: two_stages([]))() == 6


def test_an_error_is_named_by_the_task():
    def task():
        with named_errors("the whole", None):
            yield collective([], "a part", error=RuntimeError("lost"))

    with pytest.raises(CollectiveError, match="^the whole on .* lost$"):
        Staged(task).finish()


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
        self.device.launch(self.at, seconds=seconds, run=run)

    def collective(self, group, seconds=0.0, run=None):
        """On the group's stream behind the current one, which waits for it when it is told to."""
        issued = self.device.launch(group, [self.device.last.get(self.at)], seconds=seconds, run=run)
        waitable = SimpleNamespace(wait=lambda: self.device.launch(self.at, [issued]))
        return Pending(str(group), None, waitable, lambda: SimpleNamespace(record_stream=lambda stream: None))

    def _stream(self, name):
        last, launch = self.device.last, self.device.launch
        methods = {
            "record_event": lambda: last.get(name),
            "wait_event": lambda event: launch(name, [event]),
            "wait_stream": lambda other: launch(name, [last.get(other.name)]),
        }
        if self.lacks:
            methods[self.lacks] = lambda *_: None
        return SimpleNamespace(name=name, **methods)


def passes(monkeypatch, queues, layers=4):
    """Seconds of layers whose experts are gathered over two levels while the layer before them is computed."""
    cuda = Cuda(Device(queues))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if queues is Queues.ONE else "32")
    monkeypatch.setattr(communication_lane.torch, "cuda", cuda)
    lane = StreamLane(torch.device("cpu"))

    def gather():
        gathered = yield cuda.collective("outer", 1.0)
        gathered = yield cuda.collective("inner", 0.5)
        return gathered

    arrives = lane.submit(gather)
    for _ in range(layers):
        arrives()
        arrives = lane.submit(gather)
        cuda.compute(2.0)  # dispatch and experts
        lane.advance()
        cuda.compute(1.0)  # combine
    arrives()
    return max(end for _, end in play(cuda.device).values())


def test_experts_travel_beside_the_layers_whatever_the_queues(monkeypatch):
    many = passes(monkeypatch, Queues.MANY)
    assert many == 1.5 + 4 * 3.0  # the first gather, then layers alone
    assert passes(monkeypatch, Queues.ONE) <= 1.15 * many


def in_order(monkeypatch, queues, seed, lacks=""):
    """Whether a task's collectives see what the caller has queued before, and each other; and the caller sees them."""
    cuda, done, seen = Cuda(Device(queues), lacks), [], []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if queues is Queues.ONE else "32")
    monkeypatch.setattr(communication_lane.torch, "cuda", cuda)
    lane = StreamLane(torch.device("cpu"))

    def gather(number):
        yield cuda.collective("outer", run=lambda: done.append(("outer", number)))
        return (yield cuda.collective("inner", run=lambda: done.append(("inner", number))))

    expected, arrives = [], None
    for number in range(3):
        cuda.compute(run=lambda number=number: done.append(("weights", number)))
        arrives = lane.submit(lambda number=number: gather(number))
        lane.advance()
        arrives()
        cuda.compute(run=lambda: seen.append(list(done)))
        expected += [("weights", number), ("outer", number), ("inner", number)]
    adversary = Adversary(cuda.device, seed)
    adversary.run_until(None)
    return seen == [expected[:3], expected[:6], expected]


@pytest.mark.parametrize("queues", Queues)
def test_a_lane_waits_for_its_caller_and_its_caller_for_it(monkeypatch, queues):
    assert all(in_order(monkeypatch, queues, seed) for seed in range(20))


@pytest.mark.parametrize("lacks", ["wait_stream", "wait_event", "record_event"])
def test_a_lane_without_one_of_its_waits_is_found(monkeypatch, lacks):
    assert not all(in_order(monkeypatch, Queues.MANY, seed, lacks) for seed in range(20))
