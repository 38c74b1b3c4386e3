"""The profile that the ranks of a layer's groups choose by: one of them reads it, and all choose alike."""

from __future__ import annotations

from pathlib import Path

from megatron_moe_opt.dispatchers.say import say_other_run
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.choosing.choice import Choice, ChoiceByRows, choices
from megatron_moe_opt.planning.costs.cluster import MEGATRON_FLAGS, Cluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.topology.agreement import found_by_first
from megatron_moe_opt.topology.expert_groups import ExpertGroups
from megatron_moe_opt.topology.group_cache import cached_by_group


def agreed_cluster(groups: ExpertGroups, profile: Path, layer: LayerWorkload) -> Cluster:
    """Returns the profile as the first rank of the joint group reads it. A collective call over that group, once.

    Says where it was measured for another layer than this one, of which all but the tokens is known.

    Raises ConfigurationError, on all of them, if it cannot be read or was measured with groups of other sizes.
    """
    cluster = _read_by_first(groups, profile)
    say_other_run(profile, cluster, layer)
    return cluster


@cached_by_group
def _read_by_first(groups: ExpertGroups, profile: Path) -> Cluster:
    def read() -> Cluster:
        cluster = Cluster.load(profile)
        cluster.check_groups(profile, MEGATRON_FLAGS, ep=groups.ep_size, expert_tp=groups.etp_size)
        return cluster

    return found_by_first(read, groups.joint)


@cached_by_group
def agreed_choices(groups: ExpertGroups, system: str, options: Options, layer: LayerWorkload) -> ChoiceByRows[Choice]:
    """Returns a system's choices by the number of rows: one table for all layers of a process that are alike."""
    cluster = agreed_cluster(groups, options.profile, layer)
    return choices([(system_of(system), options)], layer, cluster, options.activation_budget)
