"""A pipeline of partitions through the experts and back, in either direction: which op of which comes when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_moe_opt.schedules.groups import TP
from megatron_moe_opt.schedules.memory_reuse import Strategy
from megatron_moe_opt.schedules.partition_rows import Move, Moved
from megatron_moe_opt.schedules.pipeline import Pipeline, Stage, Stages, own_buffer
from megatron_moe_opt.schedules.schedule import Kind, Lane, Measure

Part = Callable[[int], None]
"""A function that adds the ops of the partition with this number."""
_AT_EXPERTS = frozenset({"tokens", "output", "grad_output", "grad_tokens"})
"""The buffers of a partition that experts read and write, whatever chunks it goes in."""


class PartitionPipeline(Pipeline):
    """A pipeline of partitions, which may share buffers."""

    def __init__(self, strategy: Strategy, count: int, way: Stages, inputs: Sequence[str]) -> None:
        super().__init__(inputs, self._name)
        self._strategy, self._count, self._given = strategy, count, frozenset(inputs)
        self._way, self._ahead = way, 1 if strategy.reuses else way.ahead
        self._on_the_way: dict[tuple[int, Move], tuple[str, Sequence[Stage]]] = {}
        """Where the rows of a partition are that have been sent, but not sorted, and what remains until they are."""
        self._at_source: dict[int, tuple[str, Sequence[Stage], Sequence[Stage], Mapping[str, str]]] = {}
        """Where the rows of a partition are that are back, and what remains to be done with them: sums, and what a TP
        group does with these; by what names.
        """

    def alternate(
        self, send: Part, sort: Part, compute: Part, back: Part, shared: tuple[Kind, str] | None = None
    ) -> None:
        """Has all partitions through the experts; each function adds its ops for one.

        `shared` are the kind of the shared experts' ops, and what they take, where they run beside.

        In ascending order, in the backward pass too: Transformer Engine overwrites a weight's gradient in the backward
        pass of what its module ran first, and adds to it in the others.
        """
        last = self._count - 1
        halfway = "shared_middle.0"
        if shared is not None:
            self.add(shared[0], Lane.COMPUTE, 0, _shared_tokens, [shared[1]], [halfway])
        for j in range(min(self._ahead, last + 1)):
            send(j)
            self._pass_on(j)
        sort(0)
        for j in range(last + 1):
            if j + self._ahead <= last:
                send(j + self._ahead)
                if self._ahead == 1:
                    self._pass_on(j + 1)
            compute(j)
            if j < last:
                sort(j + 1)
            self._sum_up(j - 1)
            back(j)
            self._pass_on(j + self._ahead)
            self._share(j - 1)
        if shared is not None:
            self.add(shared[0], Lane.COMPUTE, 0, _shared_tokens, [halfway], ["shared_result.0"])
        self._sum_up(last)
        self._share(last)

    def send(self, j: int, move: Move) -> None:
        """Sends a partition's rows over the first links to their experts. Without a group of
        several ranks they stay.
        """
        *moves, _ = stages = self._stages(move)
        names = move.names(stages, self._way.lies_in)
        first = next((number + 1 for number, stage in enumerate(moves) if stage.group is not None), 0)
        arrived = self._through(j, own_buffer(move.source, j), moves[:first], names)
        self._on_the_way[j, move] = arrived, moves[first:]

    def _pass_on(self, j: int) -> None:
        """Sends on, over all other links, what was sent of a partition."""
        for (number, move), (arrived, moves) in self._on_the_way.items():
            if number == j and moves:
                names = move.names(moves, self._way.lies_in)
                self._on_the_way[j, move] = self._through(j, arrived, moves, names), ()

    def sort(self, j: int, move: Move) -> None:
        """Adds the op that sorts a partition's rows by expert, once they have arrived."""
        *_, sort = stages = self._stages(move)
        arrived, _ = self._on_the_way.pop((j, move))
        self._through(j, arrived, [sort], move.names(stages, self._way.lies_in))

    def back(self, j: int, move: Move, target: str) -> None:
        """Sends a partition's rows back to their sources: move.source -> target. What is done there comes after what
        other partitions need first.
        """
        stages = self._stages(move)
        own = own_buffer(move.prefix + "own", j)  # in the memory of the target, of which every partition has its own
        names = {**move.names(stages, self._way.lies_in), "own": own, stages[-1].writes: target}
        moves = stages[:-1] if stages[-1].group == TP else stages
        share = stages[len(moves) :]
        sums = moves[-1:] if len(moves) > 1 and moves[-1].kind is Kind.PERMUTE else []
        moves = moves[: len(moves) - len(sums)]
        self._at_source[j] = self._through(j, move.source, moves, names), sums, share, names

    def _sum_up(self, j: int) -> None:
        """Adds what a rank does with the rows of a partition that are back: it sums those of a token."""
        if j in self._at_source:
            back, sums, share, names = self._at_source[j]
            self._at_source[j] = self._through(j, back, sums, names), [], share, names

    def _share(self, j: int) -> None:
        """Adds what the ranks of a TP group that have shared out a partition do with its sums: they gather them."""
        if j in self._at_source:
            back, _, share, names = self._at_source.pop(j)
            self._through(j, back, share, names)

    def _through(self, j: int, source: str, stages: Sequence[Stage], names: Mapping[str, str]) -> str:
        """Appends stages for each chunk of a partition, one after another, and returns what the last stage writes."""
        written = source
        for chunk in range(self._way.chunks):
            of_chunk = {name: self._of_chunk(buffer, chunk) for name, buffer in names.items()}
            written = self.through(j, self._of_chunk(source, chunk), stages, of_chunk, chunk)
        return written.partition("/")[0]

    def _of_chunk(self, buffer: str, chunk: int) -> str:
        """Returns what a chunk's part of a partition's buffer is called, so that it waits for no other chunk's; the
        whole buffer, where that is given or the experts'. Where partitions share it, a chunk's rows may lie where
        another chunk's were: there it is one for all.
        """
        is_whole = "." in buffer or buffer in _AT_EXPERTS
        return buffer if is_whole or self._way.chunks == 1 or self._strategy.reuses else f"{buffer}/{chunk}"

    def _stages(self, move: Move) -> list[Stage]:
        """Returns the stages of the way in a move's direction, which measure rows of a partition as it has them."""

        def measured(stage: Stage) -> Measure:
            return lambda moved: -(-stage.size(moved.bytes(move)) // self._way.chunks)

        stages = self._way.out() if move.is_out else self._way.back()
        return [replace(stage, size=measured(stage)) for stage in stages]

    def _name(self, name: str, j: int) -> str:
        if "." in name:
            return name
        if not self._strategy.reuses:
            whole, slash, chunk = name.partition("/")
            return own_buffer(whole, j) + slash + chunk
        if name == "middle":
            return f"{name}.{j % self._strategy.middle_buffers}"
        # What comes from the host has no buffer to arrive in: it has a second one to be fetched into, beside gradients.
        fetched = name == "tokens" and f"host_tokens.{j}" in self._given
        return f"{name}.{j % 2 if fetched else 0}"


def _shared_tokens(moved: Moved) -> int:
    return moved.shared
