"""Parm: one all-to-all over expert and expert-tensor parallelism together, in the place of two collectives.

    dispatch   permute -> EP&ESP-A2A -> reorder by local expert
    combine    reorder by source -> EP&ESP-A2A -> sum of the expert's shards -> unpermute

(Parm, Fig. 4c and d; section III-C.) A row goes to all shards of its expert straight away, and their partial outputs
come straight back. Nothing is copied for it: the same rows are sent several times.
"""

from __future__ import annotations

from megatron_moe_opt.dispatchers.monta import MontaDispatcher
from megatron_moe_opt.dispatchers.pipelining import FixedPipelining
from megatron_moe_opt.topology.expert_groups import ExpertGroups


class ParmDispatcher(MontaDispatcher):
    """Moves the tokens of one MoE layer, which sequence parallelism has split over TP, to their experts and back."""

    def __init__(self, groups: ExpertGroups) -> None:
        alone = groups.joint_size == 1
        super().__init__(groups, FixedPipelining("O1" if alone else None, 1))

    def describe(self) -> str:
        """What runs, for the line at start."""
        return "tokens and probabilities in one all-to-all over expert and expert-tensor parallelism"
