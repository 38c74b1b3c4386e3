"""Imported once, in the process that the ranks are forked from: Megatron on the host with our dispatchers."""

from __future__ import annotations

import copy
import gc
import os
import warnings

warnings.filterwarnings("ignore")  # Megatron's about Transformer Engine and Apex, on every rank

import megatron_moe_opt  # noqa: E402

megatron_moe_opt.use_host_backend()
megatron_moe_opt.register()

import torch._dynamo  # noqa: E402, F401 (which the first optimizer imports: else in each rank, for seconds)
from megatron.core.transformer.moe import experts  # noqa: E402

import tests.ranks.megatron  # noqa: E402, F401
from megatron_moe_opt.cli.bench import links  # noqa: E402

links.PROBE_MAX_BYTES = 2**16  # no test asks how fast links are
experts.deepcopy = copy.copy  # of a configuration, for each layer: it took a third of what building one does

# All that is imported stays: without this each collection in each rank looks at half a million objects, and so copies
# the pages that they share.
gc.freeze()

# Whoever is woken does not take the core from who woke it. One that has sent rows would lose it holding the lock of its
# connection, for which its Gloo thread spins: a tenth to a quarter of the processor, with more ranks than cores.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
