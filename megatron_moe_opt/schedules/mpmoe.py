"""MPMoE's schedules: dispatch, experts and combine of n partitions of the rows as one pipeline, and its mirror.

    lane inter     S0 | S1 | R0 | S2 | R1 | R2          S: all-to-all to the experts, R: all-to-all back
    lane compute        C0   | C1   | C2                C: the experts

(MPMoE, Fig. 4b.) S and R alternate. Expert-TP's all-gather follows S and its reduce-scatter precedes R, in the lane
intra. Rows that have arrived are sorted by expert in the lane copy; outputs are sorted back in the lane intra, where
they need not wait for the next partition's sort. The backward pass has the same shape: R' brings the gradients of
outputs, C' computes, S' returns the gradients of inputs.

Without memory reuse every partition has buffers of its own. With it all partitions share them (Fig. 6): expert inputs
T_DI and outputs T_DO have two each, one to communicate and one to compute with; what the experts save for backward,
T_M, has one or, where it is offloaded, two, one to compute with and one to copy (Strategy.middle_buffers). So rows that
arrive are sorted when the partition before them has been computed. Backward then gets back what was overwritten, T_DI
and T_M each in one of two ways (Table II):

    S1   offload, offload             S3   offload, recompute
    S2   communicate again, offload   S4   communicate again, recompute

Offloading has lanes of its own, d2h in the forward and h2d in the backward pass (Fig. 7). The paper activates in place,
and its T_M is the output of an expert's first matrix product: that is what is offloaded, and what Megatron's experts
save besides is computed again from it.

In chunks, a partition goes as MoNTA's rows do: one chunk of it is inside nodes while the next one is between them, and
the experts take all of them at once.

What lies between a rank's rows and its experts are the stages of a way (`by_rows`; `jointly`, in one all-to-all to all
shards of an expert; or hops.py's: then a partition is a part of the tokens, each of which crosses a link once). Where
that is more than one all-to-all, two partitions are on their way before the experts have had one, if memory is not
shared. On the way back a partition then passes what lies behind the first links while the next but one is on these,
and the next but one does while that returns on these: the first links need not wait for the others, nor the experts
for either.

Nothing is beside the first partition's way to the experts and the last one's way back. Where partitions are parts of
the tokens, those at both ends are smaller therefore (`token_shares`).

Shared experts, which all tokens go through where they are, do half of their work while the first partition is on its
way, before its experts, and half while the last one is on its way back, behind those of that.

Buffers of partition j are NAME.j, or NAME.SLOT where partitions share them; a chunk's part of one is NAME.j/CHUNK. Of
gradients they are called grad_NAME.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from megatron_moe_opt.schedules.memory_reuse import STRATEGIES, Restore
from megatron_moe_opt.schedules.monta import AllToAllAndGather
from megatron_moe_opt.schedules.parm import JointAllToAll
from megatron_moe_opt.schedules.partition_pipeline import PartitionPipeline
from megatron_moe_opt.schedules.partition_rows import (
    INPUT_GRADIENTS,
    INPUTS,
    OUTPUT_GRADIENTS,
    OUTPUTS,
    Moved,
    Partition,
    RowBytes,
)
from megatron_moe_opt.schedules.pipeline import Stages
from megatron_moe_opt.schedules.schedule import Kind, Lane, Measure, Outline, Schedule

PARTITIONS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The numbers of partitions to choose from: the paper's 2 to 8, and not to cut at all."""
ROWS, HOPS, JOINT, SHARED_ROWS = "rows", "hops", "joint", "shared-rows"
"""The ways: a row for each expert of a token; a token once over every link; a row at once for each shard of each of its
experts; or rows for each expert of tokens that all ranks of a TP group hold, which they share out (Parm's S2).
"""
_AT_THE_ENDS = (2, 3)
"""The shares of the tokens that the first partitions have, and the last ones mirrored, where others have 4."""
SHARED_TOKENS, SHARED_OUTPUT_GRADIENTS = "shared_tokens.0", "grad_shared_output.0"
"""What shared experts take in either direction: of all tokens of a rank, whatever the partition."""


def token_shares(count: int, strategy: str) -> list[int]:
    """Returns the shares of a rank's tokens that so many partitions have, where partitions are parts of the tokens.

    The experts wait for the first partition and the links for the last one, so that these are half as large as those
    in the middle: by simulation 0.94 to 1.01 times the time of equal ones. Up to three have no middle. Where memory is
    shared all are equal: the largest one says how much is allocated.
    """
    shares = [4] * count
    if count > len(_AT_THE_ENDS) + 1 and not STRATEGIES[strategy].reuses:
        shares[: len(_AT_THE_ENDS)] = _AT_THE_ENDS
        shares[-len(_AT_THE_ENDS) :] = reversed(_AT_THE_ENDS)
    return shares


def by_rows(ep_size: int, etp_size: int, tp_size: int = 1, chunks: int = 1) -> AllToAllAndGather:
    """Returns the stages of a row for every expert of a token: MPMoE's own. With a TP group of several ranks these have
    shared out their rows. A partition goes in so many chunks, as MoNTA's rows do.
    """
    return AllToAllAndGather(ep_size, etp_size, Lane.COPY, Lane.INTRA, tp_size, chunks)


def jointly(etp_size: int) -> JointAllToAll:
    """Returns the stages of one all-to-all to all shards of the experts: Parm's. What is sorted and summed on the way
    back does not hold up the next partition's.
    """
    return JointAllToAll(etp_size, unsort=Lane.INTRA, sums=Lane.COPY)


