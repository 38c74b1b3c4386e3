"""Refusing together: what one rank finds wrong, every rank raises."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from megatron_moe_opt.errors import ConfigurationError


def check_on_all_ranks(check: Callable[[], object]) -> None:
    """Run `check` on every rank and raise the first ConfigurationError of any on all: ranks refuse together."""
    try:
        check()
        text = None
    except ConfigurationError as error:
        text = str(error)
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    for text in filter(None, texts):
        raise ConfigurationError(text)
