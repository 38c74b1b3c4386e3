"""What tests of commands need that run on the pool's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_moe_opt.schedules.schedule import Kind
from tests.ranks.devices import rank_device

CURVES = {
    (Kind.ALL_TO_ALL, "ep"): ((1024, 3e-3), (1 << 20, 4.0)),
    (Kind.ALL_GATHER, "expert-tp"): ((1024, 2e-3), (1 << 20, 2.0)),
    (Kind.REDUCE_SCATTER, "expert-tp"): ((1024, 2e-3), (1 << 20, 2.0)),
    (Kind.COPY, None): ((1024, 1e-3), (1 << 20, 1.0)),
}
"""The curves of a profile of EP and expert-TP groups."""


@contextmanager
def group_of_the_pool() -> Iterator[torch.device]:
    """Replaces a command's own process group with the pool's."""
    yield rank_device()
