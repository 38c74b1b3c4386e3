"""Ending together: what one rank finds wrong, every rank raises."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.agreement import known_to_all


class TrainingError(Exception):
    """Why training ends before its last iteration, in one sentence. Raised by all ranks together."""


class RankError(Exception):
    """Why this rank ends training, in one sentence, while the others wait for it in a collective."""


def first_of_all_ranks(text: str | None) -> str | None:
    """Returns the text of the first rank that has one; called by all ranks."""
    return next(filter(None, known_to_all(text)), None)


def check_on_all_ranks(check: Callable[[], object]) -> None:
    """Run `check` on every rank and raise the first ConfigurationError of any on all: ranks refuse together."""
    try:
        check()
        text = None
    except ConfigurationError as error:
        text = str(error)
    if first := first_of_all_ranks(text):
        raise ConfigurationError(first)


def check_is_shared(folder: Path, sentence: str) -> None:
    """Sees that every rank finds a folder in which rank 0 can write; called by all ranks.

    Raises:
        ConfigurationError: on all ranks, where it is not the same on all nodes; with the sentence.
    """
    mark = folder / known_to_all(f".seen-{secrets.token_hex(8)}")[0]
    if reason := fails_on_first_rank(mark.touch):
        raise ConfigurationError(f"{folder} cannot be written ({reason})")

    def find() -> None:
        if not mark.is_file():
            raise ConfigurationError(sentence)

    try:
        check_on_all_ranks(find)
    finally:
        if dist.get_rank() == 0:
            mark.unlink(missing_ok=True)


def fails_on_first_rank(work: Callable[[], object]) -> str | None:
    """Do `work` on rank 0; returns, on all ranks, why it could not be done, or None."""
    text = None
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            text = error.strerror or str(error)
        except ConfigurationError as error:
            text = str(error)
    return first_of_all_ranks(text)
