"""Recipes: a model's file of arguments for Megatron-LM's pretrain_gpt.py, read as the job reads it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.layouts import Layout

MODELS = Path(__file__).parent / "models"

# The file is a piece of the job script: bash sources it, there and here.
_READ = """
set -euo pipefail
source "$1"
printf '%s\\0' "$nodes" "$gpus_per_node" "$gpu_memory" "$vocabulary" "${dispatcher[@]}" -- "${arguments[@]}"
"""


class Flags:
    """A command line of flags and their values; of a flag that is given twice, the last counts."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        values: list[str] | None = None
        for argument in arguments:
            if argument.startswith("--"):
                flag, separator, value = argument.partition("=")
                values = self._values[flag] = [value] if separator else []
            elif values is None:
                raise ConfigurationError(f"{argument} is behind no flag: give arguments of Megatron-LM, such as --bf16")
            else:
                values.append(argument)

    def __contains__(self, flag: str) -> bool:
        return flag in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def values(self, flag: str) -> list[str]:
        """What stands behind a flag; empty where it is a switch, or is not given."""
        return self._values.get(flag, [])

    def number(self, flag: str, default: int | None = None) -> int:
        """The one whole number of a flag.

        Raises:
            ConfigurationError: the flag is missing and has no default, or has another value.
        """
        if flag not in self._values:
            if default is None:
                raise ConfigurationError(f"{flag} is missing: add it to the recipe's arguments")
            return default
        values = self._values[flag]
        if len(values) != 1 or not values[0].isdecimal():
            raise ConfigurationError(f"{flag} {' '.join(values)} is not a whole number: give one")
        return int(values[0])


@dataclass(frozen=True)
class Recipe:
    """What a model's file says."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu_memory: int
    """GB of one GPU."""
    vocabulary: int
    """Words of the model's tokenizer."""
    dispatcher: tuple[str, ...]
    """The dispatcher type with its options, which the job exchanges where it is given a plan or a profile."""
    arguments: tuple[str, ...]
    added: tuple[str, ...] = ()
    """What the user gives besides; of a flag that is there already, this one counts."""

    @property
    def command_line(self) -> tuple[str, ...]:
        """All arguments but the paths, in the job's order."""
        states_another = any(word.partition("=")[0] == "--moe-token-dispatcher-type" for word in self.added)
        return (*self.arguments, *(() if states_another else self.dispatcher), *self.added)

    @cached_property
    def flags(self) -> Flags:
        """The command line by flag."""
        return Flags(self.command_line)

    @property
    def layout(self) -> Layout:
        """The process groups of its world size.

        Raises:
            ConfigurationError: parallel sizes that do not divide it.
        """
        flags = self.flags
        tp, pp = flags.number("--tensor-model-parallel-size", 1), flags.number("--pipeline-model-parallel-size", 1)
        vpp = flags.number("--num-virtual-stages-per-pipeline-rank", 1)
        if layers_of_each := flags.number("--num-layers-per-virtual-pipeline-stage", 0):
            vpp = max(flags.number("--num-layers") // pp // layers_of_each, 1)
        return Layout(
            world=self.nodes * self.gpus_per_node,
            tp=tp,
            cp=flags.number("--context-parallel-size", 1),
            ep=flags.number("--expert-model-parallel-size", 1),
            expert_tp=flags.number("--expert-tensor-parallel-size", tp),
            pp=pp,
            vpp=vpp,
        )

    @cached_property
    def moe_layers(self) -> list[bool]:
        """Returns whether each layer has experts: --moe-layer-freq, which is an interval or a list such as
        ([0]*3+[1]*58).

        Raises:
            ConfigurationError: it is neither, or its length is not the number of layers.
        """
        layers = self.flags.number("--num-layers")
        text = "".join(self.flags.values("--moe-layer-freq")) or "1"
        if text.isdecimal() and int(text) > 0:
            return [layer % int(text) == 0 for layer in range(layers)]
        terms = [re.fullmatch(r"\[([01])\]\*(\d+)", term) for term in text.strip("()").split("+")]
        pattern = [term[1] == "1" for term in terms if term for _ in range(int(term[2]))]
        if None in terms or len(pattern) != layers:
            raise ConfigurationError(
                f"--moe-layer-freq {text} does not say of each of --num-layers {layers} whether it has experts: give "
                "an interval, or a sum such as ([0]*3+[1]*58)"
            )
        return pattern


def read_recipe(model: str | Path) -> Recipe:
    """Reads a model's file.

    Args:
        model: a name in recipes/slurm/models, or the path of a file. It is executed by bash.

    Raises:
        ConfigurationError: there is no such file, or it leaves something out.
    """
    path = MODELS / f"{model}.sh"
    if not path.is_file():
        path = Path(model)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MODELS.glob("*.sh")))
        raise ConfigurationError(f"{model} is neither a recipe nor a file of one: choose one of {known}")
    result = subprocess.run(["bash", "-c", _READ, "bash", str(path)], capture_output=True, text=True)
    if result.returncode:
        raise ConfigurationError(f"{path} is not a recipe: {result.stderr.strip()}")
    nodes, gpus, memory, vocabulary, *rest = result.stdout.split("\0")[:-1]
    end = rest.index("--")
    try:
        numbers = [int(text) for text in (nodes, gpus, memory, vocabulary)]
    except ValueError:
        raise ConfigurationError(
            f"{path}: nodes={nodes} gpus_per_node={gpus} gpu_memory={memory} vocabulary={vocabulary} must be whole "
            "numbers"
        ) from None
    return Recipe(path.stem, *numbers, tuple(rest[:end]), tuple(rest[end + 1 :]))
