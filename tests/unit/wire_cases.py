"""Rows and comparisons for the tests of wire formats."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_moe_opt import kernels
from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels import LANE_BYTES, ChunkList, WireFormat, row_map_from_sources
from megatron_moe_opt.runtime.engine import steps
from tests.unit.permute_cases import CPU_KERNELS

CODED = (WireFormat.FP8, WireFormat.MXFP8)
NARROW = (WireFormat.BF16, *CODED)


def filled(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows whose stretches of 32 elements are of one kind each: of any magnitude, tiny, zero, or with NaN and Inf."""
    width = -(-shape[1] // 32) * 32
    values = torch.randn(shape[0], width, generator=generator, dtype=torch.float64)
    kind = torch.randint(0, 10, (shape[0], width // 32), generator=generator).repeat_interleave(32, 1)
    span = 30 if dtype == torch.float16 else 250
    exponent = (torch.rand(kind.shape, generator=generator) - 0.5) * span
    exponent = exponent[:, ::32].repeat_interleave(32, 1) + (torch.rand(kind.shape, generator=generator) - 0.5) * 8
    values = torch.where(kind < 3, values * 2**exponent, values)
    values = torch.where(kind == 3, values * 2.0**-138, values)
    values = torch.where(kind == 4, 0.0 * values, values)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38, -3e38, 65504.0, 1e-45], dtype=torch.float64)
    chosen = special[torch.randint(0, len(special), kind.shape, generator=generator)]
    is_special = (kind == 5) & (torch.rand(kind.shape, generator=generator) < 0.3)
    return torch.where(is_special, chosen, values)[:, : shape[1]].to(dtype).contiguous()


def wire_rows(like: torch.Tensor, wire: WireFormat, fill: int = 0) -> torch.Tensor:
    """Rows for those of `like` in a wire format, with a lane; every byte is `fill`."""
    num_bytes = wire.payload_bytes(like.size(1), like.dtype) + LANE_BYTES
    made = torch.full((like.size(0), num_bytes), fill, dtype=torch.uint8, device=like.device)
    return made.view(wire.dtype_of(like.dtype))


def assert_same_rows(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same values, NaN where there is NaN; of rows in 8 bits, the same bytes."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype == torch.uint8:
        assert torch.equal(actual.cpu(), expected)
    else:
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def each_cpu_kernel() -> Iterator[str]:
    """Each instruction set in use, then the best again."""
    try:
        for name in CPU_KERNELS:
            load_extension().select_cpu_kernels(name)
            yield name
    finally:
        load_extension().select_cpu_kernels("best")


def results_on(
    place: torch.device, rows: torch.Tensor, routing_map: torch.Tensor, wire: WireFormat
) -> dict[str, torch.Tensor]:
    """What every function makes of rows [T, H] on a device."""
    tokens, hidden = rows.to(place), rows.size(1)
    probs = torch.arange(routing_map.numel(), dtype=torch.float32).view(routing_map.shape)
    row_map = kernels.build_row_map(routing_map.to(place))
    packed = kernels.permute_packed(tokens, probs.to(place), row_map, wire)
    made = {"permuted": packed, "probs": kernels.unpermute_probs(packed, row_map, torch.float32)}
    made["narrow"] = wire_rows(tokens, wire, fill=7)
    kernels.narrow_rows(tokens, wire, made["narrow"])
    made["wide"] = torch.zeros_like(tokens)
    kernels.widen_rows(made["narrow"], wire, made["wide"])
    sources = torch.arange(len(rows) // 2).flip(0).to(place) * 2
    made["gathered"] = torch.zeros(len(sources), hidden, dtype=rows.dtype).to(place)
    kernels.gather_rows(made["narrow"], wire, row_map_from_sources(sources, len(rows)), made["gathered"])
    places = torch.arange(len(sources)).to(place) * 3
    made["gathered among others"] = torch.zeros(3 * len(sources), hidden, dtype=rows.dtype).to(place)
    to_places = row_map_from_sources(sources, len(rows)).among(places)
    kernels.gather_rows(made["narrow"], wire, to_places, made["gathered among others"], places)
    third = len(rows) // 3
    chunks = ChunkList.from_counts([third, 0, third, len(rows) - 2 * third], [3, 0, 2, 1], place)
    made["reordered"], made["returned"] = torch.zeros_like(tokens), wire_rows(tokens, wire, fill=3)
    steps.run_now(steps.convert_rows(made["narrow"], wire, made["reordered"], WireFormat.SAME, hidden, chunks))
    steps.run_now(steps.convert_rows(tokens, WireFormat.SAME, made["returned"], wire, hidden, chunks))
    made["sums"] = kernels.sum_packed_rows(packed, hidden, row_map, wire, dtype=rows.dtype)
    made["narrow sums"] = kernels.sum_packed_rows(packed, hidden, row_map, wire, out_wire=wire, dtype=rows.dtype)
    spread = kernels.spread_rows(tokens, row_map)
    made["narrowed sums"] = kernels.sum_packed_rows(spread, hidden, row_map, out_wire=wire, dtype=rows.dtype)
    if wire.block is not None:
        parts = [made["narrow"], made["returned"].clone(), made["narrow"].clone()]
        steps.run_now(steps.sum_parts(parts, parts[1], [(0, hidden, wire)]))
        made["summed parts"] = parts[1]
    return made
