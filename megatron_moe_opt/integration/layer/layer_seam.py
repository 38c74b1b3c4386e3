"""Where a MoELayer is cut into: slots, each a method of it in whose place one layer may have another function."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.patching import seam_moved


class LayerSlot(Enum):
    """The methods of MoELayer that a system may replace."""

    FORWARD = "forward"
    ROUTE = "route"
    PREPROCESS = "preprocess"
    DISPATCH = "dispatch"
    EXPERTS = "routed_experts_compute"
    COMBINE = "combine"
    POSTPROCESS = "postprocess"


_PARAMETERS = {LayerSlot.EXPERTS: ["self", "hidden_states", "probs"]}
"""The parameters of methods that are replaced, and not only wrapped."""


_OURS_OR_MEGATRONS = ("megatron.core.", "megatron_moe_opt.")


def own_method(module: Any, name: str) -> str | None:
    """Returns the method of a module that is neither Megatron's nor put there by us, as Class.method; None: it has no
    such method, or one of these.
    """
    method = getattr(module, name, None)
    function = getattr(method, "func", method)  # of a partial
    if method is None or str(function.__module__).startswith(_OURS_OR_MEGATRONS):
        return None
    return f"{type(module).__name__}.{name}"


def router_of(layer: Any) -> Any:
    """Returns the router of a MoELayer: what something that is wrapped around it, as LoRA is, has inside."""
    return next(one for one in layer.router.modules() if hasattr(one, "tp_cp_group"))


@dataclass(frozen=True)
class LayerSeam:
    """The slots of one layer, which keeps what is put into them."""

    layer: Any

    def stock(self, slot: LayerSlot) -> Callable[..., Any]:
        """Returns Megatron's own method, to be called with the layer.

        Raises:
            ConfigurationError: a Megatron whose layer has no such method, or one with other parameters, or a layer
                whose class has one of its own in the place of what is replaced.
        """
        method = getattr(type(self.layer), slot.value, None)
        if not isinstance(method, types.FunctionType):
            raise seam_moved(f"MoELayer.{slot.value} is not a plain method")
        parameters = list(inspect.signature(method).parameters)
        if parameters != _PARAMETERS.get(slot, parameters):
            raise seam_moved(f"MoELayer.{slot.value} does not take {', '.join(_PARAMETERS[slot][1:])}")
        if slot in _PARAMETERS and (own := own_method(self.layer, slot.value)) is not None:
            raise ConfigurationError(
                f"{own} is not Megatron's, and would not be called by a dispatcher that calls experts in its own "
                "order: use monta or parm"
            )
        return method

    def get(self, slot: LayerSlot) -> Callable[..., Any] | None:
        """Returns what was put there; None: the layer has Megatron's own."""
        return self.layer.__dict__.get(slot.value)

    def put(self, slot: LayerSlot, function: Callable[..., Any] | None) -> None:
        """Has the layer call `function`, without the layer as an argument; None: Megatron's own again.

        Raises:
            ConfigurationError: see `stock`.
        """
        if function is None:
            self.layer.__dict__.pop(slot.value, None)
            return
        self.stock(slot)  # nothing is put where Megatron would not call it
        setattr(self.layer, slot.value, function)
