"""A sixth system, as somebody would add it to the package: chunks in turn, none before the one ahead is through.

    python -m tests.sixth_system plan|bench|... as moe-opt's commands; `train` says what registering its name refuses,
    before a command behind it

One record, one schedule and one dispatcher; nothing else knows of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.option_values import AUTO, CHUNKS
from megatron_moe_opt.planning.predicting.layer_on_cluster import LayerOnCluster
from megatron_moe_opt.planning.predicting.prediction import Prediction
from megatron_moe_opt.schedules.monta import even_chunks
from megatron_moe_opt.schedules.schedule import MovingSchedule, Schedule
from megatron_moe_opt.systems import SYSTEMS
from megatron_moe_opt.systems.system import CHOOSES, PREFIX, Grammar, SharedOptions, System, option

NAME = "in-turn"


@dataclass(frozen=True)
class InTurnOptions(SharedOptions):
    turns: int | None = option("turns", CHUNKS, "chunks of in-turn (default: 2)", auto=CHOOSES)

    def check(self) -> None:
        if self.turns == 1:
            raise ConfigurationError(f"{PREFIX}turns 1 is no turn: give 2 or more")


def in_turn(schedule: Schedule) -> Schedule:
    """Returns the schedule with each op waiting for the one before it."""
    ops = (replace(op, waits_for=(number - 1,) if number else ()) for number, op in enumerate(schedule.ops))
    return replace(schedule, name=f"{schedule.name}, in turn", ops=tuple(ops))


def taking_turns(moving: MovingSchedule) -> MovingSchedule:
    """Returns what runs, in turn, and how it is shown."""
    return MovingSchedule(in_turn(moving.schedule), lambda: in_turn(moving.sized()))


def build(groups: Any, options: InTurnOptions, config: Any) -> Any:
    from megatron_moe_opt.dispatchers.dispatcher import Dispatched, Dispatcher, map_rows
    from megatron_moe_opt.runtime.rows.expert_exchange import Exchange
    from megatron_moe_opt.runtime.rows.own_rows import permuted
    from megatron_moe_opt.runtime.rows.ways import EpThenExpertTp

    class InTurn(EpThenExpertTp):
        def dispatch(self, plan: Any, row_bytes: int) -> MovingSchedule:
            return taking_turns(super().dispatch(plan, row_bytes))

        def combine(self, plan: Any, row_bytes: int) -> MovingSchedule:
            return taking_turns(super().combine(plan, row_bytes))

    class Rows(Dispatched):
        @cached_property
        def exchange(self) -> Exchange:
            return Exchange(InTurn(groups, "O2", self.own.source.payload), super().exchange.plan)

    class InTurnDispatcher(Dispatcher):
        def __init__(self) -> None:
            self.groups = groups

        def describe(self) -> str:
            return f"{options.turns or 2} chunks, one after the other"

        def permute(self, tokens: Any, probs: Any, routing_map: Any, **sizes: Any) -> Any:
            row_map, counts = map_rows(routing_map, groups, **sizes)
            packed, own = permuted(tokens, probs, row_map.cut(options.turns or 2))
            return packed, Rows(own, counts, groups)

    return InTurnDispatcher()


def check(config: Any, options: InTurnOptions, arguments: Any) -> None:
    if config.gated_linear_unit:
        raise ConfigurationError("--swiglu does not wait for its turn: drop it, or use monta")


def parse(variant: str, setting: str, profile: Path | None) -> Mapping[str, Any]:
    if not re.fullmatch("[1-9][0-9]*", setting):
        raise ConfigurationError(f"--dispatchers {variant}: write a number of chunks, such as {NAME}:4")
    return {"turns": int(setting)}


def candidates(layer: LayerOnCluster, options: InTurnOptions) -> Iterator[Prediction]:
    one = layer.workload
    for turns in (2, 4) if options.turns == AUTO else (options.turns or 2,):
        schedules = [
            in_turn(each.schedule("O2", even_chunks(each.exchanged, one.etp, turns), one.ep, one.etp))
            for each in layer.passes
        ]
        yield layer.prediction(f"{NAME}:{turns}", schedules, layer.edge)


IN_TURN = System(
    name=NAME,
    options=InTurnOptions,
    build=build,
    check=check,
    grammar=Grammar(parse, lambda options, levels: str(options.turns or 2)),
    candidates=candidates,
)


def refusals() -> Iterator[str]:
    """Yields the sentences that refuse configurations with the system, and with its options under another one."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_moe_opt
    from megatron_moe_opt.options import Options

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 1, "num_moe_experts": 4}
    for name, options, fields in (
        (NAME, {}, {"gated_linear_unit": True}),
        (NAME, {"turns": 1}, {}),
        ("monta", {"turns": 2}, {}),
        ("alltoall", {"turns": 2}, {}),
        ("auto", {"turns": 2, "profile": "c.json"}, {}),
        (NAME, {"chunks": 2}, {}),
    ):
        try:
            megatron_moe_opt.register(Options(**options), refuse_unread=True)
            TransformerConfig(**sizes, moe_token_dispatcher_type=name, **fields)
            yield f"{name}: not refused"
        except ConfigurationError as error:
            yield f"{name}: {error}"


if __name__ == "__main__":
    SYSTEMS.append(IN_TURN)
    if sys.argv[1:2] == ["train"]:
        print(*refusals(), sep="\n")
        del sys.argv[1]
    if sys.argv[1:]:
        from megatron_moe_opt.cli.main import main

        main()
