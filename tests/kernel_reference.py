"""Plain-PyTorch references of the kernels, for the tests. Differentiable by autograd; slow on purpose.

They follow the definitions, not the kernels: floating-point sums are taken in the dtype given as `sum_dtype`.
"""

from __future__ import annotations

import torch

from megatron_moe_opt.kernels.chunk_copy import ChunkList
from megatron_moe_opt.kernels.residual_codec import BLOCK_ELEMENTS
from megatron_moe_opt.row_format import WireFormat


def routed_pairs(routing_map: torch.Tensor, capacity: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and expert (both int64 [R]) of each permuted row of a routing map [T, E]."""
    tokens, experts = [], []
    for expert in range(routing_map.size(1)):
        routed = routing_map[:, expert].bool()
        chosen = routed.nonzero().flatten()
        if capacity is not None:
            chosen = torch.cat([chosen, (~routed).nonzero().flatten()])[:capacity]
        tokens.append(chosen)
        experts.append(torch.full_like(chosen, expert))
    if not tokens:
        nothing = torch.empty(0, dtype=torch.int64, device=routing_map.device)
        return nothing, nothing
    return torch.cat(tokens), torch.cat(experts)


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor | None = None, capacity: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Does what `kernels.permute` does; `capacity` (rows of each expert) stands for drop_and_pad."""
    sources, experts = routed_pairs(routing_map, capacity)
    # index_select, whose backward adds in row order; that of indexing adds in any order where it runs on threads.
    return tokens.index_select(0, sources), None if probs is None else probs[sources, experts], sources


def unpermute(
    permuted: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    capacity: int | None = None,
    sum_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Does what `kernels.unpermute` does, for the routing map (and capacity) that the rows were permuted with."""
    sources, experts = routed_pairs(routing_map, capacity)
    rows = permuted.to(sum_dtype)
    if probs is not None:
        rows = rows * probs.to(sum_dtype)[sources, experts].unsqueeze(-1)
    total = torch.zeros(routing_map.size(0), permuted.size(1), dtype=sum_dtype, device=permuted.device)
    return total.index_add(0, sources, rows).to(permuted.dtype)


def pack(tokens: torch.Tensor, probs: torch.Tensor, lane_bytes: int) -> torch.Tensor:
    """tokens [R, H] and probs [R] as packed rows; not differentiable."""
    lanes = torch.zeros(tokens.size(0), lane_bytes, dtype=torch.uint8)
    lanes[:, : probs.element_size()] = probs.detach().unsqueeze(-1).view(torch.uint8)
    return torch.cat([tokens.detach(), lanes.view(tokens.dtype)], dim=1)


def copy_chunks(rows: torch.Tensor, chunks: ChunkList) -> torch.Tensor:
    """Returns the rows with every chunk at its target, as `kernels.copy_chunks` does, in a loop."""
    out = torch.empty_like(rows)
    lists = (chunks.source_rows.tolist(), chunks.target_rows.tolist(), chunks.row_counts.tolist())
    for source, target, count in zip(*lists, strict=True):
        out[target : target + count] = rows[source : source + count]
    return out


def narrow(rows: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Returns rows [R, H] in a wire format, without lanes, as `kernels.narrow_rows` writes them."""
    if wire.block is None:
        return rows.to(wire.dtype_of(rows.dtype))
    hidden, blocks = rows.size(1), -(-rows.size(1) // wire.block)
    values = torch.nn.functional.pad(rows.float(), (0, blocks * wire.block - hidden)).view(-1, blocks, wire.block)
    finite = values.isfinite()
    largest = torch.where(finite, values.abs(), 0).amax(2)
    if wire is WireFormat.FP8:
        scales = torch.maximum(largest / torch.full_like(largest, 448), torch.tensor(2.0**-126))
        inverse = 1 / scales
    else:
        exponents = (((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(0, 246)
        inverse = ((254 - exponents) << 23).view(torch.float32)
        scales = exponents.to(torch.uint8)
    scaled = (values * inverse.unsqueeze(2)).clamp(-448, 448)
    codes = torch.where(finite, scaled.to(torch.float8_e4m3fn).view(torch.uint8), 0x7F)
    payload = torch.zeros(rows.size(0), wire.payload_bytes(hidden, rows.dtype), dtype=torch.uint8, device=rows.device)
    payload[:, :hidden] = codes.view(rows.size(0), blocks * wire.block)[:, :hidden]
    first = wire.first_scale(hidden)
    size = blocks * wire.scale_bytes
    payload[:, first : first + size] = scales.flatten().view(torch.uint8).view(rows.size(0), size)
    return payload


def widen(payload: torch.Tensor, wire: WireFormat, hidden: int) -> torch.Tensor:
    """Returns float32 [R, H]: what rows in a wire format, whatever is behind them, stand for."""
    if wire.block is None:
        return payload[:, :hidden].float()
    blocks, first = -(-hidden // wire.block), wire.first_scale(hidden)
    scales = payload[:, first : first + blocks * wire.scale_bytes].contiguous()
    if wire is WireFormat.FP8:
        scales = scales.view(torch.float32)
    else:  # 2^-127, of the byte 0, is below the normal numbers
        scales = torch.where(scales == 0, 0x400000, scales.int() << 23).view(torch.float32)
    codes = payload[:, :hidden].view(torch.float8_e4m3fn).float()
    return codes * scales.repeat_interleave(wire.block, 1)[:, :hidden]


def sum_rows(rows: torch.Tensor, sources: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Returns float32 [T, H]: the sums of float32 rows [R, H] of each token, in row order."""
    return torch.zeros(num_tokens, rows.size(1)).index_add(0, sources, rows)


def sr_encode(expert: torch.Tensor, shared: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values and indices of the k largest residuals, as `kernels.sr_encode` does, by a sort."""
    expert, shared = expert.flatten(), shared.flatten()
    residual = expert.float() - shared.float()
    order = residual.abs().sort(descending=True, stable=True).indices  # NaN first; equals keep their order
    kept = order[:k].sort().values
    blocks = -(-residual.numel() // BLOCK_ELEMENTS)
    ends = torch.bincount(kept // BLOCK_ELEMENTS, minlength=blocks).cumsum(0)
    words = [torch.stack([ends % 65536, ends // 65536], dim=1).flatten(), kept % BLOCK_ELEMENTS]
    expert, shared, values = expert[kept], shared[kept], residual[kept].to(expert.dtype)
    overflows = ~(shared.float() + values.float()).to(expert.dtype).isfinite()
    toward_zero = (values.view(_BITS[values.element_size()]) - 1).view(values.dtype)
    whole = torch.where(values.isfinite() & shared.isfinite(), toward_zero, -expert)
    values = torch.where(overflows, whole, values)
    return torch.where(expert.isfinite(), values, expert), torch.cat(words).to(torch.uint16)


_BITS = {2: torch.int16, 4: torch.int32}


def sr_entries(indices: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the elements (int64 [k]) that indices of the residual codec name."""
    blocks = -(-numel // BLOCK_ELEMENTS)
    words = indices.to(torch.int64)
    ends = (words[: 2 * blocks].view(-1, 2) * torch.tensor([1, 65536], device=indices.device)).sum(1)
    first = torch.arange(blocks, device=indices.device) * BLOCK_ELEMENTS
    return first.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))) + words[2 * blocks :]


def sr_decode(values: torch.Tensor, indices: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Returns the expert that values and indices stand for, as `kernels.sr_decode` does."""
    expert = shared.flatten().clone()
    kept = sr_entries(indices, shared.numel())
    total = (expert[kept].float() + values.float()).to(shared.dtype)
    expert[kept] = torch.where(total.isfinite(), total, torch.where(values.isfinite(), -values, values))
    return expert.view_as(shared)


def count_routing_map(routing_map: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Returns int64 [samples, experts]: a sample's tokens of each expert, as `kernels.count_routing_map` does."""
    return (routing_map.view(torch.uint8) != 0).view(-1, num_samples, routing_map.size(1)).sum(0)


def kuhn_munkres(cost: torch.Tensor, capacity: torch.Tensor) -> torch.Tensor:
    """Solves what `kernels.solve_placement` solves by the NetMoE paper's own method: every sink is copied capacity[n]
    times, and samples are matched with copies one after another, along the shortest augmenting path. O(I^2
    sum(capacity)).

    Args:
        cost: [I, N], int64 or float64. capacity: int64 [N], together at least I.

    Returns:
        int64 [I], the sink of each sample; where several placements cost the least, any of them.
    """
    sink_of_copy = torch.repeat_interleave(torch.arange(capacity.numel()), capacity)
    expanded = cost[:, sink_of_copy].double()  # exact for integers below 2^53
    copies = sink_of_copy.numel()
    sample_at = torch.full((copies,), -1)
    sample_price, copy_price = torch.zeros(len(cost)).double(), torch.zeros(copies).double()
    for new in range(len(cost)):
        # Dijkstra's algorithm over copies; slack: the reduced cost to reach a copy from the samples reached so far.
        slack = torch.full((copies,), torch.inf).double()
        previous = torch.full((copies,), -1)
        reached = torch.zeros(copies, dtype=torch.bool)
        sample, distance, copy = new, 0.0, -1
        while sample >= 0:
            through = distance + expanded[sample] - sample_price[sample] - copy_price
            better = (through < slack) & ~reached
            slack[better], previous[better] = through[better], copy
            copy = int(slack.masked_fill(reached, torch.inf).argmin())
            distance, reached[copy], sample = float(slack[copy]), True, int(sample_at[copy])
        sample_price[new] += distance
        matched = reached & (sample_at >= 0)
        sample_price[sample_at[matched]] += distance - slack[matched]
        copy_price[reached] -= distance - slack[reached]
        while copy >= 0:
            before = int(previous[copy])
            sample_at[copy] = new if before < 0 else sample_at[before]
            copy = before
    placed = torch.full((len(cost),), -1)
    placed[sample_at[sample_at >= 0]] = sink_of_copy[sample_at >= 0]
    return placed
