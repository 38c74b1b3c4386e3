"""What the planner predicts for the layer of `moe-opt bench`, under the names that dispatchers have there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatron_moe_opt.cli.bench.balance import RoutingBalance, max_over_mean
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.measuring.layer_settings import LayerSettings
from megatron_moe_opt.planning.costs.cluster import Cluster
from megatron_moe_opt.planning.planner import candidates
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_workload import LayerWorkload
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.systems import system_of
from megatron_moe_opt.systems.expert_migration import without_ratio
from megatron_moe_opt.topology.domains import levels_if_even
from megatron_moe_opt.variants import split_variant, whole_variant


@dataclass(frozen=True)
class Predicted:
    """Predictions of one run; empty where nothing was to be predicted."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of one step, by dispatcher."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a dispatcher has no prediction, by dispatcher."""


def predict_layer(
    settings: LayerSettings, balance: RoutingBalance, nodes: tuple[int, ...], cluster: Cluster
) -> Predicted:
    """Returns what a step of each of the settings' dispatchers would take on the cluster.

    Args:
        nodes: [world size] node of each rank.
    """
    for is_asked, reason in (
        (settings.dispatch_only, "whole layers are predicted, not dispatch and combine alone"),
        (settings.shared_ffn_hidden is not None, "layers are predicted without shared experts (--shared-ffn-hidden)"),
    ):
        if is_asked:
            return Predicted(missing=dict.fromkeys(settings.dispatchers, reason))
    workers = levels_if_even(settings.layout(len(nodes)), nodes)
    workload = workload_of(settings, balance, workers)
    seconds: dict[str, float] = {}
    missing: dict[str, str] = {}
    for ratio, names in _by_ratio(settings).items():
        try:
            found, refused = candidates(replace(workload, compression=ratio), cluster)
        except ConfigurationError as error:
            return Predicted(missing=dict.fromkeys(settings.dispatchers, str(error)))
        by_name = {one.variant: one.seconds for one in found}
        reasons = {one.variant: one.reason for one in refused}
        for dispatcher, whole in names.items():
            name = whole_variant(whole, len(workers))
            if name in by_name:
                seconds[dispatcher] = by_name[name]
            elif name is None:
                missing[dispatcher] = "it chooses by itself: name what it chose, to have that predicted"
            elif (reason := reasons.get(name) or reasons.get(name.partition(":")[0])) is not None:
                missing[dispatcher] = reason
            elif (alone := _alone(name, replace(workload, compression=ratio), cluster)) is not None:
                seconds[dispatcher] = alone
            else:
                missing[dispatcher] = "the planner has no such candidate"
    return Predicted(seconds, missing)


def _alone(name: str, workload: LayerWorkload, cluster: Cluster) -> float | None:
    """Returns the seconds of a variant that is in no table, such as one of chunks that do not gain, as its system
    predicts it where options name it; None: it does not.
    """
    system = system_of(name.partition(":")[0])
    if system is None or system.candidates is None:
        return None
    found = system.candidates(LayerOnCluster(workload, cluster), split_variant(name, None)[1])
    return next((one.seconds for one in found if isinstance(one, Prediction) and one.variant == name), None)


def _by_ratio(settings: LayerSettings) -> dict[float, dict[str, str]]:
    """Returns, of each compression ratio of experts (1: whole), the dispatchers that name it, and each without it: so
    the planner knows them, which has the ratio of the layer.
    """
    found: dict[float, dict[str, str]] = {}
    for dispatcher in settings.dispatchers:
        ratio = split_variant(dispatcher, settings.profile)[1].compression_ratio
        found.setdefault(ratio or 1.0, {})[dispatcher] = dispatcher if ratio is None else without_ratio(dispatcher)
    return found


def workload_of(settings: LayerSettings, balance: RoutingBalance, workers: tuple[int, ...]) -> LayerWorkload:
    """Returns the layer that `settings` describe as the planner takes it.

    Args:
        workers: of each network level of the expert-parallel group, the slowest first.
    """
    imbalance, capacity = max_over_mean(balance.of_rank), settings.capacity_factor
    if capacity is not None:
        imbalance = 1.0 if settings.pad_to_capacity else min(imbalance, capacity)
    return replace(
        settings.workload(),
        imbalance=imbalance,
        rank_rows=() if capacity is not None else balance.of_rank,
        workers=workers,
    )
