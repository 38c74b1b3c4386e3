"""What a rank does with its rows by itself, in a layer of stock Megatron and in one of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_moe_opt.cli.loads import Rows
from megatron_moe_opt.cli.meter import Meter
from megatron_moe_opt.cli.process_group import parallel_layer
from megatron_moe_opt.planning.cluster import OURS, STOCK, Points

DISPATCHERS = {STOCK: "alltoall", OURS: "monta"}
EXPERTS, TOPK = 8, 2


def local_work(
    rows: Rows, dtype: str, meter: Meter, sizes: Sequence[int], longest: float, device: torch.device
) -> dict[str, Points]:
    """Dispatch and combine, forward and backward, of layers whose experts are all on their rank, on all ranks at once.

    Over bytes of the rows, up to a size that takes over `longest` seconds. A collective call over the world.
    """
    from megatron_moe_opt.cli.layer_settings import LayerSettings
    from megatron_moe_opt.cli.moe_layer import layers_under_test

    points: dict[str, list[tuple[int, float]]] = {whose: [] for whose in DISPATCHERS}
    with parallel_layer(tp=1, ep=1, expert_tp=1, seed=1):
        for size in sizes:
            tokens = rows.number(size, TOPK) // TOPK
            settings = LayerSettings(
                dispatchers=tuple(DISPATCHERS.values()), tokens=tokens, hidden=rows.hidden, ffn_hidden=1,
                experts=EXPERTS, topk=TOPK, tp=1, ep=1, expert_tp=1, dtype=dtype, routing="uniform",
                capacity_factor=None, pad_to_capacity=False, steps=1, warmup=0, seed=1, dispatch_only=True,
            )  # fmt: skip
            layers = layers_under_test(settings, 1, device, permute_fusion=False)
            seconds = meter.calls([layers[name].step for name in DISPATCHERS.values()])
            for whose, took in zip(DISPATCHERS, seconds, strict=True):
                points[whose].append((tokens * TOPK * rows.bytes, took))
            if max(seconds) > longest:
                break
    return {whose: tuple(of) for whose, of in points.items()}
