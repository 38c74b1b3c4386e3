"""Timeouts that Megatron changes after the first step, for our groups too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_moe_opt.integration.patching import wrap_once
from megatron_moe_opt.topology.process_groups import follow_timeouts


def follow_megatrons_timeouts() -> None:
    """Wraps `parallel_state.update_pg_timeout` once. Megatron updates the groups that it has made itself."""
    from megatron.core import parallel_state

    if hasattr(parallel_state, "update_pg_timeout"):
        wrap_once(parallel_state, "update_pg_timeout", _followed)


def _followed(stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    stock(*args, **kwargs)
    follow_timeouts()
