"""One rank of a training run to which a fault happens: what campaign.py has each process of a Job execute.

rank.py FAULT FOLDER: starts itself through the launcher, and writes into FOLDER what it prints, when it was ready, and
when and where the fault happened.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt import launch
from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement
from megatron_moe_opt.integration.auto.controller import Controller
from megatron_moe_opt.runtime.engine import steps
from megatron_moe_opt.runtime.engine.executor import Executor
from megatron_moe_opt.schedules.schedule import Lane, Schedule
from tests.faults.cases import STEPS, TIMEOUT_S, Fault
from tests.ranks.dispatchers import config_of, flags_of, imitate_two_nodes, layout_of
from tests.ranks.gpt import Gpt, gpt
from tests.ranks.megatron import parallel

FIRST_STEP = 2
"""The first step in which something may happen."""

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OTHER_OPTIONS = {
    ("monta", "dispatch"): {"chunks": 3},
    ("auto", "combine"): {"telemetry": True},
    ("parm", "combine"): {"parm_schedule": "S1"},
    ("mpmoe", "dispatch"): {"partitions": 3},
    ("mpmoe", "combine"): {"memory_reuse": "S1"},
    ("mpmoe", "backward"): {"memory_reuse": "S2"},
    ("mpmoe", "background"): {"memory_reuse": "none", "partitions": 4},
    ("expert-migration", "dispatch"): {"domain_sizes": (1, 2)},
    ("expert-migration", "combine"): {"network_levels": (4,), "domain_sizes": (2,)},
    ("expert-migration", "backward"): {"gradient_compression_ratio": 0.5},
    ("expert-migration", "background"): {"prefetch_layers": 0},
}
"""The options of the rank that disagrees, by dispatcher and place."""
OTHER_CONFIG: dict[tuple[str, str], dict[str, Any]] = {
    ("monta", "backward"): RECOMPUTED,
    ("monta", "background"): {"moe_router_topk": 3},
    ("parm", "backward"): RECOMPUTED,
    ("parm", "background"): {"moe_router_topk": 3},
    ("netmoe", "combine"): {"moe_token_dispatcher_type": "monta"},
    ("netmoe", "backward"): {"moe_token_dispatcher_type": "alltoall"},
    ("netmoe", "background"): {"moe_router_topk": 3},
    ("auto", "dispatch"): {"moe_token_dispatcher_type": "monta"},
    ("auto", "backward"): RECOMPUTED,
    ("auto", "background"): {"moe_token_dispatcher_type": "alltoall"},
}


PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
"""Settings under which all ranks have as many rows, and need not ask."""


class InjectedError(RuntimeError):
    """What a fault raises."""


class Injection:
    """The fault as it happens on its rank."""

    def __init__(self, fault: Fault, model: Gpt, folder: Path) -> None:
        self.fault, self._model, self._folder = fault, model, folder
        self._left, self._layer = fault.after, 0
        for name, module in model.model.module.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_pre_hook(self._enter)

    def _enter(self, layer: torch.nn.Module, _: Any) -> None:
        self._layer = layer.layer_number

    def is_due(self) -> bool:
        """Whether the fault happens now. Asked each time the rank comes to the place."""
        if self._model.step < FIRST_STEP:
            return False
        self._left -= 1
        return self._left == -1

    def strike(self) -> None:
        """Lets the fault happen."""
        self.note()
        if self.fault.kind == "raise":
            raise InjectedError("injected into the layer")
        os.kill(os.getpid(), signal.SIGKILL if self.fault.kind == "kill" else signal.SIGSTOP)

    def note(self) -> None:
        """Writes when, and the layer whose forward pass was last."""
        note(self._folder, "injected", self._layer)

    def before(self, owner: type, method: str) -> None:
        """Lets the fault happen where this method is called."""
        original = getattr(owner, method)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self.is_due():
                self.strike()
            return original(*arguments, **named)

        setattr(owner, method, wrapped)

    def in_lane(self) -> None:
        """Lets the fault happen in the thread in which experts travel, before the first op of a
        schedule that was started.
        """
        original = Executor.start

        def start(executor: Executor, schedule: Schedule, bound: list[steps.Steps], *queue: str) -> Any:
            if self.is_due():
                bound = [steps.call(self.strike) + bound[0], *bound[1:]]
            return original(executor, schedule, bound, *queue)

        Executor.start = start

    def in_schedules(self) -> None:
        """Lets the fault happen where a schedule is run, by the thread that runs it or, in the
        background, in a lane beside it.
        """
        original = Executor.run

        def run(executor: Executor, schedule: Schedule, bound: list[steps.Steps], *others: Any, **named: Any) -> Any:
            op = self._op_in(schedule)
            if op is None or not self.is_due():
                return original(executor, schedule, bound, *others, **named)
            if self.fault.place != "background":
                self.strike()
            bound = list(bound)
            bound[op] = bound[op] + steps.call(self.strike)
            return original(executor, schedule, bound, *others, **named)

        Executor.run = run

    def _op_in(self, schedule: Schedule) -> int | None:
        """Returns the op of a schedule at which it may happen; None: not in this schedule."""
        place, in_backward = self.fault.place, torch._C._current_graph_task_id() != -1
        if place == "backward":
            return 0 if in_backward else None
        if place == "background":  # the caller takes the compute lane or the last op's
            callers = Lane.COMPUTE if Lane.COMPUTE in schedule.lanes else schedule.ops[-1].lane
            beside = [index for index, op in enumerate(schedule.ops) if op.lane is not callers]
            if self.fault.kind == "raise":  # a collective fails by its peers, not by what Python raises
                beside = [index for index in beside if schedule.ops[index].group is None]
            return beside[-1] if beside else None
        names = {"dispatch": ("dispatch", "hop out", "forward"), "combine": ("combine", "hop back", "forward")}[place]
        return 0 if not in_backward and any(name in schedule.name for name in names) else None


def disagree_from_now_on(fault: Fault, model: Gpt, injection: Injection) -> None:
    """Makes the rank disagree in what is no matter of options: fewer samples, other tokens on TP ranks that should
    have the same, another mask.
    """
    stock = model.train_step

    def train_step() -> float:
        if model.step == FIRST_STEP:
            injection.note()
            if fault.dispatcher == "monta":
                model.micro_batch = 1
            elif fault.dispatcher == "parm":
                for name, parameter in model.model.module.named_parameters():
                    if "router" in name:
                        parameter.data.copy_(torch.randn_like(parameter))
            else:
                mask = model.mask.clone()
                mask[..., 0] = True
                model.mask = mask
        return stock()

    model.train_step = train_step


def note(folder: Path, name: str, *words: object) -> None:
    """Writes when something happened, on the clock of all processes."""
    partial = folder / f".{name}"
    partial.write_text(" ".join(map(str, (time.monotonic(), *words))))
    partial.rename(folder / name)


def config_for(fault: Fault, disagrees: bool) -> dict[str, Any]:
    """The configuration of a rank."""
    key = fault.dispatcher, fault.place
    config = config_of(fault.dispatcher) | (OTHER_CONFIG.get(key, {}) if disagrees else {})
    return config | (PADDED if fault.kind == "disagree" and key == ("monta", "combine") else {})


def command_line(fault: Fault, folder: Path, disagrees: bool) -> list[str]:
    """What the launcher gets on a rank, behind the script."""
    dispatcher = config_for(fault, disagrees)["moe_token_dispatcher_type"]
    others = OTHER_OPTIONS.get((fault.dispatcher, fault.place), {}) if disagrees else {}
    return ["train", fault.to_json(), str(folder), *flags_of(dispatcher, folder, **others)]


def masked(model: Gpt) -> None:
    """Gives every batch the causal mask that `model.mask` holds."""
    stock: Callable[[int], dict[str, torch.Tensor]] = model.batch
    tokens = stock(0)["tokens"]
    model.mask = torch.ones(len(tokens), 1, tokens.size(1), tokens.size(1), dtype=torch.bool).triu(1)
    model.batch = lambda microbatch: stock(microbatch) | {"attention_mask": model.mask}


def train(fault: Fault, folder: Path) -> None:
    """Trains until the fault ends it."""
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    is_victim = dist.get_rank() == fault.victim
    disagrees = is_victim and fault.kind == "disagree"
    with parallel(**layout_of(fault.dispatcher), timeout=timeout):
        model = gpt(**config_for(fault, disagrees))
        if fault.dispatcher == "netmoe":
            masked(model)
        if is_victim:
            injection = Injection(fault, model, folder)
            if fault.kind == "disagree":
                if not fault.from_the_start:
                    disagree_from_now_on(fault, model, injection)
            elif fault.place == "background" and fault.dispatcher == "netmoe":
                injection.before(LayerPlacement, "_decide")
            elif fault.place == "background" and fault.dispatcher == "expert-migration":
                injection.in_lane()
            elif fault.place == "background" and fault.dispatcher == "auto":
                injection.before(Controller, "after_step")
            else:
                injection.in_schedules()
        model.train(STEPS)


def main() -> None:
    """Starts the launcher in a process of a Job, and the launcher runs this script again."""
    if sys.argv[1] == "train":
        train(Fault.from_json(sys.argv[2]), Path(sys.argv[3]))
        dist.destroy_process_group()
        return
    fault, folder, rank = Fault.from_json(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])
    imitate_two_nodes()
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)  # where a rank hangs
    words = command_line(fault, folder, disagrees=fault.kind == "disagree" and rank == fault.victim)
    note(folder, f"begins-{rank}")
    launch.main([__file__, *words])


if __name__ == "__main__":
    main()
