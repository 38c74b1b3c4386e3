"""What compositions gain, or would gain: the tables of the docs are what the tool prints."""

from __future__ import annotations

from pathlib import Path

from megatron_moe_opt.planning.predicting.simulator import simulate
from megatron_moe_opt.schedules.memory_reuse import NONE
from megatron_moe_opt.schedules.mpmoe import by_rows, forward
from megatron_moe_opt.schedules.partition_rows import PartitionRows, RowBytes
from megatron_moe_opt.schedules.schedule import COLLECTIVES, OF_EXPERTS, Kind
from tools.predictions.compositions import tables

PAGE = Path(__file__).parents[4] / "docs" / "compositions.md"


def test_the_tables_of_the_docs_are_what_comes_out():
    assert tables() in PAGE.read_text()


def test_one_partition_worked_out_by_hand():
    """Each way two collectives of 1 s, experts of 2 s between; halves overlap. Shared experts take 1 s at both ends."""
    layer = NONE, [PartitionRows(8, 16)], RowBytes(1, 1), by_rows(2, 2)
    schedule = forward(*layer)

    def seconds(schedule, chunks=1):
        of_kind = dict.fromkeys(COLLECTIVES, 1 / chunks) | dict.fromkeys(OF_EXPERTS, 2.0) | {Kind.SHARED: 1.0}
        return simulate(schedule, lambda op: of_kind.get(op.kind, 0.0)).seconds

    in_chunks = forward(*layer[:3], by_rows(2, 2, chunks=2))
    assert (seconds(schedule), seconds(in_chunks, 2)) == (6, 5)
    assert seconds(forward(*layer, shared=1)) == 6
