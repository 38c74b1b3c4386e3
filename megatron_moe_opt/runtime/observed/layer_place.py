"""Where this process is among the passes of its MoE layers, for messages that say where something failed.

Passes follow one another, forward and backward, whichever thread autograd runs them in: there is one place for the
process, and another for each thread that works beside the passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Place:
    """A pass of a layer as a place. `direction`: forward, recompute (forward again), backward, or background."""

    layer: int | None
    dispatcher: str
    direction: str
    is_inside: bool = True
    """Whether the pass is under way; else it is the last one that was."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" {self.layer}"
        return f"{'in' if self.is_inside else 'after'} MoE layer{layer} ({self.dispatcher}, {self.direction})"


_now: Place | None = None
_beside = threading.local()


def place() -> Place | None:
    """Returns where the calling thread is; None before the first pass of a layer."""
    return _beside.place if is_beside() else _now


def is_beside() -> bool:
    """Whether the calling thread works in the background for a pass."""
    return hasattr(_beside, "place")


def describe_place() -> str:
    """Returns the place of the calling thread as a part of a sentence."""
    return str(place() or "before the first MoE layer")


def enter(new: Place | None) -> None:
    """Notes that a pass of this layer begins, or goes on."""
    global _now
    _now = new


def leave() -> None:
    """Notes that the pass under way ends."""
    global _now
    if _now is not None:
        _now = replace(_now, is_inside=False)


@contextmanager
def passing(new: Place) -> Iterator[None]:
    """Notes a pass that begins and ends with the block, maybe inside another one: backward runs forward again."""
    outer = _now
    enter(new)
    try:
        yield
    finally:
        if outer is not None and outer.is_inside:
            enter(outer)
        else:
            leave()


@contextmanager
def belonging_to(passed: Place | None) -> Iterator[None]:
    """Has what is submitted to a lane inside the block count for a pass; None: for the one under way."""
    outer = _now
    if passed is not None:
        enter(passed)
    try:
        yield
    finally:
        enter(outer)


@contextmanager
def working_beside(passed: Place | None) -> Iterator[None]:
    """Has what this thread does inside the block count as background work for a pass."""
    _beside.place = None if passed is None else replace(passed, direction="background")
    try:
        yield
    finally:
        del _beside.place
