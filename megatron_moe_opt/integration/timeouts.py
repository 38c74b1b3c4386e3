"""Timeouts that Megatron changes after the first step, for our groups too."""

from __future__ import annotations

import functools
from typing import Any

from megatron_moe_opt.topology.process_groups import follow_timeouts


def follow_megatrons_timeouts() -> None:
    """Wraps `parallel_state.update_pg_timeout` once. Megatron updates the groups that it has made itself."""
    from megatron.core import parallel_state

    stock = getattr(parallel_state, "update_pg_timeout", None)
    if stock is None or hasattr(stock, "_moe_opt"):
        return

    @functools.wraps(stock)
    def update_pg_timeout(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        follow_timeouts()

    update_pg_timeout._moe_opt = True
    parallel_state.update_pg_timeout = update_pg_timeout
