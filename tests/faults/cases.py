"""What may happen to one rank of a training run: dispatcher x place x fault."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tests.ranks.dispatchers import DISPATCHERS

PLACES = ("dispatch", "combine", "backward", "background")
KINDS = ("kill", "stop", "raise", "disagree")
WORLD = 4
STEPS = 8
"""The steps of a run to which nothing happens."""
TIMEOUT_S = 10.0
"""The timeout of all process groups, in seconds. Ranks also wait for each other's start with it."""
SLACK_S = 5.0


_DISAGREE_LATER = (("monta", "combine"), ("parm", "dispatch"), ("netmoe", "dispatch"))


@dataclass(frozen=True)
class Fault:
    """One injection."""

    dispatcher: str
    place: str
    """Where it happens. dispatch, combine or backward: when rows are sent; background: in another
    thread, or between steps.
    """
    kind: str
    """kill: SIGKILL; stop: SIGSTOP; raise: an exception; disagree: the rank has other options or other counts."""
    victim: int = 1
    after: int = 0
    """How many times the rank comes to the place, in the step, before it happens."""
    rank_0_serves_store: bool = False
    """Whether rank 0 serves the job's store; else the launcher does, as torchrun."""

    @property
    def from_the_start(self) -> bool:
        """Whether the rank is another one before its first layer is built."""
        return self.kind == "disagree" and (self.dispatcher, self.place) not in _DISAGREE_LATER

    @property
    def allowed_s(self) -> float:
        """Returns the seconds allowed from the fault to the end of the last rank."""
        return SLACK_S + (TIMEOUT_S if self.kind in ("kill", "stop") else 0.0)

    def __str__(self) -> str:
        store = ", which serves the store" if self.rank_0_serves_store and self.victim == 0 else ""
        return f"{self.dispatcher}, {self.place}: {self.kind} rank {self.victim}{store}, after {self.after}"

    def to_json(self) -> str:
        """Returns the fault as text for the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Fault:
        """Returns the fault that a text of `to_json` says."""
        return Fault(**json.loads(text))


def faults(number: int, seed: int) -> Iterator[Fault]:
    """All combinations in a random order, as often as it takes; on random ranks, early and late in the step."""
    chance = random.Random(seed)
    for index in range(number):
        if index % (len(DISPATCHERS) * len(PLACES) * len(KINDS)) == 0:
            combinations = list(itertools.product(DISPATCHERS, PLACES, KINDS))
            chance.shuffle(combinations)
        victim, after, rank_0_serves_store = chance.randrange(WORLD), chance.randrange(4), chance.random() < 0.25
        yield Fault(*combinations.pop(), victim, after, rank_0_serves_store)
