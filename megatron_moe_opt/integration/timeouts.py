"""Timeouts that Megatron changes after the first step, for our groups too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_moe_opt.integration.patching import replace
from megatron_moe_opt.topology.process_groups import follow_timeouts


def follow_megatrons_timeouts() -> None:
    """Wraps `parallel_state.update_pg_timeout`, wherever it is held already. Megatron updates the groups that it has
    made itself.
    """
    from megatron.core import parallel_state

    if hasattr(parallel_state, "update_pg_timeout"):
        replace(parallel_state, "update_pg_timeout", _followed)


def _followed(stock: Callable[..., None]) -> Callable[..., None]:
    def update_pg_timeout(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        follow_timeouts()

    return update_pg_timeout
