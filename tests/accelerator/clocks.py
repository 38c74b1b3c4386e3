"""What happens before what on streams: vector clocks. The host is one more actor, ahead of all streams."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

PACKAGE = f"{Path(__file__).parents[2] / 'megatron_moe_opt'}/"

Clock = dict[int, int]
"""How much of each actor's work lies behind, by the actor's number."""


def merge(into: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


class Actor:
    """The host, a stream, or a communicator's stream."""

    def __init__(self, number: int, name: str, follows: bool = False) -> None:
        self.number, self.name, self.clock, self.follows = number, name, {number: 0}, follows

    def tick(self) -> int:
        """Returns the time of a new piece of work."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def __str__(self) -> str:
        return self.name


class Streams:
    """The streams of one device, and torch.cuda's ways to order them.

    Attributes:
        without: a place in the package, `file:line`, whose waits are left out.
        used: places in the package that order streams.
        syncs: where the host waited for the device.
        seconds: how long a piece of work runs, by what it is; None: nobody asks when work ends.
    """

    def __init__(self, without: str | None = None) -> None:
        self.host = Actor(0, "the host")
        self.default = Actor(1, "the default stream")
        self._number = 1
        self._current = [self.default]
        self.without, self.used = without, set[str]()
        self.syncs: list[str] = []
        self.of_groups: dict[str, Actor] = {}
        self.seconds: Callable[[str], float] | None = None
        self._ends: dict[tuple[int, int], float] = {}

    def new(self, name: str, follows: bool = False) -> Actor:
        """Returns a new stream. `follows`: whoever uses it has it wait for the caller's stream first, so that memory of
        it which is given back must be free when it is given anew, and not before.
        """
        self._number += 1
        return Actor(self._number, name, follows)

    @property
    def current(self) -> Actor:
        return self._current[-1]

    @contextmanager
    def on(self, actor: Actor) -> Iterator[None]:
        self._current.append(actor)
        try:
            yield
        finally:
            self._current.pop()

    def launch(self, actor: Actor, what: str = "") -> int:
        """Returns the time of work that the host queues there now."""
        merge(actor.clock, self.host.clock)
        if self.seconds is None:
            return actor.tick()
        begins = self.end_of(actor.clock)
        time = actor.tick()
        self._ends[actor.number, time] = begins + self.seconds(what)
        return time

    def end_of(self, clock: Clock) -> float:
        """Returns the second at which all work behind a clock has ended, each piece as soon as all before it has."""
        return max(self._ends.get(one, 0.0) for one in clock.items())

    def order(self, behind: Actor, clock: Clock, places: Sequence[str] = ()) -> None:
        """Orders what `behind` does afterwards behind `clock`, on behalf of these places in the package."""
        if not self.leaves_out(places):
            merge(behind.clock, clock)

    def leaves_out(self, places: Sequence[str]) -> bool:
        """Whether one of these places is left out: it orders streams without effect."""
        self.used.update(places)
        return self.without in places

    def host_waits(self, clock: Clock, why: str, places: Sequence[str]) -> None:
        """The host waits for what it has not waited for yet."""
        if any(self.host.clock.get(actor, 0) < time for actor, time in clock.items()):
            self.syncs.append(why)
            self.order(self.host, clock, places)

    def happened(self, actor: Actor, other: int, time: int) -> bool:
        """Whether `other`'s work of that time lies behind what the actor does next."""
        return actor.number == other or actor.clock.get(other, 0) >= time


class Stream:
    """torch.cuda.Stream."""

    streams: Streams
    """The streams, while an accelerator is there."""
    place: Any
    places: Any

    def __init__(self, *_: Any, actor: Actor | None = None, **__: Any) -> None:
        of_megatron = not sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
        self.actor = actor or self.streams.new(f"a stream made at {self.place()}", follows=of_megatron)

    def wait_stream(self, other: Stream) -> None:
        self.streams.order(self.actor, other.actor.clock, self.places())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.streams.host_waits(self.actor.clock, f"a stream at {self.place()}", self.places())

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.actor is self.actor

    def __hash__(self) -> int:
        return self.actor.number


class Event:
    """torch.cuda.Event."""

    streams: Streams
    place: Any
    places: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}
        self._recorded = 0.0

    def record(self, stream: Stream | None = None) -> None:
        actor = self.streams.current if stream is None else stream.actor
        merge(actor.clock, self.streams.host.clock)
        self.clock = dict(actor.clock)
        self._recorded = perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        self.streams.order(self.streams.current if stream is None else stream.actor, self.clock, self.places())

    def synchronize(self) -> None:
        self.streams.host_waits(self.clock, f"an event at {self.place()}", self.places())

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._recorded - self._recorded)
