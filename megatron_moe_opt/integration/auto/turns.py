"""Whose turn it is in the layers of a shape: the trials, without what not all ranks can run.

A rank that runs out of memory in a turn, or cannot make what a variant communicates with, leaves the others in a
collective, and the job ends. So all ranks are asked before a variant's first turn, between two steps; and its name is
written down for the next start of the job, if this one ends all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_moe_opt.dispatchers.say import say
from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.auto_report import no_room_line, no_start_line
from megatron_moe_opt.integration.auto.first_step import Alike
from megatron_moe_opt.integration.auto.first_turns import FirstTurns
from megatron_moe_opt.integration.auto.layers_in_turn import LayersInTurn
from megatron_moe_opt.integration.auto.memory_room import Room
from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
from megatron_moe_opt.integration.auto.stock_variants import (
    failure_to_start,
    is_stock_variant,
    missing_package,
    release_buffers,
)
from megatron_moe_opt.option_values import AUTO
from megatron_moe_opt.planning.choosing.trials import Trials
from megatron_moe_opt.planning.predicting.prediction import ALLTOALL
from megatron_moe_opt.topology.agreement import known_to_all


class Turns:
    """The trials of what is planned for the layers of one shape; all others run on with what they do."""

    def __init__(
        self,
        layers: LayersInTurn,
        shapes: Sequence[Alike],
        number: int,
        rooms: Sequence[Room],
        first_turns: FirstTurns | None,
    ) -> None:
        """Begins with the planned variant, what was chosen before, stock and the runners-up.

        Args:
            layers: all of this rank.
            shapes: that the layers of all ranks have.
            number: of the shape that is tried.
            rooms: the memory that the GPU of each rank had in the step that was looked at; empty: there are no GPUs.
            first_turns: where rank 0 writes down what runs its first steps; None: elsewhere.
        """
        self.alike = one = shapes[number]
        """What is planned for the layers that are tried."""
        self.trials = Trials(one.predicted, one.planned, len(shapes), one.beside, one.kept)
        self._layers, self._shapes, self._rooms, self._first_turns = layers, shapes, rooms, first_turns
        self._fitting = {one.ran}
        """The variants that all GPUs are known to have room for, beside what has run its first turn so far."""
        self._starting: set[str] = set()
        """The variants of Megatron's own that were found to start on all ranks since the trials began."""

    def go_on(self) -> bool:
        """Has the next step run what the trials say, of what GPUs have room for and ranks can start. A collective call
        over the world.

        Returns:
            Whether there is such a variant; else the trials are over.
        """
        layers = self._layers.of(self.alike)
        while (variant := self.trials.current) is not None:
            self._write_down(variant)
            if self._fits(variant, layers) and self._starts(variant, layers):
                self._run(variant, layers)
                return True
            self.trials.drop()
        self._write_down(None)
        return False

    def _run(self, variant: str, layers: Sequence[PlannedLayer]) -> None:
        self._layers.run(variant, layers, (ALLTOALL, *self.trials.variants))  # stock's: the others are built from it

    def _write_down(self, variant: str | None) -> None:
        """Has rank 0 write down what may begin now, for the next start, if this one ends in it."""
        if self._first_turns is not None:
            is_new = variant is not None and not self.trials.times[variant] and variant != self.alike.ran
            self._first_turns.run(variant if is_new else None)

    def _fits(self, variant: str, layers: Sequence[PlannedLayer]) -> bool:
        """Whether the GPU of each rank has room for what a variant takes in these layers, beside what the others run.

        A collective call over the world, before a variant's first turn, and the next one of each when another has had
        its first.
        """
        if variant in self._fitting or not self._rooms:
            return True
        self._run(self.alike.ran, layers)  # as in the step that room is known of
        above = self._layers.held(
            self._shapes, lambda one, layer: one.above(variant if one is self.alike else layer.current)
        )
        communicators = self.alike.communicators(variant) if layers else 0
        size = self._rooms[dist.get_rank()].needed(above, communicators)
        of_ranks = known_to_all(None if not size or memory_room.could_take(size) else size)
        lacking = [one for one in of_ranks if one is not None]
        if lacking:
            say(AUTO, no_room_line(variant, lacking, len(of_ranks)))
        elif self.trials.times.get(variant):
            self._fitting.add(variant)
        else:  # it will hold more besides when it has run: the others are asked again
            self._fitting = {self.alike.ran, variant}
        return not lacking

    def _starts(self, variant: str, layers: Sequence[PlannedLayer]) -> bool:
        """Whether each rank can make what a variant of Megatron's own communicates with, before its first turn. A
        collective call over the world for these.
        """
        if variant in self._starting or not is_stock_variant(variant):
            return True
        # Where one rank lacks its package, the others would wait for that rank in what all of them make together.
        failure = _first_failure(missing_package(variant) if layers else None)
        if failure is None:
            failure = _first_failure(failure_to_start(variant, [one.layer for one in layers]))
        if failure is not None:
            release_buffers(variant)
            say(AUTO, no_start_line(variant, *failure))
            return False
        self._starting.add(variant)
        return True


def _first_failure(own: str | None) -> tuple[int, str] | None:
    """Returns the first rank on which something has failed, and how; None: on none. A collective call over the world.

    Args:
        own: how it has failed on this rank; None: it has not.
    """
    return next(((rank, failure) for rank, failure in enumerate(known_to_all(own)) if failure is not None), None)
