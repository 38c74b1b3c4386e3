"""Imported once, in the process that the ranks are forked from: Megatron on the host with our dispatchers."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import warnings
from multiprocessing.context import BaseContext
from typing import Any

from torch import multiprocessing

warnings.filterwarnings("ignore")  # Megatron's about Transformer Engine and Apex, on every rank

import megatron_moe_opt  # noqa: E402

megatron_moe_opt.use_host_backend()
megatron_moe_opt.register()

from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.transformer.moe import experts  # noqa: E402

from megatron_moe_opt.cli.bench import links  # noqa: E402

# What tests on ranks, the recipes and the first optimizer import: else each rank does, for seconds. None of it starts a
# thread, which forked processes would lack.
IMPORTED_LATER = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.optimizer_param_scheduler",
    "megatron_moe_opt.integration.auto.controller",
    "megatron_moe_opt.integration.measuring.measure",
    "megatron_moe_opt.planning.planner",
    "psutil",
    "pytest",
    "rich.console",
    "rich.progress",
    "tests.ranks.gpt",
    "torch._dynamo",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.utils.checkpoint",
)
for module in IMPORTED_LATER:
    importlib.import_module(module)


class _Forking:
    """Stands for PyTorch's multiprocessing: Megatron has a process of its own hand on what writers of checkpoints say,
    which on each rank imports PyTorch for that where it is spawned.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, _: str) -> BaseContext:
        """Returns the context in which processes are forked."""
        return multiprocessing.get_context("fork")


filesystem_async.mp = _Forking()
links.PROBE_MAX_BYTES = 2**16  # no test asks how fast links are
experts.deepcopy = copy.copy  # of a configuration, for each layer: it took a third of what building one does

# All that is imported stays: without this each collection in each rank looks at half a million objects, and so copies
# the pages that they share.
gc.freeze()

# Whoever is woken does not take the core from who woke it. One that has sent rows would lose it holding the lock of its
# connection, for which its Gloo thread spins: a tenth to a quarter of the processor, with more ranks than cores. Tests
# of the idle class stay in it, which only root may leave.
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
