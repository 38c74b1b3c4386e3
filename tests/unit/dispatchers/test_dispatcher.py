"""What a dispatcher says of rows that are not as many as were promised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_moe_opt.dispatchers.dispatcher import check_routed
from megatron_moe_opt.kernels import build_row_map


def test_other_rows_than_promised_are_said_to_be_of_nans_or_of_a_routing_of_ones_own():
    """On CUDA a row map is as long as top-k says; Transformer Engine's router gives a token of NaNs one expert."""
    routing_map = torch.tensor([[True, True, False], [False, True, True], [True, False, False]])
    row_map = build_row_map(routing_map)
    check_routed(row_map, row_map.expert_counts)
    for number in (4, 6):
        promised = dataclasses.replace(row_map, num_rows=number)
        said = f"5 rows of 3 tokens were routed where --moe-router-topk gives {number}: .* NaNs .* routing of one's own"
        with pytest.raises(RuntimeError, match=said):
            check_routed(promised, row_map.expert_counts)
