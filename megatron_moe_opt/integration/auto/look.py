"""A step in which a rank's layers are looked at, under what runs first, for a plan to be made by."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from megatron_moe_opt.dispatchers.say import say, say_once
from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.auto_report import no_step_line, unlike_levels_line
from megatron_moe_opt.integration.auto.first_step import FirstStep, refusal
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.auto.sample_saving import SampleRouting, keeps_home, saving_of
from megatron_moe_opt.integration.layer.block_passes import PassesSeen
from megatron_moe_opt.integration.layer.layer_seam import router_of
from megatron_moe_opt.integration.layer.linked_blocks import block_adds_up_otherwise, check_seams
from megatron_moe_opt.integration.layer.overlapped_batches import before_pass
from megatron_moe_opt.integration.layer.transformer_blocks import places_in_blocks
from megatron_moe_opt.integration.micro_batches import after_passes, later_micro_batches, not_after_passes, trains
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.options import Options
from megatron_moe_opt.systems.netmoe import NETMOE
from megatron_moe_opt.topology.agreement import known_to_all

NO_STEP = 100
"""The schedules without a step of an optimizer after which a line says that nothing is planned."""


class Look:
    """What the layers of this rank do in a step, and what it leaves free."""

    def __init__(self, config: Any, options: Options) -> None:
        self.config, self.options = config, options
        self.layers: list[PlannedLayer] = []
        self._routing: list[SampleRouting] = []
        """The routing of each layer where `netmoe` could run; empty under a plan.json, which says whether it does."""
        self._passes = PassesSeen()
        """The passes of the blocks that these layers are in."""
        self._after_passes: memory_room.InUse | None = None
        self._schedules = 0
        """The schedules that have run since, each of a step's micro-batches or some of them."""
        self._has_begun = False
        self._until_begun: list[Any] = []
        after_passes(self._passes_end)

    def at(self, layers: Iterable[PlannedLayer]) -> None:
        """Looks at these layers too."""
        added = tuple(layers)
        for layer in added:
            self.layers.append(layer)
            layer.look()
            self._until_begun.append(before_pass(layer.layer, self._begin))
        if added and self.options.plan is None and refusal(self.config, NETMOE.name) is None:
            self._routing += [SampleRouting(layer.layer) for layer in added]
            self._passes.at(layer.layer for layer in added)

    def again(self) -> None:
        """Begins to look anew: the step that was under way counts for nothing, and the next one does."""
        for layer in self.layers:
            layer.look()

    def taken(self) -> FirstStep:
        """Returns what was seen, and looks no more. A collective call over the world, and the groups of the layers."""
        not_after_passes(self._passes_end)
        for handle in self._until_begun:
            handle.remove()
        if self.options.plan is None:
            self._compare_levels()
        seen = tuple(one for layer in self.layers if (one := layer.seen()) is not None)
        batches = (0, later_micro_batches())
        held, later = (sum(passes_held(layer, self.config, batch) for layer in self.layers) for batch in batches)
        room = memory_room.room(held, len(self.layers), self._after_passes, later)
        return FirstStep((seen,), () if room is None else (room,), *self._samples())

    def _begin(self, module: Any, _: Any) -> None:
        """Counts memory from the first pass of training on: what loaded a checkpoint before may have held more."""
        if not self._has_begun and trains(module):
            self._has_begun = True
            memory_room.count_peak_anew()

    def _passes_end(self) -> None:
        self._after_passes = memory_room.in_use()
        self._schedules += 1
        if self._schedules == NO_STEP:
            say_once(AUTO, "no step", partial(no_step_line, NO_STEP))

    def _compare_levels(self) -> None:
        """Finds out which layers have no levels that hold for all expert-parallel groups of their size, and says so."""
        of_ranks = known_to_all({(layer.groups.ep_size, layer.workers()) for layer in self.layers})
        for size, found in groupby(sorted(set().union(*of_ranks)), itemgetter(0)):
            levels = [workers for _, workers in found]
            if len(levels) > 1:
                say(AUTO, unlike_levels_line(size, levels))
                for layer in self.layers:
                    layer.lies_unlike |= layer.groups.ep_size == size

    def _samples(self) -> tuple[float | None, str | None]:
        """Returns what saving_of and keeps_home say of the routing that was seen; None for both where none was."""
        if not self._routing:
            return None, None
        heard, layer, groups = self._routing, self.layers[0].layer, self.layers[0].groups
        taken, belongs = [one.take() for one in heard], self._passes.take()
        blocks = places_in_blocks(one.layer for one in heard)
        routing = [[taken[place] for place in places] for places in blocks.values()]
        at_home = keeps_home(self.config, heard) or block_adds_up_otherwise([one.layer for one in self.layers])
        if at_home is None and belongs is not None:
            at_home = f"{belongs} would not follow samples that move"
        try:
            check_seams()
            return saving_of(routing, router_of(layer).tp_cp_group, groups), at_home
        except ConfigurationError as error:  # on all ranks of the group
            return None, str(error)


def passes_held(layer: PlannedLayer, config: Any, later: int = 0) -> int:
    """Returns how many passes of a layer a rank holds the activations of at once: as many as it had in the step that
    was looked at, but no more than the pipeline has stages, virtual ones counted.

    Args:
        later: micro-batches of the steps to come, where they are more than that step had.
    """
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    return min(max(layer.passes, later), stages) if layer.passes else 0
