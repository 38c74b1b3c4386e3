"""Whether a GPU has room for a trial, with a stand-in for PyTorch's allocator."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron_moe_opt.integration.auto import memory_room
from megatron_moe_opt.integration.auto.memory_room import COMMUNICATOR_BYTES, MOST_OF_FREE, Above, Room


def test_what_is_allocated_is_what_a_step_takes_and_a_reserve():
    room = Room(free=1000, at_work=300, passes=2, layers=1)
    assert room.needed(0, 0) == 0
    assert room.needed(400, 0) == 300 + 400 / MOST_OF_FREE
    assert room.needed(0, 3) == 300 + int(3 * COMMUNICATOR_BYTES / MOST_OF_FREE)
    for above in (399, 400, 401):  # of each of two passes
        assert room.has(Above(above, 0), 0) == (room.needed(2 * above, 0) <= room.at_work + room.free)
    assert room.has(Above(0, 800), 0) and not room.has(Above(0, 801), 0)  # others' experts, whatever the passes
    assert not room.has(Above(0, 0), 1) and Room(0, 0, passes=0, layers=0).has(Above(1, 0), 1)


def test_what_was_free_at_the_peak_is_told_beside_what_stays(monkeypatch):
    answers = {"memory_reserved": 500, "max_memory_allocated": 450, "memory_allocated": 200}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100, 1000))
    assert memory_room.room(3, 2) is None  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory_room.room(3, 2) == Room(free=150, at_work=250, passes=3, layers=2)
    # Where batches grow until eight passes are held, all that three held besides grows with them.
    assert memory_room.room(3, 2, later=8) == Room(free=150 - 416, at_work=666, passes=8, layers=2)
    # The optimizer's step has made 90 that the passes' peak of 400 did not have, and less than 50 would not matter.
    after_passes = memory_room.InUse(most=400, now=110)
    assert memory_room.room(3, 2, after_passes) == Room(free=110, at_work=290, passes=3, layers=2)
    assert memory_room.room(3, 2, after_passes._replace(now=151)) == memory_room.room(3, 2)


@pytest.mark.parametrize(("size", "could"), [(100, True), (101, False)])
def test_what_an_allocator_refuses_could_not_be_taken_and_nothing_of_it_stays(monkeypatch, size, could):
    allocated, left = [], []

    class Block:
        pass

    def allocate(size: int, **_: object) -> Block:
        if size > 100:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        block = Block()
        allocated.append(weakref.ref(block))
        return block

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append([one() for one in allocated]))
    assert memory_room.could_take(size) is could
    assert left == [[None] * could]  # given back, and only then what PyTorch keeps
