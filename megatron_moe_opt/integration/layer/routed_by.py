"""Whose routing a layer has: Megatron's gives each token as many experts as top-k says, and another's may not."""

from __future__ import annotations

from typing import Any

from megatron_moe_opt.integration.layer.hooks_of_others import hooks_of_others

_MEGATRONS, _OURS = "megatron.core.", "megatron_moe_opt."


def routed_by(layer: Any) -> str | None:
    """Returns what others have put in the place of a MoELayer's router, or of a part of it; None: all is Megatron's.
    Asked in each pass, as it may come and go at any time.
    """
    from megatron.core.transformer.moe import router as megatrons

    router, topk = layer.router, layer.config.moe_router_topk
    if not type(router).__module__.startswith(_MEGATRONS):
        return type(router).__name__
    for module, name in ((layer, "route"), (router, "forward"), (router, "routing")):
        if not _is_megatrons(getattr(module, name)):
            return f"{type(module).__name__}.{name}"
    if not _is_megatrons(megatrons.topk_routing_with_score_function):
        return "topk_routing_with_score_function"
    if getattr(router, "topk", topk) != topk:
        return f"a router whose topk is {router.topk}"
    return next(map(str, hooks_of_others(router, "router", kinds=("_forward_hooks",))), None)


def _is_megatrons(function: Any) -> bool:
    """Whether a function was written in Megatron: functools.wraps has others say that they were, too. What we put in
    the place of one calls it.
    """
    written_in = getattr(function, "__globals__", {"__name__": type(function).__module__})
    return written_in["__name__"].startswith((_MEGATRONS, _OURS))
