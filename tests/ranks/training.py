"""A small GPT trained on the pool of ranks."""

from __future__ import annotations

from typing import Any

from megatron_moe_opt.options import Options


def losses(
    dispatcher: str, layout: dict[str, int], options: Options | None = None, steps: int = 3, **settings: Any
) -> list[float]:
    """Returns the losses of a few optimizer steps of two micro-batches; `settings` go to `tests.ranks.gpt.gpt`."""
    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    megatron_moe_opt.register(options)
    try:
        with parallel(**layout):
            return gpt(moe_token_dispatcher_type=dispatcher, **settings).train(steps)
    finally:
        megatron_moe_opt.register()
