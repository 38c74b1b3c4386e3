"""The `--moe-opt-*` command-line options of megatron-moe-opt."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import (
    ALL,
    AUTO,
    BYTES,
    CHUNKS,
    FILE,
    FROM_0,
    FROM_0_OR_ALL,
    LIST,
    RATIO,
    SWITCH,
    Values,
    one_of,
    or_auto,
)
from megatron_moe_opt.option_values import PARTITIONS as SEVERAL_PARTITIONS
from megatron_moe_opt.planning.partition_search import PARTITIONS
from megatron_moe_opt.schedules.monta import LEVELS
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES
from megatron_moe_opt.schedules.parm import AAS, SCHEDULES

PREFIX = "--moe-opt-"
RESIDUALS = ("last", "shared")
DEFAULT_CHUNKS = 4  # of O2 and O3 where nothing was measured; the paper's own (MoNTA, Table 8)
DEFAULT_PARTITIONS = 4
TUNERS = ("profile", "model")


def _option(flag: str, values: Values, help: str, default: Any = None, metavar: str | None = None) -> Any:
    """A field, and the option on the command line that it is. None is a value where it is the default."""
    return field(default=default, metadata={"flag": PREFIX + flag, "values": values, "help": help, "metavar": metavar})


@dataclass(frozen=True)
class Options:
    """Settings of the dispatchers; one object for all MoE layers of a process.

    Raises:
        ConfigurationError: a value that its option does not take, or settings that contradict each other.
    """

    profile: Path | None = _option("profile", FILE, "cluster.json written by `moe-opt profile`")
    plan: Path | None = _option("plan", FILE, "plan.json written by `moe-opt plan`, for auto")
    monta_level: str | None = _option(
        "monta-level",
        one_of(*LEVELS, AUTO),
        "pipelining level of the monta dispatcher (MoNTA, Table 6; default: auto with a profile, else O1)",
    )
    chunks: int | str | None = _option(
        "chunks",
        CHUNKS,
        f"chunks of the pipeline at O2 and O3 (default: auto with a profile, else {DEFAULT_CHUNKS})",
    )
    parm_schedule: str | None = _option(
        "parm-schedule",
        one_of(*SCHEDULES, AAS, AUTO),
        "where the parm dispatcher splits tokens that all TP ranks hold: before the gate (S1) or after it (S2; or AAS, "
        "for comparison: S2 with its AllGather behind the whole all-to-all) (default: auto with a profile, else S1)",
    )
    expert_order: Path | None = _option(
        "expert-order",
        FILE,
        "which rank holds which experts, written by `moe-opt plan-experts` (default: stock's order)",
    )
    partitions: int | tuple[int, ...] | str | None = _option(
        "partitions",
        SEVERAL_PARTITIONS,
        "parts of the rows that mpmoe runs through the experts as a pipeline; several to choose from; or auto: any of "
        f"{PARTITIONS[0]} to {PARTITIONS[-1]} (default: {DEFAULT_PARTITIONS})",
    )
    memory_reuse: str | None = _option(
        "memory-reuse",
        one_of(*STRATEGIES, AUTO),
        "whether mpmoe's partitions share buffers, and how backward gets back what they overwrite: S1 offloads, S2 "
        "communicates expert inputs again, S3 recomputes what experts save, S4 does both of the latter "
        f"(default: {NONE})",
    )
    activation_budget: int | None = _option(
        "activation-budget",
        BYTES,
        "the most that activations of a layer may take (MPMoE, eq. 2), such as 512MiB, where mpmoe or auto chooses",
    )
    tuner: str | None = _option(
        "tuner",
        one_of(*TUNERS),
        "what mpmoe chooses by: times of its own first passes (profile, the default), or a model of the cluster that "
        "was measured",
    )
    domain_sizes: tuple[int, ...] | str | None = _option(
        "domain-sizes",
        or_auto(LIST),
        "workers of an expert domain at each level of the expert-migration dispatcher, the slowest level first: "
        "experts travel inside a domain, tokens between domains (default: auto with a profile, else 1 at every level: "
        "no expert travels)",
        metavar="S,...|auto",
    )
    network_levels: tuple[int, ...] | None = _option(
        "levels",
        LIST,
        "workers of each network level of the expert-parallel group, the slowest level first (default: its nodes and "
        "the ranks of each)",
    )
    prefetch_layers: int = _option(
        "prefetch-layers", FROM_0, "layers whose experts are gathered before their turn (default: %(default)s)", 1
    )
    resident_layers: int | str | None = _option(
        "resident-layers",
        FROM_0_OR_ALL,
        "layers whose gathered experts stay in memory, those used last, or all; other layers' are gathered again in "
        f"each pass, forward and backward (default: one more than {PREFIX}prefetch-layers; with "
        f"{PREFIX}compression-ratio all)",
    )
    compression_ratio: float | None = _option(
        "compression-ratio",
        RATIO,
        "bytes of an expert over those of it that travel; lossy (default: experts travel whole)",
    )
    gradient_compression_ratio: float | None = _option(
        "gradient-compression-ratio",
        RATIO,
        "bytes of the gradients of experts that travel over those of them that return to the owners, the largest "
        "entries; the rest is added to the next ones; lossy (default: they return whole)",
    )
    residuals: str = _option(
        "residuals",
        one_of(*RESIDUALS),
        "compressed experts are told from the last ones, as receivers hold them, which at first are sent whole; or "
        "(shared) begin as the shared expert, the experts' mean, and move with it (default: %(default)s)",
        RESIDUALS[0],
    )
    shared_expert_interval: int = _option(
        "shared-expert-interval",
        FROM_0,
        "with shared: times that a layer's experts travel from one renewal of the shared expert to the next; 0: none, "
        "and nothing is held: the largest weights alone, for comparison (default: %(default)s)",
        10,
    )
    telemetry: bool = _option(
        "telemetry",
        SWITCH,
        "report times, bytes and load balance of every MoE layer, under any dispatcher, at the logging interval: in "
        "the log, to TensorBoard and to W&B",
        False,
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            self._take(one.name, one.default, **one.metadata)
        self._check_choices()
        self._check_residents()

    def _take(self, name: str, default: Any, flag: str, values: Values, **_: Any) -> None:
        """Sees to it that a field has a value that its option takes, as the command line would give it."""
        value = getattr(self, name)
        if value is None and default is None:
            return
        try:
            taken = values.take(value)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{flag} {value!r} is {values.refusal}") from error
        object.__setattr__(self, name, taken)

    def _check_choices(self) -> None:
        choices = (
            ("monta-level", self.monta_level),
            ("chunks", self.chunks),
            ("parm-schedule", self.parm_schedule),
            ("domain-sizes", self.domain_sizes),
        )
        for flag, value in choices:
            if value == AUTO and self.profile is None:
                raise ConfigurationError(
                    f"{PREFIX}{flag} auto chooses from measurements: run `moe-opt profile` and give its file with "
                    f"{PREFIX}profile"
                )
        for flag, ratio in self.compression.items():
            if not self.experts_may_travel:
                raise ConfigurationError(
                    f"{flag} {ratio:g} has nothing to compress where no expert travels: give {PREFIX}domain-sizes "
                    "above 1"
                )
        if self.profile is not None and len(self.levels) == 1 and self.chunk_counts is not None:
            raise ConfigurationError(
                f"{PREFIX}profile {self.profile} has nothing to choose: drop it, or leave {PREFIX}monta-level or "
                f"{PREFIX}chunks at auto"
            )
        if self.monta_level == "O1" and self.chunks not in (None, 1):
            raise ConfigurationError(
                f"{PREFIX}chunks {self.chunks} has no meaning at {PREFIX}monta-level O1, which does not cut: use O2 "
                "or O3"
            )
        if self.tuner is not None and not self.tunes_partitions:
            raise ConfigurationError(
                f"{PREFIX}tuner {self.tuner} has nothing to choose: add {PREFIX}partitions auto or "
                f"{PREFIX}memory-reuse auto, or drop it"
            )
        if self.tuner == "model" and self.profile is None:
            raise ConfigurationError(
                f"{PREFIX}tuner model predicts from measurements: run `moe-opt profile` and give its file with "
                f"{PREFIX}profile, or use {PREFIX}tuner profile"
            )

    def _check_residents(self) -> None:
        if self.resident_layers is None:
            return
        flag = f"{PREFIX}resident-layers {self.resident_layers}"
        if not self.experts_may_travel:
            raise ConfigurationError(
                f"{flag} bounds what is held of experts that travel, and none does: give {PREFIX}domain-sizes above 1"
            )
        if self.resident_layers == ALL:
            return
        if self.resident_layers <= self.prefetch_layers:
            raise ConfigurationError(
                f"{flag} has no room for {PREFIX}prefetch-layers {self.prefetch_layers} and the layer that runs: give "
                f"{self.prefetch_layers + 1} or more"
            )
        if self.compression_ratio is not None:
            raise ConfigurationError(
                f"{flag} drops experts to gather them again, and {PREFIX}compression-ratio sends them as differences "
                "from what is held: drop one of the two"
            )

    @property
    def resident_limit(self) -> int | None:
        """The layers whose gathered experts stay in memory; None: all."""
        if self.resident_layers is None:
            return None if self.compression_ratio is not None else self.prefetch_layers + 1
        return None if self.resident_layers == ALL else self.resident_layers

    @property
    def tunes_partitions(self) -> bool:
        """Whether `mpmoe` chooses its partitions, its memory reuse or both."""
        return len(self.partition_counts) > 1 or self.memory_reuse == AUTO

    @property
    def partition_counts(self) -> tuple[int, ...]:
        """Of `mpmoe`, to choose from; one where the user chose."""
        if self.partitions == AUTO:
            return PARTITIONS
        if isinstance(self.partitions, tuple):
            return self.partitions
        return (self.partitions or DEFAULT_PARTITIONS,)

    @property
    def memory_strategies(self) -> tuple[str, ...]:
        """Of `mpmoe`, to choose from; one where the user chose."""
        return tuple(STRATEGIES) if self.memory_reuse == AUTO else (self.memory_reuse or NONE,)

    @property
    def partition_tuner(self) -> str:
        """What `mpmoe` chooses by, where it does: trials, unless the user wants the model."""
        return self.tuner or "profile"

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels to choose from; one where the user chose."""
        if self.monta_level in LEVELS:
            return (self.monta_level,)
        return LEVELS if self.profile is not None else ("O1",)

    @property
    def chunk_counts(self) -> tuple[int, ...] | None:
        """The one chunk count to use; None: to be chosen."""
        if isinstance(self.chunks, int):
            return (self.chunks,)
        if self.levels == ("O1",):
            return (1,)
        return None if self.profile is not None else (DEFAULT_CHUNKS,)

    @property
    def compression(self) -> dict[str, float]:
        """The ratios of `expert-migration` that were given, by their flags: all of them lossy."""
        ratios = {"compression-ratio": self.compression_ratio,
                  "gradient-compression-ratio": self.gradient_compression_ratio}  # fmt: skip
        return {PREFIX + flag: ratio for flag, ratio in ratios.items() if ratio is not None}

    @property
    def chooses_domains(self) -> bool:
        """Whether `expert-migration` chooses its domains from the profile."""
        return self.profile is not None and self.domain_sizes in (None, AUTO)

    @property
    def experts_may_travel(self) -> bool:
        """Whether `expert-migration` may have domains of more than one rank."""
        return self.chooses_domains or max(self.domain_sizes or (1,)) > 1

    @property
    def schedule_profile(self) -> Path | None:
        """What `parm` chooses its schedule by; None where the user chose."""
        return self.profile if self.parm_schedule in (None, AUTO) else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see --help for the {PREFIX}* options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron_moe_opt.launch SCRIPT", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("megatron-moe-opt")
    for one in fields(Options):
        flag, values, about, metavar = (one.metadata[key] for key in ("flag", "values", "help", "metavar"))
        named = {"dest": one.name, "default": one.default, "help": about}
        if values is SWITCH:
            group.add_argument(flag, action="store_true", **named)
        elif values.choices is not None:
            group.add_argument(flag, choices=values.choices, **named)
        else:
            group.add_argument(flag, type=values.parse, metavar=metavar or values.metavar, **named)
    return parser


def options_help() -> str:
    """The help text of our options alone."""
    return _parser().format_help()


def split_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Takes the `--moe-opt-*` options out of `arguments`; what remains belongs to the script.

    Raises ConfigurationError for an unknown option of ours or a wrong value.
    """
    namespace, remaining = _parser().parse_known_args(list(arguments))
    for argument in remaining:
        if argument.startswith(PREFIX):
            raise ConfigurationError(f"{argument} is not an option of megatron-moe-opt; see --help for the list")
    return Options(**vars(namespace)), remaining
