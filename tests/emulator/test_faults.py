"""The emulator tells a kernel with a fault from the same kernel without it, whatever order it draws."""

from __future__ import annotations

import ctypes

import pytest

from tests.emulator import plugin

# Fault of tests/emulator/faults.cu -> what is said of it.
FAULTS = {
    "past_the_end": "out of bounds",
    "freed": "out of bounds",
    "unwritten": "which nobody has written",
    "unwritten_shared": "which nobody has written",
    "crooked": "not a multiple of its size",
    "no_barrier": "of shared memory",  # a race, or nothing there yet
    "no_barrier_before_reuse": "a race",
    "blocks_write_one_place": "another block wrote in the same launch: a race",
    "block_reads_what_another_writes": "in the same launch: a race",
    "plain_sum": "a race",
    "missing_lane": "waits for ever for the other lanes of its warp",
    "two_barriers": "waits at the barrier of line",
    "two_collectives": "at the warp collective of line",
    "host_memory": "bytes of host memory",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_any_order(fault):
    said = plugin.switches.emulator_fault
    said.restype, said.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_int]
    for seed in range(20):
        plugin.switches.emulator_seed(ctypes.c_uint64(seed))
        assert said(fault.encode(), 0) == b""
        assert FAULTS[fault] in said(fault.encode(), 1).decode()
