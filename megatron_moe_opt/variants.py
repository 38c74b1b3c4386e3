"""Dispatchers with their settings in one word, such as `monta:O2x8`, as benchmarks and plans name them."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import AUTO, Options
from megatron_moe_opt.schedules.monta import LEVELS
from megatron_moe_opt.schedules.mpmoe import STRATEGIES
from megatron_moe_opt.schedules.parm import AAS, SCHEDULES

MIGRATION = "expert-migration"
FLEX = "flex"
"""Stock, over a package for GPUs: `flex:hybridep` names it."""
VARIANTS = ("monta", "parm", "mpmoe", MIGRATION)


def split_variant(variant: str, profile: Path | None) -> tuple[str, Options]:
    """The dispatcher's name and options of a variant.

    It is `name`, `monta:auto`, `monta:LEVEL`, `monta:LEVELxCHUNKS`, `parm:auto`, `parm:SCHEDULE`, `mpmoe:auto`,
    `mpmoe:PARTITIONS`, `mpmoe:PARTITIONS:STRATEGY`, `expert-migration:auto` or `expert-migration:SIZExSIZE` (of
    domains, the slowest level first), or Megatron's `flex:BACKEND`. Without a profile `mpmoe:auto` chooses by trials.
    `auto` chooses among them all.

    Raises ConfigurationError for anything else.
    """
    name, colon, setting = variant.partition(":")
    if name == AUTO and not colon:
        return name, Options(profile=profile)
    if not colon or name == FLEX:
        return name, Options()
    if name not in VARIANTS:
        raise ConfigurationError(f"--dispatchers {variant}: only {', '.join(VARIANTS)} have variants; write {name}")
    if name == "mpmoe":
        return name, _partitions(variant, setting, profile)
    if setting == AUTO:
        if profile is None:
            raise ConfigurationError(f"--dispatchers {variant} chooses by measurements: give --profile")
        return name, Options(profile=profile)
    if name == MIGRATION:
        if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", setting):
            raise ConfigurationError(
                f"--dispatchers {variant}: write the domain size of each level, the slowest first, such as "
                f"{MIGRATION}:2x1"
            )
        return name, Options(domain_sizes=tuple(map(int, setting.split("x"))))
    if name == "parm":
        if setting not in (*SCHEDULES, AAS):
            raise ConfigurationError(
                f"--dispatchers {variant}: write a schedule ({', '.join(SCHEDULES)}, or {AAS}: S2 without overlap), or "
                "parm:auto"
            )
        return name, Options(parm_schedule=setting)
    parts = re.fullmatch(rf"({'|'.join(LEVELS)})(?:x([1-9][0-9]*))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a level ({', '.join(LEVELS)}), a level and its chunks such as monta:O3x4, "
            "or monta:auto"
        )
    level, chunks = parts[1], int(parts[2]) if parts[2] else None
    if level == "O1" and chunks not in (None, 1):
        raise ConfigurationError(f"--dispatchers {variant}: O1 does not cut; write monta:O1, or take O2 or O3")
    return name, Options(monta_level=level, chunks=chunks)


def _partitions(variant: str, setting: str, profile: Path | None) -> Options:
    if setting == AUTO:
        return Options(partitions=AUTO, profile=profile, tuner=None if profile is None else "model")
    parts = re.fullmatch(rf"([1-9][0-9]*)(?::({'|'.join(STRATEGIES)}))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a number of partitions and, where they share memory, how ("
            f"{', '.join(STRATEGIES)}), such as mpmoe:4 or mpmoe:4:S3, or mpmoe:auto"
        )
    return Options(partitions=int(parts[1]), memory_reuse=parts[2])
