"""MoNTA: all-to-all between nodes and all-gather inside them, as a pipeline of chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, BYTES, CHUNKS, one_of
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.layer_passes import Pass
from megatron_moe_opt.planning.predicting.prediction import HeldMore, Prediction
from megatron_moe_opt.schedules.monta import CHUNK_COUNTS, LEVELS, even_chunks
from megatron_moe_opt.systems.system import (
    CHOOSES,
    PREFIX,
    Grammar,
    SharedOptions,
    System,
    chosen_by_profile,
    option,
)

NAME = "monta"
DEFAULT_CHUNKS = 4  # of O2 and O3 where nothing was measured; the paper's own (MoNTA, Table 8)


@dataclass(frozen=True)
class MontaOptions(SharedOptions):
    """How dispatch and combine are pipelined."""

    monta_level: str | None = option(
        "monta-level",
        one_of(*LEVELS, AUTO),
        "pipelining level of the monta dispatcher (MoNTA, Table 6; default: auto with a profile, else O1)",
        auto=CHOOSES,
    )
    chunks: int | str | None = option(
        "chunks",
        CHUNKS,
        f"chunks of the pipeline at O2 and O3 (default: auto with a profile, else {DEFAULT_CHUNKS}), of each partition "
        "of mpmoe's by rows (default: 1), or of tokens that hop under netmoe (default: 1) or expert-migration "
        "(default: auto with a profile, else 1)",
        auto=CHOOSES,
    )
    minimal_chunk: int | None = option(
        "minimal-chunk",
        BYTES,
        "the least bytes of a rank's rows in a chunk, where the number of chunks is chosen (MoNTA's I_minimal; "
        "default: no bound)",
    )

    @property
    def levels(self) -> tuple[str, ...]:
        """Returns the levels to choose from; one where the user chose."""
        if self.monta_level in LEVELS:
            return (self.monta_level,)
        return LEVELS if self.profile is not None or self.monta_level == AUTO else ("O1",)

    @property
    def chunk_counts(self) -> tuple[int, ...] | None:
        """Returns the one chunk count to use; None: to be chosen."""
        if isinstance(self.chunks, int):
            return (self.chunks,)
        if self.levels == ("O1",):
            return (1,)
        return None if self.profile is not None or self.chunks == AUTO else (DEFAULT_CHUNKS,)

    def check(self) -> None:
        """Refuses, with ConfigurationError, a profile where there is nothing to choose, and auto without one."""
        self.auto_needs_profile("monta_level", "chunks")
        if self.profile is not None and len(self.levels) == 1 and self.chunk_counts is not None:
            raise ConfigurationError(
                f"{PREFIX}profile {self.profile} has nothing to choose: drop it, or leave {PREFIX}monta-level or "
                f"{PREFIX}chunks at auto"
            )
        if self.minimal_chunk is not None and self.chunk_counts is not None:
            raise ConfigurationError(
                f"{PREFIX}minimal-chunk {self.minimal_chunk} bounds a choice of chunks, and none is left: give "
                f"{PREFIX}profile, and leave {PREFIX}chunks at auto"
            )
        if self.monta_level == "O1" and self.chunks not in (None, 1):
            raise ConfigurationError(
                f"{PREFIX}chunks {self.chunks} has no meaning at {PREFIX}monta-level O1, which does not cut: use O2 "
                "or O3"
            )


def check_cuts(options: MontaOptions) -> None:
    """Refuses chunks at the level that has none, which is MoNTA's without a profile and unless another is named. For a
    dispatcher that is named: `chunks` alone says something to others.
    """
    if options.levels == ("O1",) and options.chunks not in (None, 1):
        raise ConfigurationError(
            f"{PREFIX}chunks {options.chunks} has no meaning at level O1, which does not cut, and is the one without "
            f"{PREFIX}monta-level: give {PREFIX}monta-level O2 or O3"
        )


def pipelining(config: Any, groups: Any, options: MontaOptions) -> Any:
    """Returns the Pipelining of a layer's rows that options of MoNTA ask for. A collective call over its groups."""
    from megatron_moe_opt.dispatchers.pipelining import pipelining_of
    from megatron_moe_opt.integration.layer.configured_workload import layer_workload

    return pipelining_of(options, groups, layer_workload(config, groups, wire=options.wire))


def _build(groups: Any, options: MontaOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.monta import MontaDispatcher

    return MontaDispatcher(groups, pipelining(config, groups, options), options.wire)


def parse_pipeline(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    if setting == AUTO:
        return chosen_by_profile(variant, profile)
    name = variant.partition(":")[0]
    parts = re.fullmatch(rf"({'|'.join(LEVELS)})(?:x([1-9][0-9]*))?", setting)
    if parts is None:
        raise ConfigurationError(
            f"--dispatchers {variant}: write a level ({', '.join(LEVELS)}), a level and its chunks such as "
            f"{name}:O3x4, or {name}:auto"
        )
    level, chunks = parts[1], int(parts[2]) if parts[2] else None
    if level == "O1" and chunks not in (None, 1):
        raise ConfigurationError(f"--dispatchers {variant}: O1 does not cut; write {name}:O1, or take O2 or O3")
    return {"monta_level": level, "chunks": chunks}


def _write(options: MontaOptions, levels: int) -> str:
    level = options.monta_level or "O1"
    return level if level == "O1" else f"{level}x{options.chunks or DEFAULT_CHUNKS}"


def numbered_pipeline(setting: str) -> str:
    """Returns a level and its chunks, O1 as O2 in one chunk, which is the same."""
    return "O2x1" if setting == "O1" else setting


def pipelines(options: MontaOptions, passes: Sequence[Pass]) -> list[tuple[str, int]]:
    """Returns the levels and chunk counts that options leave to choose from. In one chunk all levels are O1.

    Args:
        passes: of the layer; a minimal chunk bounds how finely the one of fewest bytes is cut.
    """
    levels, least = options.levels, min(one.exchanged for one in passes)
    counts = [n for n in options.chunk_counts or CHUNK_COUNTS if n == 1 or least >= n * (options.minimal_chunk or 0)]
    several = [(level, n) for level in levels if level != "O1" for n in counts if n > 1 or "O1" not in levels]
    return [("O1", 1)] * ("O1" in levels) + several


def _candidates(layer: LayerOnCluster, options: MontaOptions) -> Iterator[Prediction]:
    one = layer.workload
    for level, count in pipelines(options, layer.passes) if layer.has_room(HeldMore()) else ():
        schedules = [
            exchanged.schedule(level, even_chunks(exchanged.exchanged, one.etp, count), one.ep, one.etp)
            for exchanged in layer.passes
        ]
        setting = _write(MontaOptions(monta_level=level, chunks=count), 1)
        yield layer.prediction(f"{NAME}:{setting}", schedules, layer.edge, parts=count)


MONTA = System(
    name=NAME,
    options=MontaOptions,
    reads=("profile", "expert_order", "wire"),
    build=_build,
    check=lambda config, options, arguments: check_cuts(options),
    grammar=Grammar(parse_pipeline, _write, numbered=numbered_pipeline),
    candidates=_candidates,
)
