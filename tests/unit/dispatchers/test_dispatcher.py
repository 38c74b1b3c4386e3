"""What a dispatcher says of rows that are not as many as were promised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_moe_opt.dispatchers.dispatcher import check_routed
from megatron_moe_opt.kernels import build_row_map


def test_fewer_rows_than_promised_are_said_to_be_of_nans():
    """On CUDA a row map is as long as top-k says; Transformer Engine's router gives a token of NaNs one expert."""
    routing_map = torch.tensor([[True, True, False], [False, True, True], [True, False, False]])
    row_map = build_row_map(routing_map)
    check_routed(row_map, row_map.expert_counts)
    promised = dataclasses.replace(row_map, num_rows=6)
    with pytest.raises(RuntimeError, match="5 rows of 3 tokens were routed where --moe-router-topk gives 6: .* NaNs"):
        check_routed(promised, row_map.expert_counts)
