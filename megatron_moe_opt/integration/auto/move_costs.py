"""What moves cost here, by which `auto` plans without a plan.json: from --moe-opt-profile, or measured by the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_moe_opt.dispatchers.agreed_profile import agreed_cluster
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.layer.configured_workload import layer_workload
from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.systems.system import PROFILE_SECONDS

if TYPE_CHECKING:
    from megatron_moe_opt.integration.auto.own_profile import OwnProfile


class MoveCosts:
    """The costs of moves in this run, by the profile that it is given, or else its own."""

    def __init__(self, config: Any, options: Options) -> None:
        self._config, self._options = config, options
        self._own: OwnProfile | None = None
        """What this run has measured itself; None: not yet, or it is given a profile."""

    @property
    def source(self) -> str:
        """Returns where they are from, in words."""
        return str(self._options.profile) if self._own is None else self._own.source

    @cached_property
    def cluster(self) -> Cluster:
        """Returns the costs that all plans are made by. On rank 0, which reads the file once."""
        return Cluster.load(self._options.profile) if self._own is None else self._own.cluster

    def check(self, layer: PlannedLayer) -> None:
        """Refuses a profile that a layer could not be planned with, and groups that could not be measured. A collective
        call over the layer's groups.
        """
        if self._options.profile is not None:
            agreed_cluster(layer.groups, self._options.profile, layer_workload(layer.layer.config, layer.groups))
        else:
            from megatron_moe_opt.integration.auto.own_profile import check_groups  # which imports Megatron

            check_groups()

    def measure(self, workloads: Sequence[LayerWorkload]) -> None:
        """Measures them, once, where there is no profile: then a collective call over the world.

        Args:
            workloads: of all MoE layers of the job, the same on all ranks.
        """
        if self._options.profile is None and self._own is None:
            from megatron_moe_opt.integration.auto.own_profile import own_profile  # which imports Megatron

            self._own = own_profile(self._config, workloads, self._options.profile_seconds or PROFILE_SECONDS)
