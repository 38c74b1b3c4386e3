"""Mixture-of-Experts training in Megatron-Core that communicates less, earlier and in parallel.

Importing this package touches neither CUDA, Transformer Engine, Apex nor Megatron: `register()` and
`use_host_backend()` import Megatron-Core when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_moe_opt.options import Options

__version__ = "0.1.0"
__all__ = ["Options", "__version__", "register", "use_host_backend"]


def __getattr__(name: str) -> Any:
    """Imports `Options`, the settings that `register` takes, when they are asked for."""
    if name != "Options":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_moe_opt.options import Options

    return Options


def register(options: Options | None = None, refuse_unread: bool = False) -> None:
    """Makes our dispatcher types valid values of Megatron's `moe_token_dispatcher_type`.

    Call it once a process, before the TransformerConfig is built (before argparse, for Megatron-LM scripts; the
    launcher does). Calling it again replaces the options.

    Args:
        options: settings of our dispatchers; the defaults where None.
        refuse_unread: have configurations refuse options that their dispatcher, ours or stock, does not read, for
            models that are built from one command line. A program that builds several kinds of layers leaves it out.

    Raises:
        ConfigurationError: the installed megatron-core is not supported, or a seam of it has moved.
        ExtensionError: the compiled extension is missing or stale.
    """
    from megatron_moe_opt.integration.registry import register as register_dispatchers

    register_dispatchers(options, refuse_unread)


def use_host_backend() -> bool:
    """Lets Megatron-Core run on CPU over Gloo, where there is no CUDA device.

    Returns:
        True where it was switched on (or was on already); False, and nothing is changed, on a machine with a CUDA
        device.
    """
    from megatron_moe_opt.integration.host import use_host_backend as switch_on

    return switch_on()
