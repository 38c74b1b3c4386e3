"""The `--moe-opt-*` command-line options of megatron-moe-opt."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NoReturn

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.planning.partition_search import PARTITIONS
from megatron_moe_opt.schedules.monta import LEVELS
from megatron_moe_opt.schedules.mpmoe import NONE, STRATEGIES
from megatron_moe_opt.schedules.parm import SCHEDULES

PREFIX = "--moe-opt-"
AUTO = "auto"
RESIDUALS = ("last", "shared")
DEFAULT_CHUNKS = 4  # of O2 and O3 where nothing was measured; the paper's own (MoNTA, Table 8)
DEFAULT_PARTITIONS = 4
TUNERS = ("profile", "model")


@dataclass(frozen=True)
class Options:
    """Settings of the dispatchers; one object for all MoE layers of a process.

    Raises:
        ConfigurationError: settings that contradict each other.
    """

    monta_level: str | None = None
    """Pipelining level of `monta`: O1, O2, O3 (MoNTA, Table 6) or auto. None: auto with a profile, else O1."""
    chunks: int | str | None = None
    """Chunks of the pipeline, or auto. None: auto with a profile, else 4 (1 at level O1)."""
    parm_schedule: str | None = None
    """Where `parm` splits tokens that all TP ranks hold: before the gate (S1), after it (S2), or auto. None: auto with
    a profile, else S1. AAS is S2 whose AllGather waits for the whole all-to-all: for comparison only."""
    domain_sizes: tuple[int, ...] | str | None = None
    """Ranks, or workers, of an expert domain at each level of `expert-migration`, the slowest first; or auto. None:
    auto with a profile, else 1 at every level."""
    network_levels: tuple[int, ...] | None = None
    """Workers of each level of the expert-parallel group, the slowest first. None: nodes, and the ranks of a node."""
    prefetch_layers: int = 1
    """Layers whose experts `expert-migration` gathers before their turn."""
    resident_layers: int | None = None
    """Layers whose gathered experts `expert-migration` keeps. None: all."""
    compression_ratio: float | None = None
    """Bytes of an expert over those of it that travel. None: experts travel whole; lossy otherwise."""
    gradient_compression_ratio: float | None = None
    """Bytes of the gradient of an expert that travels over those of it that return. None: whole; lossy otherwise."""
    residuals: str = "last"
    """What receivers hold at first of compressed experts, and are told the rest of: whole experts, or a shared one."""
    shared_expert_interval: int = 10
    """Times that a layer's experts travel compressed from one renewal of their mean to the next; 0: no mean, and
    nothing held: the largest weights alone."""
    profile: Path | None = None
    """A cluster.json of `moe-opt profile`."""
    plan: Path | None = None
    """A plan.json of `moe-opt plan`, for `auto`."""
    expert_order: Path | None = None
    """A file of `moe-opt plan-experts`: which rank holds which experts. None: stock's order."""
    partitions: int | tuple[int, ...] | str | None = None
    """Parts that `mpmoe` cuts each expert's rows into; several to choose from, ascending; or auto: any of 1 to 8. None:
    4."""
    memory_reuse: str | None = None
    """How `mpmoe` restores what partitions overwrite in shared buffers: none (they share nothing), S1 to S4 (MPMoE,
    Table II), or auto. None: none."""
    activation_budget: int | None = None
    """Bytes of a layer's activations (MPMoE, eq. 2) where `mpmoe` or `auto` chooses; None: no limit."""
    tuner: str | None = None
    """What `mpmoe` chooses by: its own passes (profile) or the model of the measured cluster (model)."""
    telemetry: bool = False
    """Report times, bytes and load balance of every MoE layer at the logging interval, under any dispatcher."""

    def __post_init__(self) -> None:
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
        self._check_residents()
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


