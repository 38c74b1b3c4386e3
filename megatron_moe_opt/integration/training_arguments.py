"""Megatron-LM's command line, which says more than a TransformerConfig."""

from __future__ import annotations

import sys
from typing import Any


def training_arguments() -> Any:
    """The arguments that Megatron-LM's training loop has parsed; None where a script does not use it, or not yet."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
