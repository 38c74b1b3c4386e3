"""Which ranks hold samples together."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.topology.sample_holders import SampleHolders

TWO_NODES = ("a", "a", "b", "b")


def holders(tp: int, etp: int, ranks: int = 4, nodes: tuple[str, ...] = TWO_NODES) -> SampleHolders:
    groups = tuple([8 + rank // tp * tp + part for part in range(tp)] for rank in range(ranks))
    return SampleHolders.from_ranks([8 + rank for rank in range(ranks)], groups, nodes, etp)


def test_every_rank_is_a_device_without_tp():
    found = holders(1, 1)
    assert found.ranks.tolist() == [[0], [1], [2], [3]]
    assert found.rank_device.tolist() == found.holder_device.tolist() == found.ep_device.tolist() == [0, 1, 2, 3]
    assert found.device_node.tolist() == [0, 0, 1, 1]


def test_a_tp_group_is_a_device():
    found = holders(2, 1)
    assert found.ranks.tolist() == [[0, 1], [2, 3]]
    assert (found.num_devices, found.ep_device.tolist()) == (2, [0, 0, 1, 1])
    assert found.device_node.tolist() == [0, 1]


def test_nodes_are_counted_among_those_of_devices():
    """A TP or CP group over two nodes is on its first rank's: the solver takes nodes from 0 on, without a gap."""
    assert holders(2, 1, nodes=("a", "b", "c", "d")).device_node.tolist() == [0, 1]


def test_an_expert_that_two_holders_have_in_parts_makes_them_one_device():
    found = holders(1, 2)
    assert found.holder_device.tolist() == [0, 0, 1, 1]
    assert found.ep_device.tolist() == [0, 1]


def test_parts_move_to_the_rank_with_the_same_tp_rank():
    # Two TP groups of two ranks, two samples each: sample 1 and sample 2 change places.
    items = holders(2, 1).items(np.array([0, 2, 1, 3]))
    assert items.reshape(4, 2).tolist() == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_items_without_tp_are_the_samples():
    move = np.array([3, 1, 0, 2])
    assert holders(1, 1).items(move).tolist() == move.tolist()


def test_a_tp_group_beyond_the_joint_group_is_refused():
    with pytest.raises(ConfigurationError, match="--context-parallel-size = 4 cuts .*dispatcher-type monta"):
        SampleHolders.from_ranks([0, 1], ([0, 1, 2, 3], [0, 1, 2, 3]), ("a", "a"), 1)
