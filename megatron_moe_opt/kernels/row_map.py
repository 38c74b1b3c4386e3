"""Which permuted rows belong to which token: built once from a routing map, used by every permutation of a layer.

Shapes: T tokens, E experts, R permuted rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_moe_opt.extension import load_extension
from megatron_moe_opt.kernels.streams import has_streams

_C = load_extension()


@dataclass(frozen=True)
class RowMap:
    """The permuted rows of each token, as compressed sparse rows over tokens.

    Rows are grouped by expert and, inside an expert, in token order (Megatron-Core's order); `cut` groups them by chunk
    first. A row's entry index `i` below runs over the rows of token 0, then token 1, and so on.
    """

    num_tokens: int
    num_experts: int
    num_rows: int
    offsets: torch.Tensor  # int64 [T + 1]: token t owns the entries offsets[t] .. offsets[t + 1]
    rows: torch.Tensor  # int64 [R]: permuted row of entry i; the entries of a token are in expert order
    experts: torch.Tensor | None  # int32 [R]: expert of entry i; None in maps that know no experts
    sources: torch.Tensor | None  # int64 [R]: token of each permuted row (Megatron-Core's sorted_indices); not if cut
    expert_counts: torch.Tensor | None  # int64 [E]: rows of each expert
    num_chunks: int = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
        """Returns the map in the form in which the extension takes it."""
        return self.offsets, self.rows, self.experts, self.num_experts

    def cut(self, num_chunks: int) -> RowMap:
        """Returns the same rows in chunk order: each expert's rows are cut into `num_chunks` parts, and chunk c is part
        c of all experts, in expert order. The parts are as equal as whole rows allow, see `cut_counts`. Rows that are
        left over (see `build_row_map`) stay the last ones.

        Raises:
            ValueError: a map that is cut already, or that knows no experts; no chunks.
        """
        if num_chunks < 1:
            raise ValueError(f"a row map cannot be cut into {num_chunks} chunks: give at least 1")
        if self.expert_counts is None or self.num_chunks != 1:
            raise ValueError("only a row map that knows its experts and is not cut yet can be cut into chunks")
        if num_chunks == 1:
            return self
        rows = _C.cut_rows(self.tensors, self.expert_counts, num_chunks)
        return dataclasses.replace(self, rows=rows, sources=None, num_chunks=num_chunks)

    def among(self, places: torch.Tensor) -> RowMap:
        """Returns the map of the same rows where they lie among others, which copies and sums of rows take.

        Args:
            places: of the rows, int64 [R], ascending.
        """
        return dataclasses.replace(self, rows=places[self.rows])


def cut_counts(counts: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Returns the sizes of the parts of `counts` rows: part c of n rows is [n * c / num_chunks, n * (c + 1) /
    num_chunks).

    Args:
        counts: int64 [...].

    Returns:
        [num_chunks, ...].
    """
    numbers = torch.arange(num_chunks + 1, device=counts.device).view(-1, *[1] * counts.dim())
    return (counts * numbers).div_(num_chunks, rounding_mode="floor").diff(dim=0)


def build_row_map(routing_map: torch.Tensor, capacity: int | None = None, num_out_tokens: int | None = None) -> RowMap:
    """Builds the row map of a routing map.

    Args:
        routing_map: [T, E]; bool, or any dtype in which nonzero means routed. Need not be contiguous.
        capacity: drop-and-pad: every expert owns exactly this many rows (<= T), first the tokens routed to it, cut
            at the capacity, then, where they are fewer, the lowest tokens that are not routed to it. None: every
            routed pair is a row.
        num_out_tokens: number of routed pairs, if known. On CUDA it spares a host synchronisation; where there are
            fewer pairs (Transformer Engine's router gives a token of NaNs one expert), the rows left over come last,
            and are no token's: nothing writes them. Where there are more, the last ones are cut off, and
            expert_counts have them still. On CPU the pairs are counted anyway and it is not read. With `capacity` it
            is not needed.

    Raises:
        ValueError: a routing map that is not two-dimensional, or a capacity outside [0, T].
    """
    if routing_map.dim() != 2:
        raise ValueError(f"routing_map must be [tokens, experts], but its shape is {tuple(routing_map.shape)}")
    num_tokens, num_experts = routing_map.shape
    routing_map = routing_map.bool().contiguous()
    if capacity is None:
        expected = None if num_out_tokens is None else int(num_out_tokens)
        # host synchronisation: on CUDA, for the number of pairs, where it is not given
        offsets, rows, experts, sources, counts = _C.build_row_map(routing_map, expected)
    else:
        counts = torch.full((num_experts,), capacity, dtype=torch.int64, device=routing_map.device)
        offsets, rows, experts, sources = _C.build_padded_row_map(routing_map, capacity)
    return RowMap(num_tokens, num_experts, sources.numel(), offsets, rows, experts, sources, counts)


def build_row_map_by_sample(routing_map: torch.Tensor, num_samples: int, num_out_tokens: int | None = None) -> RowMap:
    """Does what `build_row_map` does, but groups the rows of an expert by sample first, then in token order.

    Args:
        routing_map: [T, E]; token s of sample b is row s * num_samples + b, as in Megatron-Core.
        num_samples: B; divides T.
        num_out_tokens: as for `build_row_map`, but rows left over are token 0's, of expert 0.

    Raises:
        ValueError: as `build_row_map`, or a number of samples that does not divide T.
    """
    if routing_map.dim() != 2 or num_samples < 1 or routing_map.size(0) % num_samples != 0:
        raise ValueError(
            f"routing_map of shape {tuple(routing_map.shape)} cannot be cut into {num_samples} samples of equal length"
        )
    if num_samples == 1:
        return build_row_map(routing_map, num_out_tokens=num_out_tokens)
    num_tokens, num_experts = routing_map.shape
    sequence = num_tokens // num_samples
    by_sample = routing_map.view(sequence, num_samples, num_experts).transpose(0, 1).reshape(num_tokens, num_experts)
    grouped = build_row_map(by_sample, num_out_tokens=num_out_tokens)
    sources = grouped.sources % sequence * num_samples + grouped.sources // sequence
    row_map = row_map_from_sources(sources, num_tokens)
    expert_of_row = torch.zeros_like(grouped.experts).scatter_(0, grouped.rows, grouped.experts)
    return dataclasses.replace(
        row_map,
        num_experts=num_experts,
        experts=expert_of_row[row_map.rows],
        expert_counts=grouped.expert_counts,
    )


def row_map_from_sources(sources: torch.Tensor, num_tokens: int, num_experts: int | None = None) -> RowMap:
    """Builds the row map of rows whose tokens are known.

    Args:
        sources: int64 [R], contiguous: the token of each permuted row.
        num_tokens: T.
        num_experts: E where every expert owns R / E consecutive rows (drop-and-pad). None: a map without experts,
            which serves wherever no probabilities are involved.

    Raises:
        ValueError: a source outside [0, T) (on CUDA an assertion on the device), or R not a multiple of E.
    """
    num_rows = sources.numel()
    rows_per_expert = 0
    counts = None
    if num_experts is not None:
        if num_experts == 0 or num_rows % num_experts != 0:
            raise ValueError(
                f"drop_and_pad needs the same number of rows for every expert, but {num_rows} rows (sorted_indices) "
                f"are not a multiple of {num_experts} experts"
            )
        rows_per_expert = max(num_rows // num_experts, 1)
        counts = torch.full((num_experts,), num_rows // num_experts, dtype=torch.int64, device=sources.device)
    if has_streams(sources.device) and num_rows > 0:
        torch._assert_async(((sources >= 0) & (sources < num_tokens)).all(), "sorted_indices out of range")
    offsets, rows, experts = _C.build_row_map_from_sources(sources, num_tokens, rows_per_expert)
    return RowMap(num_tokens, num_experts or 0, num_rows, offsets, rows, experts, sources, counts)
