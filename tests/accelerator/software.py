"""Streams in software: what is launched waits in queues, and an adversary or a clock decides what happens when.

A kernel begins when the kernel before it on its stream, and all that the stream was told to wait for, have ended.
Where streams have a hardware queue each, nothing else counts. With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
an entry also begins after all that were launched before it, on whichever stream: a wait at its head holds up all.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum

CALLER = -1


class Queues(Enum):
    MANY = "many hardware queues"
    ONE = "one hardware queue"


@dataclass(eq=False)
class Entry:
    """A kernel, or without `run` a wait: it ends as soon as it begins."""

    number: int
    stream: Hashable
    behind: tuple[Entry, ...]
    """What must have ended before: the entry before it on its stream, and what it waits for."""
    seconds: float = 0.0
    run: Callable[[], None] | None = None
    blocks: bool = False
    """Whether it waits for other ranks, and so runs on a thread of its own."""
    label: str = ""
    begun: bool = False
    ended: bool = False
    at_begin: bool = False
    """Whether it runs when it begins, or when it ends."""

    def __str__(self) -> str:
        return f"{self.label or 'wait'} on stream {self.stream}"


@dataclass
class Device:
    """Streams and what was launched on them."""

    queues: Queues
    entries: list[Entry] = field(default_factory=list)
    last: dict[Hashable, Entry] = field(default_factory=dict)
    """The last entry of each stream."""

    def launch(self, stream: Hashable, behind: Sequence[Entry | None] = (), **fields: object) -> Entry:
        """Puts an entry at the end of a stream."""
        before = (self.last.get(stream), *behind)
        entry = Entry(len(self.entries), stream, tuple(other for other in before if other is not None), **fields)
        self.entries.append(entry)
        self.last[stream] = entry
        return entry


def play(device: Device) -> dict[Entry, tuple[float, float]]:
    """Returns when each entry begins and ends in virtual time, from its seconds alone."""
    times: dict[Entry, tuple[float, float]] = {}
    head = 0.0
    for entry in device.entries:
        begin = max((times[other][1] for other in entry.behind), default=0.0)
        if device.queues is Queues.ONE:
            begin = head = max(begin, head)
        times[entry] = begin, begin + entry.seconds
    return times


class Stuck(AssertionError):
    """Nothing can happen any more."""


class Adversary:
    """Decides what begins and what ends next, by a seed: at random, eldest or youngest first, or with a stream that
    comes last."""

    def __init__(self, device: Device, seed: int) -> None:
        self._device, self._choose = device, random.Random(seed)
        self._policy = ("random", "eldest", "youngest", "starved")[seed % 4]
        self._starved: Hashable = None
        self._open: list[Entry] = []  # launched and not ended
        self._seen = 0
        self._running: dict[Entry, threading.Thread] = {}
        self._returned: queue.SimpleQueue[tuple[Entry, BaseException | None]] = queue.SimpleQueue()

    def run_until(self, last: Entry | None) -> None:
        """Runs until an entry has ended. None: until all have."""
        while not (last.ended if last is not None else not self._news()):
            self._news()
            self._collect(wait=False)
            choices = self._choices()
            if choices:
                self._advance(choices[self._pick(choices)])
            elif self._running:
                self._collect(wait=True)
            else:
                raise Stuck("; ".join(f"{entry} waits" for entry in self._open[:8]))

    def _news(self) -> list[Entry]:
        new = self._device.entries[self._seen :]
        self._seen += len(new)
        for entry in new:
            entry.at_begin = entry.blocks or self._choose.random() < 0.5
        self._open += new
        if new and self._policy == "starved":
            self._starved = self._choose.choice(self._device.entries).stream
        return self._open

    def _choices(self) -> list[Entry]:
        choices = []
        for entry in self._open:
            if entry.begun:
                if entry not in self._running:
                    choices.append(entry)
            elif all(other.ended for other in entry.behind):
                choices.append(entry)
            if self._device.queues is Queues.ONE and not entry.begun:
                break  # nothing behind the head begins
        return choices

    def _pick(self, choices: list[Entry]) -> int:
        if self._policy == "eldest":
            return 0
        if self._policy == "youngest":
            return len(choices) - 1
        fed = [index for index, entry in enumerate(choices) if entry.stream != self._starved]
        return self._choose.choice(fed or range(len(choices)))

    def _advance(self, entry: Entry) -> None:
        if not entry.begun:
            entry.begun = True
            if entry.blocks:
                self._running[entry] = threading.Thread(target=self._run_beside, args=(entry,), daemon=True)
                self._running[entry].start()
                return
            if entry.run is not None:
                if entry.at_begin:
                    entry.run()
                return
        elif entry.run is not None and not entry.at_begin:
            entry.run()
        entry.ended = True
        self._open.remove(entry)

    def _run_beside(self, entry: Entry) -> None:
        try:
            entry.run()
            self._returned.put((entry, None))
        except BaseException as error:
            self._returned.put((entry, error))

    def _collect(self, wait: bool) -> None:
        while wait or not self._returned.empty():
            entry, error = self._returned.get()
            self._running.pop(entry).join()  # or a test that counts threads may still see it
            if error is not None:
                raise error
            wait = False
