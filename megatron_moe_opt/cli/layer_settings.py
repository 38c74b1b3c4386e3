"""What `moe-opt bench layer` was asked for, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.options import AUTO, Options
from megatron_moe_opt.schedules.monta import LEVELS
from megatron_moe_opt.schedules.mpmoe import STRATEGIES
from megatron_moe_opt.schedules.parm import AAS, SCHEDULES

BASELINE = "alltoall"
STOCK = (BASELINE, "allgather")
REPLICATED_BASELINE = "deepspeed"
MIGRATION = "expert-migration"
VARIANTS = ("monta", "parm", "mpmoe", MIGRATION)


def split_variant(variant: str, profile: Path | None) -> tuple[str, Options]:
    """The dispatcher's name and options of a variant.

    It is `name`, `monta:auto`, `monta:LEVEL`, `monta:LEVELxCHUNKS`, `parm:auto`, `parm:SCHEDULE`, `mpmoe:auto`,
    `mpmoe:PARTITIONS`, `mpmoe:PARTITIONS:STRATEGY`, `expert-migration:auto` or `expert-migration:SIZExSIZE` (of
    domains, the slowest level first). Without a profile `mpmoe:auto` chooses by trials.

    Raises ConfigurationError for anything else.
    """
    name, colon, setting = variant.partition(":")
    if not colon:
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
        return Options(partitions=AUTO, profile=profile)
    parts = re.fullmatch(rf"([1-9][0-9]*)(?::({'|'.join(STRATEGIES)}))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a number of partitions and, where they share memory, how ("
            f"{', '.join(STRATEGIES)}), such as mpmoe:4 or mpmoe:4:S3, or mpmoe:auto"
        )
    return Options(partitions=int(parts[1]), memory_reuse=parts[2])


@dataclass(frozen=True)
class LayerSettings:
    """The options of `moe-opt bench layer`; sizes of one rank where it matters."""

    dispatchers: tuple[str, ...]
    """The baseline first, whatever the order asked for, and added where it was not. See `split_variant`."""
    tokens: int
    hidden: int
    ffn_hidden: int
    experts: int
    topk: int
    tp: int
    ep: int | None
    """None: as many ranks as expert_tp leaves."""
    expert_tp: int
    dtype: str
    """fp32 or bf16."""
    routing: str
    capacity_factor: float | None
    pad_to_capacity: bool
    steps: int
    warmup: int
    seed: int
    profile: Path | None = None
    """For variants that choose by measurements."""
    dispatch_only: bool = False
    """Leave router and experts out."""
    replicated: bool = False
    """All TP ranks hold the same tokens: no sequence parallelism."""

    def __post_init__(self) -> None:
        ordered = dict.fromkeys((self.baseline, *self.dispatchers))  # without repetitions
        object.__setattr__(self, "dispatchers", tuple(ordered))

    @property
    def baseline(self) -> str:
        """What times are compared with: stock; or, where stock refuses to train, the papers' reference schedule."""
        return REPLICATED_BASELINE if self.replicated else BASELINE

    def ep_size(self, world: int) -> int:
        """Expert parallelism on `world` ranks."""
        return self.ep or max(1, world // self.expert_tp)

    def check(self, known_dispatchers: tuple[str, ...], world: int) -> None:
        """Refuses what cannot run on `world` ranks: ConfigurationError with the option, its value and the way out."""
        for variant in self.dispatchers:
            name = variant.partition(":")[0]
            if name not in known_dispatchers:
                raise ConfigurationError(f"--dispatchers {name} is unknown: choose from {', '.join(known_dispatchers)}")
            split_variant(variant, self.profile)
        if world % self.tp:
            raise ConfigurationError(f"--tp {self.tp} does not divide the {world} ranks of this run: choose a divisor")
        ep = self.ep_size(world)
        if world % (ep * self.expert_tp):
            raise ConfigurationError(
                f"--ep {ep} x --expert-tp {self.expert_tp} = {ep * self.expert_tp} does not divide the {world} ranks "
                "of this run: choose sizes whose product does"
            )
        if self.experts % ep:
            raise ConfigurationError(
                f"--ep {ep} does not divide --experts {self.experts}: choose a divisor of {self.experts}"
            )
        if self.topk > self.experts:
            raise ConfigurationError(f"--topk {self.topk} is more than --experts {self.experts}: choose at most that")
        if self.ffn_hidden % self.expert_tp:
            raise ConfigurationError(
                f"--expert-tp {self.expert_tp} does not divide --ffn-hidden {self.ffn_hidden}: choose a divisor"
            )
        if self.replicated and self.tp == 1:
            raise ConfigurationError("--replicated is about the ranks of a TP group: give --tp 2 or more, or drop it")
        stock = [name for name in self.dispatchers if name in STOCK]
        if self.replicated and stock:
            raise ConfigurationError(
                f"--dispatchers {stock[0]} does not train on --replicated tokens: leave it out, or drop --replicated"
            )
        if self.dispatch_only and any(variant.partition(":")[0] == "mpmoe" for variant in self.dispatchers):
            raise ConfigurationError("--dispatch-only leaves out the experts that mpmoe pipelines through: drop it")
        if self.dispatch_only and self.replicated:
            raise ConfigurationError("--dispatch-only leaves out what --replicated is about: drop one of them")
        if self.dispatch_only and self.capacity_factor is not None:
            raise ConfigurationError("--dispatch-only has no router that drops tokens: leave --capacity-factor out")
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ConfigurationError("--pad-to-capacity needs a capacity to pad to: give --capacity-factor")
