"""A layout of four ranks, options and a configuration with which each dispatcher does what it has beside stock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_moe_opt.options import Options
from megatron_moe_opt.planning.plan_file import Plan
from megatron_moe_opt.planning.predicting.prediction import Prediction

DISPATCHERS = ("monta", "parm", "netmoe", "mpmoe", "expert-migration", "auto")
CANDIDATES = ("monta:O2x2", "alltoall", "monta:O1")
"""The variants of `auto`'s plan, which runs the first."""

_LAYOUTS = {"monta": {"ep": 2, "etp": 2}, "parm": {"tp": 2, "ep": 2, "etp": 2}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "monta": {"monta_level": "O3", "chunks": 2},
    "parm": {"parm_schedule": "S2"},
    "mpmoe": {"partitions": 2, "memory_reuse": "S4"},
    "expert-migration": {"network_levels": (2, 2), "domain_sizes": (2, 1)},
}
_CONFIG = {"parm": {"sequence_parallel": False}}


def layout_of(dispatcher: str) -> dict[str, int]:
    """Returns the parallel sizes that a dispatcher is tested with."""
    return _LAYOUTS.get(dispatcher, {"ep": 4})


def config_of(dispatcher: str) -> dict[str, Any]:
    """Returns the fields of TransformerConfig that a dispatcher is tested with."""
    return {"moe_token_dispatcher_type": dispatcher} | _CONFIG.get(dispatcher, {})


def options_of(dispatcher: str, folder: Path, **others: Any) -> Options:
    """Its options, and others; the plan of `auto` is a file of this rank in `folder`."""
    return Options(**_settings_of(dispatcher, folder, others))


def flags_of(dispatcher: str, folder: Path, **others: Any) -> list[str]:
    """Returns a dispatcher and its options as flags of a command line."""
    return ["--moe-token-dispatcher-type", dispatcher, *options_of(dispatcher, folder, **others).words()]


def _settings_of(dispatcher: str, folder: Path, others: dict[str, Any]) -> dict[str, Any]:
    options = _OPTIONS.get(dispatcher, {}) | others
    if dispatcher == "auto":
        options["plan"] = folder / f"plan-{os.environ['RANK']}.json"
        candidates = tuple(Prediction(name, 1e-3, 1e-3, 0.0, 1.0, 1) for name in CANDIDATES)
        layers = dict.fromkeys((1, 2), CANDIDATES[0])
        Plan(layers, candidates, "a cluster", ep=4, etp=1, experts=8).save(options["plan"])
    return options


def imitate_two_nodes() -> None:
    """Ranks 0 and 1 on one node, 2 and 3 on the other, as far as this package sees."""
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // 2)
