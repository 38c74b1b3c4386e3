"""What a TransformerConfig, or Megatron-LM's arguments, say that several systems ask."""

from __future__ import annotations

from typing import Any

FAKE_GROUP = "--fake-process-group"
"""The flag by which Megatron-LM runs one rank of a job without the others."""


def recomputed_modules(config: Any) -> list[str]:
    """Returns the modules that a TransformerConfig has recomputed one by one, in a backward pass."""
    return config.recompute_modules or [] if config.recompute_granularity == "selective" else []


def repeats_moe_layers(config: Any) -> bool:
    """Whether a TransformerConfig has forward passes of whole MoE layers repeated in backward passes."""
    return config.recompute_granularity == "full" or "moe" in recomputed_modules(config)


def quantization(config: Any) -> str | None:
    """Returns the flag by which a TransformerConfig has experts compute in narrower formats; None: they do not."""
    if config.fp8:
        return "--fp8-format"
    if config.fp4:
        return "--fp4-format"
    return None if config.quant_recipe is None else "--te-precision-config-file or --kitchen-config-file"


def given_flag(arguments: Any, *flags: str) -> str | None:
    """Returns the first of these flags that is set; None: none is, or this Megatron has none of them.

    Args:
        arguments: Megatron-LM's, or a TransformerConfig, for flags that its fields are named after.
    """
    return next((flag for flag in flags if getattr(arguments, flag[2:].replace("-", "_"), None)), None)
