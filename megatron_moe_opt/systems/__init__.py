"""The systems, one file and one record each. Whatever concerns them all is a loop over SYSTEMS."""

from __future__ import annotations

from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.systems.deepspeed import DEEPSPEED
from megatron_moe_opt.systems.expert_migration import EXPERT_MIGRATION
from megatron_moe_opt.systems.monta import MONTA
from megatron_moe_opt.systems.mpmoe import MPMOE
from megatron_moe_opt.systems.netmoe import NETMOE
from megatron_moe_opt.systems.parm import PARM
from megatron_moe_opt.systems.system import System

SYSTEMS: list[System] = [MONTA, PARM, NETMOE, MPMOE, DEEPSPEED, EXPERT_MIGRATION]
"""All systems. One that is added before `megatron_moe_opt.options` is imported is there as ours are."""


def system_names() -> tuple[str, ...]:
    """Returns the names of all systems, as --moe-token-dispatcher-type takes them."""
    return tuple(system.name for system in SYSTEMS)


def dispatcher_names() -> tuple[str, ...]:
    """Returns what we add to --moe-token-dispatcher-type's values: the systems, and `auto`, which plans what runs."""
    return (*system_names(), AUTO)


def system_of(variant: str) -> System | None:
    """Returns the system that a variant is of, or that has this name; None: it is none of ours."""
    name = variant.partition(":")[0]
    return next((system for system in SYSTEMS if system.name == name), None)


def moves_samples(variant: str) -> bool:
    """Whether samples leave their ranks under a variant, or a dispatcher of this name."""
    system = system_of(variant)
    return system is not None and system.moves_samples
