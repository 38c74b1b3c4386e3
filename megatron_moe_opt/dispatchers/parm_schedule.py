"""Which of Parm's schedules a layer's tokens take to their experts and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

from megatron_moe_opt.dispatchers.agreed_profile import agreed_cluster
from megatron_moe_opt.dispatchers.say import say_once
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.choice import choose, schedule_seconds
from megatron_moe_opt.planning.costs.cluster import MEGATRON_FLAGS
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.schedules.parm import AAS
from megatron_moe_opt.systems.monta import MONTA
from megatron_moe_opt.systems.parm import PARM
from megatron_moe_opt.topology.agreement import largest_of_ranks
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.variants import split_variant


@dataclass(frozen=True)
class ParmSchedule:
    """The schedule by which a layer's rows travel."""

    name: str
    """The schedule's name: S1, S2 or AAS. With sequence parallelism it is S1, without its split and AllGather."""
    level: str | None = None
    """The level of MoNTA's pipeline; None: the fused all-to-all."""
    chunks: int = 1

    def __str__(self) -> str:
        if self.level is None:
            return f"{self.name}, fused" if self.name == "S1" else self.name
        return f"{self.name}, {self.level}" + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


class ScheduleChoice(Protocol):
    """Says how a layer's rows travel. All ranks that share a process group must be told alike."""

    def choose(self, tokens: torch.Tensor, tp: ProcessGroup | None) -> ParmSchedule:
        """Returns the schedule for all passes of a layer; called once, at the first.

        Args:
            tokens: [T, H], of which only shape and dtype are used.
            tp: the group whose ranks all hold these tokens; None: every rank has tokens of its own.
        """

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""


def schedule_of(
    options: Options, groups: ExpertGroups, workload: LayerWorkload, without_s2: str | None = None
) -> ScheduleChoice:
    """Returns the choice that the options ask for: fixed, or made by a profile. Arguments as of MeasuredSchedule."""
    if options.schedule_profile is not None:
        return MeasuredSchedule(options, groups, workload, without_s2)
    return FixedSchedule(options.parm_schedule or "S1", groups)


class FixedSchedule:
    """Chooses what the user asked for: the fused all-to-all, unless there is no expert parallelism at all to fuse."""

    def __init__(self, schedule: str, groups: ExpertGroups) -> None:
        self.schedule, self.groups = schedule, groups

    def choose(self, tokens: torch.Tensor, tp: ProcessGroup | None) -> ParmSchedule:
        """Returns the schedule that the user named, whatever the tokens."""
        splits_tokens = self.schedule == "S1" or tp is None
        return ParmSchedule(self.schedule, "O1" if splits_tokens and self.groups.joint_size == 1 else None)

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        what = "tokens and probabilities in one all-to-all over expert and expert-tensor parallelism"
        split = {"S1": "", "S2": "S2: rows split over TP after the gate; ", AAS: "S2 without overlap; "}
        return split[self.schedule] + what


class MeasuredSchedule:
    """Chooses the schedule that is fastest according to a profile, for as many tokens as the first pass has: parm's, or
    S1 at monta's levels.

    The ranks of the layer's groups agree on the largest number that one of them has, and have one of them read the
    profile: they choose alike.
    """

    def __init__(self, options: Options, groups: ExpertGroups, workload: LayerWorkload, without_s2: str | None) -> None:
        """
        Args:
            workload: of a layer, of which all but the tokens is known.
            without_s2: why S2 would train another function; None: it would not.
        """
        self.options, self.groups, self.workload, self.without_s2 = options, groups, workload, without_s2
        self.profile = options.profile
        agreed_cluster(groups, self.profile, workload)

    def choose(self, tokens: torch.Tensor, tp: ProcessGroup | None) -> ParmSchedule:
        """Returns the fastest schedule, the same in all replicas: routers sum over them what S1 and S2 count unlike. A
        collective call over the layer's groups.

        Raises:
            ConfigurationError: a profile of groups of other sizes, or one that lacks what TP groups need.
        """
        groups, cluster = self.groups, agreed_cluster(self.groups, self.profile, self.workload)
        tp_size = 1 if tp is None else tp.size()
        if tp is not None:
            cluster.check_groups(self.profile, MEGATRON_FLAGS, ep=groups.ep_size, expert_tp=groups.etp_size, tp=tp_size)
        # Where neither of the first two holds the other, there is no S2, and the joint group's ranks agree.
        number = largest_of_ranks(tokens.size(0), (tp, groups.joint, groups.replicas), tokens.device)
        asked = self.options if self.without_s2 is None else replace(self.options, parm_schedule="S1")
        layer = replace(self.workload, tp=tp_size, tokens=number)
        predicted = choose([(PARM, asked), (MONTA, self.options)], layer, cluster).chosen
        schedule = _schedule(predicted.variant)
        say_once(
            "parm",
            (number, schedule),
            lambda: (
                f"{number} tokens a rank: {schedule}; predicted {schedule_seconds(predicted) * 1e3:.2f} ms a layer for "
                "dispatch and combine, forward and backward"
            ),
        )
        return schedule

    def describe(self) -> str:
        """Returns what runs, in words, for the line that is logged at start."""
        left_out = f", S2 left out: {self.without_s2}" if self.without_s2 else ""
        return f"schedule chosen from {self.profile}{left_out}"


def _schedule(variant: str) -> ParmSchedule:
    name, options = split_variant(variant, None)
    if name == MONTA.name:
        return ParmSchedule("S1", options.levels[0], options.chunk_counts[0])
    return ParmSchedule(options.parm_schedule)
