"""What is said when a place in Megatron that we plug into is not where it was."""

from __future__ import annotations

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.versions import SUPPORTED_MEGATRON


def seam_moved(what: str) -> ConfigurationError:
    """Returns the refusal to run under this Megatron."""
    return ConfigurationError(
        f"cannot plug into this megatron-core: {what}; install a release from {SUPPORTED_MEGATRON}, or use "
        "--moe-token-dispatcher-type alltoall"
    )
