"""Dispatchers with their settings in one word, such as `monta:O2x8`, as benchmarks, plans and telemetry name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.row_format import Wire, WireFormat
from megatron_moe_opt.systems import SYSTEMS, system_of
from megatron_moe_opt.systems.system import Grammar

FLEX = "flex"
"""Megatron's own dispatcher over a package for GPUs, which `flex:hybridep` names."""


def split_variant(variant: str, profile: Path | None) -> tuple[str, Options]:
    """Returns a variant's dispatcher and options: it is a name, or a name, a colon and a setting of its system.

    A format of rows on the wire may follow, as in `monta:fp8` or `monta:O2x8:fp8-same` (to the experts, and back).
    `NAME:auto` chooses by the profile, `auto` among all systems. Megatron's `flex:BACKEND` has no options of ours.

    Raises ConfigurationError for anything else.
    """
    name, colon, setting = variant.partition(":")
    if not colon:
        return name, Options(profile=profile) if name == AUTO else Options()
    if name == FLEX:
        return name, Options()
    system = system_of(name)
    setting, wire = split_wire(setting)
    if wire is not None and system is not None and system.reads_option("wire"):
        given = system.grammar.parse(variant, setting, profile) if setting else {}
        return name, Options(**given, wire=wire)
    if system is None or system.grammar is None:
        with_settings = ", ".join(one.name for one in SYSTEMS if one.grammar is not None)
        raise ConfigurationError(f"--dispatchers {variant}: only {with_settings} have variants; write {name}")
    return name, Options(**system.grammar.parse(variant, setting, profile))


def split_wire(setting: str) -> tuple[str, Wire | None]:
    """Returns a setting without the format of rows at its end, and that; None: it names none."""
    rest, _, word = setting.rpartition(":")
    formats = word.split("-")
    try:
        wire = Wire.of(word) if len(formats) == 1 else Wire(*map(WireFormat, formats))
    except (ValueError, TypeError):
        return setting, None
    return rest, wire


def whole_variant(variant: str, levels: int) -> str | None:
    """Returns a variant with its defaults filled in, as the planner names it; None where it chooses by itself.

    Args:
        levels: of the network, for defaults that are one number for each.
    """
    if split_wire(variant)[0].rpartition(":")[2] == AUTO:
        return None
    system, (_, options) = system_of(variant), split_variant(variant, None)
    return variant if system is None else system.variant(options, levels)


def kind_of(variant: str) -> str:
    """Returns the kind of a variant, which is what travels: the system, and what of its setting decides that. Variants
    of a kind cut the same traffic.
    """
    return _rewritten(variant, lambda grammar, setting: grammar.kind(setting))


def numbered(variant: str) -> str:
    """Returns a variant with the numbers that its word leaves out where they are 1."""
    return _rewritten(variant, lambda grammar, setting: grammar.numbered(setting))


def _rewritten(variant: str, rewrite: Callable[[Grammar, str], str]) -> str:
    """Returns a variant whose setting is what `rewrite` makes of it; none, where its system has no settings."""
    name, _, setting = variant.partition(":")
    system, (setting, wire) = system_of(name), split_wire(setting)
    rewritten = "" if system is None or system.grammar is None else rewrite(system.grammar, setting)
    return ":".join(part for part in (name, rewritten, "" if wire is None else wire.word) if part)
