"""The shape that a cluster has, measured with plain sockets before a script runs on it."""

from __future__ import annotations

import subprocess
import sys

from . import stream
from .errors import NetboxError
from .shape import Shape

TOLERANCE = 0.15  # TCP over 1500-byte frames delivers 95.6 % of the rate; the rest is for the machine's noise
MEASURE_S = (0.5, 1, 2)  # one try each; a busy moment of the machine weighs less in a longer one


def off_by_too_much(asked: float, measured: float) -> bool:
    """Returns whether a measured rate differs from the asked one by more than the tolerance, either way."""
    return abs(measured - asked) > TOLERANCE * asked


def measure(shape: Shape, nodes: list[str]) -> tuple[float | None, float]:
    """Returns the (inter, intra) bits/s of the slowest node: every link full in both directions, then every `lo`.

    A rate that is off by more than the tolerance is measured again, up to three times; the try nearest to the asked
    rate counts. A single node has no peer to measure its link with: None.
    """
    ring = [(i, (i + 1) % shape.nodes) for i in range(shape.nodes)]
    inside = [(i, i) for i in range(shape.nodes)]

    def best(flows: list[tuple[int, int]], asked: int) -> float:
        tries: list[float] = []
        for seconds in MEASURE_S:
            tries.append(_measure_flows(shape, nodes, flows, seconds))
            if not off_by_too_much(asked, tries[-1]):
                break
        return min(tries, key=lambda measured: abs(measured - asked))

    inter = best(ring, shape.inter_bits) if shape.nodes > 1 else None
    return inter, best(inside, shape.intra_bits)


def verdict(shape: Shape, inter: float | None, intra: float, unmet: str) -> str:
    """Returns the line that a run starts with, given what `measure` returned: the shape, or a warning where it is not
    met.

    Raises NetboxError with the numbers if the shape is not met and `unmet` is "refuse", not "warn".
    """
    line = shape.describe(inter, intra)
    met = inter is None or not off_by_too_much(shape.inter_bits, inter)
    if met and not off_by_too_much(shape.intra_bits, intra):
        return line
    line = f"this machine does not carry the shape: {line}, off by more than {TOLERANCE:.0%}"
    if unmet == "refuse":
        raise NetboxError(f"{line}; ask for lower rates or fewer nodes, free the CPU, or run with --unmet warn")
    return f"warning: {line}; the times of this run are not those of the shape"


def _measure_flows(shape: Shape, nodes: list[str], flows: list[tuple[int, int]], seconds: float) -> float:
    """Returns the least bits/s among flows (sender, receiver) that run at the same time."""
    helpers: list[subprocess.Popen[str]] = []

    def start(node: int, role: str, address: str) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", nodes[node], sys.executable, stream.__file__, role, address, str(seconds)]
        pipe = subprocess.PIPE
        helpers.append(subprocess.Popen(words, stdout=pipe, stderr=subprocess.DEVNULL, text=True))
        return helpers[-1]

    try:
        receivers = [start(receiver, "receive", shape.address(receiver)) for _, receiver in flows]
        for receiver in receivers:
            assert receiver.stdout is not None
            receiver.stdout.readline()
        for sender, receiver in flows:
            start(sender, "send", shape.address(receiver))
        answers = [receiver.communicate()[0] for receiver in receivers]
    finally:
        for helper in helpers:
            with helper:
                helper.kill()
    return min(float(answer or 0) for answer in answers)
