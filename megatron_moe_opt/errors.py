"""Errors a user can act on."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A setting that cannot work. The message is one sentence: the flag or file, its value, and the way out.

    Raised before training starts, never in the middle of a step.
    """


class ExtensionError(ImportError):
    """The compiled extension is missing, stale or built for another PyTorch. One sentence that says how to build it."""


class RoutingError(RuntimeError):
    """Ranks that hold the same tokens have routed them differently: raised in the pass in which they did."""


def sentence(error: Exception) -> str:
    """The message as it was first raised: Megatron raises errors again, naming each module it was building."""
    while (first := error.__context__) is not None and type(first) is type(error) and str(error).startswith(str(first)):
        error = first
    return str(error)
