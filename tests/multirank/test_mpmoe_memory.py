"""tools/bench/memory_reuse.py: memory reuse saves what MPMoE's eq. 6 says, measured."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatron_moe_opt.schedules.memory_reuse import STRATEGIES
from tests.ranks.devices import on_gpus, rank_device
from tools.papers.formulas.mpmoe import LayerElements

TOKENS, HIDDEN, FFN, PARTITIONS = 2048, 64, 256, 4


def measured(partitions: int) -> list[Any]:
    from tests.ranks.megatron import parallel
    from tools.bench.memory_reuse import STATES, MemoryRow, Shape, _settings, measure

    world, use, rows = dist.get_world_size(), {}, []
    predicted = LayerElements(TOKENS, HIDDEN, FFN, world).saving_ratio(partitions)
    with parallel(ep=world):
        for strategy in STRATEGIES:
            settings = _settings(Shape(HIDDEN, FFN), TOKENS, world, "fp32", f"mpmoe:{partitions}:{strategy}")
            use[strategy], parameters = measure(settings, rank_device())
            states = STATES * parameters
            rows.append(
                MemoryRow("a shape", TOKENS, partitions, strategy, states, use["none"], use[strategy], predicted)
            )
    return rows


def test_saves_what_the_paper_says(ranks):
    results = ranks.run(measured, partitions=PARTITIONS)
    assert all(result == results[0] for result in results)
    rows = {row.strategy: row for row in results[0]}
    row_bytes = TOKENS * HIDDEN * 4
    another = FFN // HIDDEN * row_bytes / PARTITIONS  # T_M of a partition, which eq. 5 has once
    weight = HIDDEN * FFN * 4  # what gradients of weights take before they are summed: two at a time, with 2.6 three
    unsummed = (3 if torch.__version__.startswith("2.6.") else 2) * weight
    block = 512 if on_gpus() else 0  # bytes to which a GPU's allocator rounds
    for strategy in ("S1", "S2", "S3", "S4"):
        row = rows[strategy]
        less = another / (row.model_states + row.without.peak) if strategy in ("S1", "S2") else 0
        assert row.saved >= 0.95 * row.predicted - less, row
        assert row.use.held < 0.25 * row.without.held  # the output, and under S2 and S4 the packed rows
    for offloads, recomputes in ("S1", "S3"), ("S2", "S4"):
        assert another - block <= rows[offloads].use.peak - rows[recomputes].use.peak <= another + unsummed
    most = 2 if on_gpus() else 1.1  # the fullest rank has a little more; pinned memory is rounded up to powers of two
    # T_DI, and T_M: the activation function's input.
    for strategy, copies in ("none", 0), ("S1", 1 + FFN // HIDDEN), ("S2", FFN // HIDDEN), ("S3", 1), ("S4", 0):
        host = rows[strategy].use.host
        assert copies * row_bytes <= host <= most * copies * row_bytes, strategy


def held_of_inputs() -> list[int]:
    """Returns the bytes that a pass holds with the experts' first matrices trained, and frozen."""
    from megatron_moe_opt.integration.measuring.under_test import layer_under_test
    from tests.ranks.megatron import parallel
    from tools.bench.memory_reuse import Shape, _of_one_step, _settings

    world, device, held = dist.get_world_size(), rank_device(), []
    with parallel(ep=world):
        settings = _settings(Shape(HIDDEN, FFN), TOKENS, world, "fp32", f"mpmoe:{PARTITIONS}")
        layer = layer_under_test(settings, settings.dispatchers[-1], device)
        for is_trained in (True, False):
            for name, parameter in layer.layer.experts.named_parameters():
                parameter.requires_grad_(is_trained or "linear_fc1" not in name)
            held.append(_of_one_step(layer, device).held)
    return held


def test_inputs_that_experts_do_not_save_are_freed(ranks):
    """As of frozen matrices, or of FP8's, which have saved them in fewer bytes."""
    found = ranks.run(held_of_inputs)
    assert sum(trained - frozen for trained, frozen in found) >= 0.99 * len(found) * TOKENS * HIDDEN * 4


def held_by_hops() -> list[int]:
    from tests.ranks.megatron import parallel
    from tools.bench.memory_reuse import Shape, _settings, measure

    world = dist.get_world_size()
    with parallel(ep=world):
        return [
            measure(_settings(Shape(HIDDEN, FFN), TOKENS, world, "fp32", variant), rank_device())[0].held
            for variant in ("mpmoe:1:hops", "mpmoe:8:hops")
        ]


def test_unequal_partitions_hold_no_more_than_their_own_rows(ranks):
    """All take a buffer of their own, of which backward needs the experts' inputs; the largest has 1.2 of the mean."""
    for whole, in_partitions in ranks.run(held_by_hops):
        assert in_partitions <= whole


def test_table():
    from tools.bench.memory_reuse import MemoryRow, MemoryUse, _table

    row = MemoryRow("MoE-GPT-S", 4096, 4, "S3", 100, MemoryUse(200, 300, 0), MemoryUse(20, 100, 50), 0.4)
    assert row.saved == 0.5
    console = Console(file=io.StringIO(), width=200)
    console.print(_table([row], "fp32", torch.device("cpu")))
    assert "50.0%" in console.file.getvalue() and "1.25" in console.file.getvalue()