def forward(
    strategy: str, partitions: Sequence[Partition], row: RowBytes, way: Stages, shared: int | None = None
) -> Schedule:
    """Returns the schedule of rows through the experts and back: rows.j -> combined.j.

    Besides, `tokens.j` and `middle.j` stay behind without reuse, and what is offloaded ends in `host_tokens.j` and
    `host_middle.j`. The size of a compute op is that of its inputs, T_DI.

    Args:
        shared: bytes of the tokens that shared experts take beside the rows; None: there are none, or they run before.
    """
    outline = forward_outline(strategy, len(partitions), way, shared is not None)
    return outline.sized(_moved(partitions, row, shared or 0))


def backward(
    strategy: str, partitions: Sequence[Partition], row: RowBytes, way: Stages, shared: int | None = None
) -> Schedule:
    """Returns the schedule of gradients of the rows' outputs to the experts, and of those of their inputs back:
    grad_combined.j -> grad_rows.j.

    Rows that were kept to be communicated again have been read by then: grad_rows.j may be in their memory. A gradient
    op, like the compute op that it mirrors, has the size of T_DI. Partitions are in the same order as in the forward
    pass, which is the order in which weight gradients are added. `shared` as in `forward`.
    """
    outline = backward_outline(strategy, len(partitions), way, shared is not None)
    return outline.sized(_moved(partitions, row, shared or 0))


def _moved(partitions: Sequence[Partition], row: RowBytes, shared: int) -> list[Moved]:
    """Returns what moves of partitions, of which some may be the same object."""
    known = {id(rows): Moved(rows, row, shared) for rows in partitions}
    return [known[id(rows)] for rows in partitions]


def _inputs(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.token


def _middle(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.middle


def _activations(moved: Moved) -> int:
    return moved.rows.gathered * moved.row.activations


@cache
def forward_outline(strategy: str, count: int, way: Stages, with_shared: bool = False) -> Outline:
    """Returns what `forward` does with so many partitions, whatever moves."""
    how = STRATEGIES[strategy]
    inputs = [f"rows.{j}" for j in range(count)]
    pipeline = PartitionPipeline(how, count, way, [*inputs, *([SHARED_TOKENS] if with_shared else [])])

    def compute(j: int) -> None:
        if how.inputs is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, _inputs, ["tokens"], [f"host_tokens.{j}"])
        written = ["output"] if how.middle is Restore.RECOMPUTE else ["output", "middle"]
        pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, _inputs, ["tokens"], written)
        if how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.OFFLOAD, Lane.D2H, j, _middle, ["middle"], [f"host_middle.{j}"])

    pipeline.alternate(
        lambda j: pipeline.send(j, INPUTS),
        lambda j: pipeline.sort(j, INPUTS),
        compute,
        lambda j: pipeline.back(j, OUTPUTS, f"combined.{j}"),
        (Kind.SHARED, SHARED_TOKENS) if with_shared else None,
    )
    return pipeline.outline(_name("forward", strategy, count))


@cache
def backward_outline(strategy: str, count: int, way: Stages, with_shared: bool = False) -> Outline:
    """Returns what `backward` does with so many partitions, whatever moves."""
    how = STRATEGIES[strategy]
    inputs = [f"grad_combined.{j}" for j in range(count)] + ([SHARED_OUTPUT_GRADIENTS] if with_shared else [])
    for name, restore in (("tokens", how.inputs), ("middle", how.middle)):
        stays = {Restore.KEEP: name, Restore.OFFLOAD: f"host_{name}", Restore.COMMUNICATE: "rows"}.get(restore)
        inputs += [f"{stays}.{j}" for j in range(count) if stays is not None]
    pipeline = PartitionPipeline(how, count, way, inputs)

    def prefetch(j: int, name: str, restore: Restore, size: Measure) -> None:
        if restore is Restore.OFFLOAD:
            pipeline.add(Kind.PREFETCH, Lane.H2D, j, size, [f"host_{name}.{j}"], [name])

    def send(j: int) -> None:
        prefetch(j, "tokens", how.inputs, _inputs)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.send(j, INPUTS)
        pipeline.send(j, OUTPUT_GRADIENTS)

    def sort(j: int) -> None:
        prefetch(j, "middle", how.middle, _middle)
        if how.inputs is Restore.COMMUNICATE:
            pipeline.sort(j, INPUTS)
        pipeline.sort(j, OUTPUT_GRADIENTS)

    def compute(j: int) -> None:
        saved = ["tokens", "middle"]
        if how.middle is Restore.RECOMPUTE:
            pipeline.add(Kind.COMPUTE, Lane.COMPUTE, j, _inputs, ["tokens"], ["middle"])
        elif how.middle is Restore.OFFLOAD:
            pipeline.add(Kind.ACTIVATE, Lane.COMPUTE, j, _activations, saved, ["activations"])
            saved = [*saved, "activations"]
        pipeline.add(Kind.GRADIENT, Lane.COMPUTE, j, _inputs, [*saved, "grad_output"], ["grad_tokens"])

    pipeline.alternate(
        send,
        sort,
        compute,
        lambda j: pipeline.back(j, INPUT_GRADIENTS, f"grad_rows.{j}"),
        (Kind.SHARED_GRADIENT, SHARED_OUTPUT_GRADIENTS) if with_shared else None,
    )
    return pipeline.outline(_name("backward", strategy, count))


def _name(direction: str, strategy: str, count: int) -> str:
    return f"mpmoe {strategy} {direction}, {count} partition(s)"
