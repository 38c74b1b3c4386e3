"""What must be the same on all ranks when they start, under the names that the user knows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron_moe_opt import __version__
from megatron_moe_opt.extension import ABI
from megatron_moe_opt.gpu_settings import CONNECTIONS, LAUNCH_ORDER, has_one_queue, launches_in_turn
from megatron_moe_opt.options import Options
from megatron_moe_opt.systems.system import FLAG
from megatron_moe_opt.versions import megatron_version

_SIZES = ("num_moe_experts", "hidden_size", "sequence_parallel", "params_dtype")
"""The fields of a configuration, besides those of MoE layers, that rows depend on."""
_PREFIXES = ("moe_", "recompute_")
"""What the names of fields begin with that MoE layers depend on: a pass that is recomputed sends its rows again."""
_PLAIN = (bool, int, float, str, torch.dtype)


def facts_of(options: Options, arguments: Sequence[str] = ()) -> dict[str, str | None]:
    """Returns the facts of the device, our options, the files that they name and what is installed, by the names that
    the user knows.

    Args:
        arguments: of the script, among which the dispatcher is.
    """
    facts: dict[str, str | None] = {
        # First: a rank without a GPU, which is on Gloo, differs from the others in some of the rest, too.
        "the device": "CUDA" if torch.cuda.is_available() else "the CPU",
        "megatron-moe-opt": f"{__version__} (interface {ABI})",
        "megatron-core": megatron_version(),
        "torch": torch.__version__,
        # They decide in which order experts travel.
        CONNECTIONS: "1" if has_one_queue() else "not 1",
        LAUNCH_ORDER: "1" if launches_in_turn() and not has_one_queue() else "of no effect",
    }
    for one in fields(options):
        facts[one.metadata["flag"]] = _shown(getattr(options, one.name))
    name = named_dispatcher(arguments)
    return facts if name is None else facts | {FLAG: name}


def named_dispatcher(arguments: Sequence[str]) -> str | None:
    """Returns the dispatcher that a command line names, the last one of several; None: it names none."""
    name = None
    for number, argument in enumerate(arguments):
        flag, is_joined, value = argument.partition("=")
        if flag == FLAG:
            name = value if is_joined else "".join(arguments[number + 1 : number + 2])
    return name


def facts_of_layer(options: Options, name: str, config: Any) -> dict[str, str | None]:
    """Returns the facts of `facts_of`, and the configuration's on its MoE layers, whose dispatcher has this name."""
    values = {name: value for name, value in vars(config).items() if name.startswith(_PREFIXES) or name in _SIZES}
    of_config = {
        f"--{field.replace('_', '-')}": _shown(value)
        for field, value in sorted(values.items())
        if value is None or isinstance(value, _PLAIN)
    }
    return facts_of(options) | of_config | {FLAG: name}


def _shown(value: Any) -> str | None:
    if value is None:
        return "not given"
    if isinstance(value, Path):
        return _content(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _content(file: Path) -> str | None:
    """Returns a hash of the file in words; None where it cannot be read: where one rank reads for all, only the first
    rank of a group needs to.
    """
    try:
        with open(file, "rb") as stream:
            return f"a file with SHA-256 {hashlib.sha256(stream.read()).hexdigest()[:12]}..."
    except OSError:
        return None
