"""Levels that nodes make."""

from __future__ import annotations

import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.domain_groups import find_levels
from megatron_moe_opt.topology.nodes import NodeMap


@pytest.mark.parametrize(
    ("nodes", "ranks", "levels"),
    [
        ((0, 0, 1, 1), (0, 1, 2, 3), (2, 2)),
        ((0, 0, 1, 1), (0, 1), (2,)),  # in one node
        ((0, 0, 1, 1), (0, 2), (2,)),  # each on its own
        ((0, 0, 0, 0, 1, 1, 1, 1), (0, 2, 4, 6), (2, 2)),  # every other rank
        ((0,), (0,), (1,)),
    ],
)
def test_nodes_and_their_ranks_are_levels(nodes, ranks, levels):
    assert find_levels(NodeMap(nodes), ranks) == levels


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [((0, 0, 0, 1), (0, 1, 2, 3)), ((0, 1, 0, 1), (0, 1, 2, 3)), ((0, 0, 1, 1, 1), (0, 1, 2, 3, 4))],
)
def test_nodes_that_make_no_levels_are_refused(nodes, ranks):
    with pytest.raises(ConfigurationError, match="name the levels with --moe-opt-levels"):
        find_levels(NodeMap(nodes), ranks)
