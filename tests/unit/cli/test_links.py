"""The wire limit against numbers worked out by hand."""

from __future__ import annotations

import pytest

from megatron_moe_opt.cli.bench import links
from megatron_moe_opt.cli.bench.link_rates import LinkRates, wire_limit
from megatron_moe_opt.cli.bench.links import measure_links
from megatron_moe_opt.topology.nodes import NodeMap

NODES = NodeMap((0, 0, 1, 1, 2, 2))


def _sent(**pairs):
    matrix = [[0] * 6 for _ in range(6)]
    for pair, num_bytes in pairs.items():
        sender, receiver = (int(rank) for rank in pair.removeprefix("r").split("to"))
        matrix[sender][receiver] = num_bytes
    return matrix


def test_busiest_direction_of_the_busiest_node_counts():
    # Node 0 sends 500; node 1 sends 300 and receives 500; node 2 receives 300.
    sent = _sent(r0to2=400, r1to3=100, r2to4=300)
    limit = wire_limit(sent, NODES, LinkRates(inter_node=100.0, intra_node=100.0))
    assert (limit.seconds, limit.link) == (5.0, "inter-node")
    # Three senders to one node: 100 + 100 + 250 enter it, and no node sends more than 250.
    sent = _sent(r0to4=100, r1to4=100, r2to5=250)
    assert wire_limit(sent, NODES, LinkRates(inter_node=100.0, intra_node=None)).seconds == 4.5


def test_all_ranks_of_a_node_share_its_links():
    sent = _sent(r0to1=3000, r1to0=1000, r4to5=3500, r0to2=100)
    limit = wire_limit(sent, NODES, LinkRates(inter_node=100.0, intra_node=1000.0))
    assert (limit.seconds, limit.link) == (4.0, "intra-node")


def test_no_traffic_no_limit():
    assert wire_limit(_sent(), NODES, LinkRates(inter_node=1.0, intra_node=1.0)) is None
    assert wire_limit([[0]], NodeMap(), LinkRates(inter_node=None, intra_node=None)) is None


FULL_DUPLEX, SHARED = max, lambda leaving, entering: leaving + entering


@pytest.mark.parametrize(
    ("of_link", "both", "one_way", "seconds"),
    [(FULL_DUPLEX, 100.0, 100.0, (3.0, 3.0)), (SHARED, 50.0, 100.0, (6.0, 3.0))],
    ids=["full duplex", "shared"],
)
def test_both_directions_are_measured(monkeypatch, of_link, both, one_way, seconds):
    """An exchange on links of 100 bytes a second a node; then what takes longest of it both ways, and one way."""

    def exchange(message, sends, world, device):
        ranks = range(world)
        inside = [NODES.ranks_of(node) for node in range(NODES.num_nodes)]
        return (
            max(
                of_link(
                    sum(sends(a, b) for a in of_node for b in ranks if b not in of_node),
                    sum(sends(a, b) for a in ranks for b in of_node if a not in of_node),
                )
                * message
                / 100
                for of_node in inside
            )
            or message / 1000
        )  # inside nodes

    monkeypatch.setattr(links, "_exchange", exchange)
    rates = measure_links(NODES, None)
    assert (rates.inter_node, rates.inter_node_one_way) == (both, one_way)
    assert rates.intra_node == 2000.0
    there_and_back, there = _sent(r0to2=300, r2to0=300), _sent(r0to2=300)
    assert tuple(wire_limit(sent, NODES, rates).seconds for sent in (there_and_back, there)) == seconds


@pytest.mark.parametrize(("a", "b", "same"), [(0, 1, True), (1, 2, False), (4, 5, True), (5, 0, False)])
def test_same_node(a, b, same):
    assert NODES.same_node(a, b) is same


def test_node_map():
    assert NODES.num_nodes == 3
    assert NODES.ranks_of(1) == (2, 3)
    assert NodeMap().node_of == (0,)
