"""The curves of collectives between expert domains and inside them: their names in a profile, and which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.costs.curves import CostCurve, Costs
from megatron_moe_opt.schedules.schedule import Kind
from megatron_moe_opt.topology.domains import ExpertDomains
from megatron_moe_opt.topology.layouts import divisors

Curves = Mapping[tuple[Kind, int, int], CostCurve]
"""The curves by kind of collective, level, and ranks of the group: seconds over bytes as Op.size counts them."""

KINDS = (Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def profile_name(kind: Kind, workers: Sequence[int], level: int, ranks: int) -> str:
    """Returns what a profile calls the groups of so many ranks at a level in which tokens, or experts, travel."""
    what = "tokens" if kind is Kind.ALL_TO_ALL else "experts"
    return f"{what} of {ranks} ranks at level {level} of {'x'.join(map(str, workers))}"


def realisable_groups(workers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (level, ranks) of every group of more than one rank that some choice of domain sizes makes."""
    return [(level, ranks) for level, number in enumerate(workers) for ranks in divisors(number)[1:]]


def measured_curves(costs: Costs, workers: Sequence[int]) -> Curves:
    """Returns the curves of expert domains on these levels among those of a profile, as far as they were measured."""
    groups = realisable_groups(workers)
    names = {(kind, *group): (kind, profile_name(kind, workers, *group)) for kind in KINDS for group in groups}
    return {key: costs.curves[name] for key, name in names.items() if name in costs.curves}


def has_curves(curves: Curves, domains: ExpertDomains) -> bool:
    """Whether all collectives of such domains were measured."""
    needed = [(Kind.ALL_TO_ALL, level, domains.domains(level)) for level in range(domains.levels)]
    for level, size in enumerate(domains.sizes):
        needed += [(kind, level, size) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)]
    return all(key in curves for key in needed if key[2] > 1)


def curve_of(curves: Curves, kind: Kind, level: int, ranks: int) -> CostCurve:
    """Returns what a collective of a level takes in groups of so many ranks. Raises ConfigurationError without one."""
    curve = curves.get((kind, level, ranks))
    if curve is None:
        raise ConfigurationError(
            f"no cost curve for {kind.value} at level {level} in a group of {ranks} ranks: measure that group, or give "
            "bandwidths"
        )
    return curve
