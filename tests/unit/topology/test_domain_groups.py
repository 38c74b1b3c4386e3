"""Levels that nodes make."""

from __future__ import annotations

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.domains import find_levels


@pytest.mark.parametrize(
    ("nodes", "levels"),
    [
        ((0, 0, 1, 1), (2, 2)),
        ((3, 3, 3), (3,)),  # in one node
        ((0, 1, 2), (3,)),  # each on its own
        ((0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 1, 1), (3, 4)),
        ((0,), (1,)),
    ],
)
def test_nodes_and_their_ranks_are_levels(nodes, levels):
    assert find_levels(nodes) == levels


@pytest.mark.parametrize("nodes", [(0, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1, 1), (0, 0, 1, 1, 0, 0)])
def test_nodes_that_make_no_levels_are_refused(nodes):
    with pytest.raises(ConfigurationError, match="name the levels with --moe-opt-levels"):
        find_levels(nodes)
