"""Imported once, in the process that the ranks are forked from: Megatron on the host with our dispatchers."""

from __future__ import annotations

import gc
import warnings

warnings.filterwarnings("ignore")  # Megatron's about Transformer Engine and Apex, on every rank

import megatron_moe_opt  # noqa: E402

megatron_moe_opt.use_host_backend()
megatron_moe_opt.register()

import tests.ranks.megatron  # noqa: E402, F401
from megatron_moe_opt.cli.layer import links  # noqa: E402

links.PROBE_MAX_BYTES = 2**16  # no test asks how fast links are

# All that is imported stays: without this each collection in each rank looks at half a million objects, and so copies
# the pages that they share.
gc.freeze()