def _chunks(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of chunks from 1 on nor auto")
    return int(text)


def _partitions(text: str) -> int | tuple[int, ...] | str:
    if text == AUTO:
        return AUTO
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither a number of partitions from 1 on, nor several such as 2,4,8, nor auto"
        )
    counts = sorted({int(part) for part in text.split(",")})
    return counts[0] if len(counts) == 1 else tuple(counts)


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def byte_count(text: str) -> int:
    """Of `512MiB`, `1.5GiB` or a plain number. Raises argparse.ArgumentTypeError for anything else, and for 0."""
    parts = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNITS)})", text)
    if parts is None or float(parts[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes above 0, such as 512MiB or 1.5GiB")
    return int(float(parts[1]) * _UNITS[parts[2]])


def _whole_numbers(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers from 1 on, separated by commas")
    return tuple(map(int, numbers))


def _number_from_0(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on")
    return int(text)


def _above_1(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 < ratio < inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a ratio above 1")
    return ratio


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron_moe_opt.launch SCRIPT", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("megatron-moe-opt")
    group.add_argument(
        f"{PREFIX}profile", dest="profile", type=Path, metavar="FILE", help="cluster.json written by `moe-opt profile`"
    )
    group.add_argument(
        f"{PREFIX}plan", dest="plan", type=Path, metavar="FILE", help="plan.json written by `moe-opt plan`, for auto"
    )
    group.add_argument(
        f"{PREFIX}monta-level",
        dest="monta_level",
        choices=(*LEVELS, AUTO),
        help="pipelining level of the monta dispatcher (default: auto with a profile, else O1)",
    )
    group.add_argument(
        f"{PREFIX}chunks",
        dest="chunks",
        type=_chunks,
        metavar="N|auto",
        help=f"chunks of the pipeline at O2 and O3 (default: auto with a profile, else {DEFAULT_CHUNKS})",
    )
    group.add_argument(
        f"{PREFIX}parm-schedule",
        dest="parm_schedule",
        choices=(*SCHEDULES, AUTO),
        help="where the parm dispatcher splits tokens that all TP ranks hold: before the gate (S1) or after it (S2) "
        "(default: auto with a profile, else S1)",
    )
    group.add_argument(
        f"{PREFIX}expert-order",
        dest="expert_order",
        type=Path,
        metavar="FILE",
        help="which rank holds which experts, written by `moe-opt plan-experts` (default: stock's order)",
    )
    group.add_argument(
        f"{PREFIX}partitions",
        dest="partitions",
        type=_partitions,
        metavar="N|N,N,...|auto",
        help="parts of the rows that mpmoe runs through the experts as a pipeline; several to choose from; or auto: "
        f"any of {PARTITIONS[0]} to {PARTITIONS[-1]} (default: {DEFAULT_PARTITIONS})",
    )
    group.add_argument(
        f"{PREFIX}memory-reuse",
        dest="memory_reuse",
        choices=(*STRATEGIES, AUTO),
        help="whether mpmoe's partitions share buffers, and how backward gets back what they overwrite: S1 offloads, "
        "S2 communicates expert inputs again, S3 recomputes what experts save, S4 does both of the latter "
        f"(default: {NONE})",
    )
    group.add_argument(
        f"{PREFIX}activation-budget",
        dest="activation_budget",
        type=byte_count,
        metavar="BYTES",
        help="the most that activations of a layer may take, such as 512MiB, where mpmoe or auto chooses",
    )
    group.add_argument(
        f"{PREFIX}tuner",
        dest="tuner",
        choices=TUNERS,
        help="what mpmoe chooses by: times of its own first passes (profile, the default), or a model of the cluster "
        "that was measured",
    )
    group.add_argument(
        f"{PREFIX}domain-sizes",
        dest="domain_sizes",
        type=lambda text: text if text == AUTO else _whole_numbers(text),
        metavar="S,...|auto",
        help="workers of an expert domain at each level of the expert-migration dispatcher, the slowest level first: "
        "experts travel inside a domain, tokens between domains (default: auto with a profile, else 1 at every "
        "level: no expert travels)",
    )
    group.add_argument(
        f"{PREFIX}levels",
        dest="network_levels",
        type=_whole_numbers,
        metavar="N,...",
        help="workers of each network level of the expert-parallel group, the slowest level first (default: its nodes "
        "and the ranks of each)",
    )
    group.add_argument(
        f"{PREFIX}prefetch-layers",
        dest="prefetch_layers",
        type=_number_from_0,
        default=Options.prefetch_layers,
        metavar="N",
        help="layers whose experts are gathered before their turn (default: %(default)s)",
    )
    group.add_argument(
        f"{PREFIX}resident-layers",
        dest="resident_layers",
        type=_number_from_0,
        metavar="N",
        help="layers whose gathered experts stay in memory, those used last; other layers' are gathered again in each "
        "pass, forward and backward (default: all)",
    )
    group.add_argument(
        f"{PREFIX}compression-ratio",
        dest="compression_ratio",
        type=_above_1,
        metavar="R",
        help="bytes of an expert over those of it that travel; lossy (default: experts travel whole)",
    )
    group.add_argument(
        f"{PREFIX}gradient-compression-ratio",
        dest="gradient_compression_ratio",
        type=_above_1,
        metavar="R",
        help="bytes of the gradients of experts that travel over those of them that return to the owners, the largest "
        "entries; the rest is added to the next ones; lossy (default: they return whole)",
    )
    group.add_argument(
        f"{PREFIX}residuals",
        dest="residuals",
        choices=RESIDUALS,
        default=Options.residuals,
        help="compressed experts are told from the last ones, as receivers hold them, which at first are sent whole; "
        "or (shared) begin as the shared expert, the experts' mean, and move with it (default: %(default)s)",
    )
    group.add_argument(
        f"{PREFIX}shared-expert-interval",
        dest="shared_expert_interval",
        type=_number_from_0,
        default=Options.shared_expert_interval,
        metavar="N",
        help="with shared: times that a layer's experts travel from one renewal of the shared expert to the next; 0: "
        "none, and nothing is held: the largest weights alone, for comparison (default: %(default)s)",
    )
    group.add_argument(
        f"{PREFIX}telemetry",
        dest="telemetry",
        action="store_true",
        help="report times, bytes and load balance of every MoE layer, under any dispatcher, at the logging interval: "
        "in the log, to TensorBoard and to W&B",
    )
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
