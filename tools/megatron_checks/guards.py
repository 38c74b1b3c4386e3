"""Every place in Megatron that compares the dispatcher's name, and how we answer it.

Megatron-Core has no registry of dispatchers: it compares `moe_token_dispatcher_type` with its own names all over.
This table is the one list of those places for the supported versions. A test reads the source of the installed
Megatron-Core and fails on a comparison that is not in here, so that a new guard cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Answer(Enum):
    """How a comparison comes out right for a dispatcher of ours."""

    READS_ALLTOALL = "evaluated while the configuration reads `alltoall` (registry.reading_as_alltoall)"
    NOT_STOCK = "comes out as for any dispatcher that is not `flex`, which is right for ours"
    KEPT = "its outcome for experts is replaced (overlapped_batches.keep_expert_inputs)"
    REFUSED = "reached only with a feature that checks.check_config refuses"


@dataclass(frozen=True)
class Guard:
    """A place where Megatron's source compares the dispatcher type with a name."""

    file: str
    """Path of the source file below `megatron/`."""
    comparison: str
    """Source text of the comparison, as ast.unparse writes it, without the object that holds the attribute."""
    answer: Answer
    reason: str


_CONFIG = "core/transformer/transformer_config.py"
_CALLABLES = "core/models/gpt/fine_grained_callables.py"
_LAYER = "core/transformer/moe/moe_layer.py"
_NAME = "moe_token_dispatcher_type"

GUARDS = (
    Guard(_CONFIG, f"{_NAME} != 'flex'", Answer.READS_ALLTOALL, "DeepEP and NCCL-EP back ends need flex"),
    Guard(_CONFIG, f"{_NAME} == 'flex'", Answer.READS_ALLTOALL, "flex with drop and pad, or with NCCL-EP overlap"),
    Guard(_CONFIG, f"{_NAME} not in ['alltoall']", Answer.READS_ALLTOALL, "shared expert overlap (0.16, 0.17)"),
    Guard(_CONFIG, f"{_NAME} not in ['alltoall', 'flex']", Answer.READS_ALLTOALL, "shared expert overlap"),
    Guard(_CONFIG, f"{_NAME} in ['allgather', 'alltoall_seq']", Answer.READS_ALLTOALL, "padding for quantization"),
    Guard(_CONFIG, f"{_NAME} == 'alltoall'", Answer.READS_ALLTOALL, "CUDA graph of the preprocessing"),
    Guard(_CONFIG, f"{_NAME} in ['allgather']", Answer.READS_ALLTOALL, "variable sequence lengths"),
    Guard(_CONFIG, f"{_NAME} in ['alltoall', 'flex']", Answer.READS_ALLTOALL, "1F1B overlap of the A2A"),
    Guard(_LAYER, f"{_NAME} == 'allgather'", Answer.READS_ALLTOALL, "choice of the dispatcher's class"),
    Guard(_LAYER, f"{_NAME} == 'alltoall'", Answer.READS_ALLTOALL, "choice of the class; inference mode (0.17)"),
    Guard(_LAYER, f"{_NAME} == 'flex'", Answer.READS_ALLTOALL, "choice of the dispatcher's class"),
    Guard("core/transformer/moe/moe_utils.py", f"{_NAME} == 'flex'", Answer.NOT_STOCK, "who pads for quantization"),
    Guard(
        "core/transformer/transformer_layer.py", f"{_NAME} == 'alltoall'", Answer.REFUSED, "norm recompute, CUDA graphs"
    ),
    Guard(
        "core/models/gpt/fine_grained_callables.py", f"{_NAME} == 'flex'", Answer.NOT_STOCK, "DeepEP with 1F1B overlap"
    ),
    Guard(_CALLABLES, f"{_NAME} != 'alltoall'", Answer.KEPT, "1F1B overlap"),
    Guard("core/models/common/utils.py", f"{_NAME} == 'flex'", Answer.NOT_STOCK, "DeepEP, HybridEP in 1F1B overlap"),
    Guard("core/models/common/utils.py", f"{_NAME} != 'alltoall'", Answer.KEPT, "1F1B overlap"),
    Guard("training/arguments.py", f"{_NAME} != 'flex'", Answer.NOT_STOCK, "fake process groups refuse flex"),
)
