"""What samples cost by hops, against tokens that are sent one by one; a replay against a dispatcher's own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from megatron_moe_opt.dispatchers.sample_placement import LayerPlacement, SampleOrder
from megatron_moe_opt.dispatchers.sample_traffic import SampleRowBytes, SampleTraffic
from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.predicting.sample_costs import HopCosts, RowCosts, SampleCosts
from megatron_moe_opt.runtime.hops.hop_plan import DomainTables
from megatron_moe_opt.runtime.hops.hop_way import DeviceTables
from megatron_moe_opt.runtime.hops.row_facts import experts_of_tokens
from megatron_moe_opt.runtime.moving_samples.sample_counts import SampleCounts
from megatron_moe_opt.topology.domains import stationary
from megatron_moe_opt.topology.sample_holders import SampleHolders

RANKS, EXPERTS, TOKENS, TOPK = 4, 8, 6, 3


def replay_counts(
    passes: Iterable[Sequence[SampleCounts]],
    holders: SampleHolders,
    costs: SampleCosts,
    row: SampleRowBytes,
    rows_beside: int = 0,
) -> SampleTraffic:
    """What netmoe's layers of a pipeline stage would have sent of passes that were counted under another dispatcher.

    Args:
        passes: the counts of each layer, with all samples at home. Predictions learn from each pass after it was sent.
        costs: of the way whose columns were counted.
        rows_beside: see SampleTraffic.add.
    """
    order, traffic, layers = SampleOrder(), SampleTraffic(), []
    for of_layers in passes:
        if not layers:
            last = len(of_layers) - 1
            layers = [LayerPlacement(order, holders, costs, last=number == last) for number in range(last + 1)]
        order.begin()
        for layer, at_home in zip(layers, of_layers, strict=True):
            counts = at_home
            if order.running.at is not None:
                parts = at_home.rows.flatten(0, 2)
                now = parts.new_empty(parts.shape)
                now[holders.items(np.argsort(order.running.at))] = parts
                counts = replace(at_home, rows=now.view_as(at_home.rows))
            decision = layer.decide(counts, rows_beside, learn=counts.equal).decision.result()
            traffic.add(decision, holders, costs, rows_beside, row, exposed=0.0)
    return traffic


def holders(nodes: tuple[str, ...]) -> SampleHolders:
    return SampleHolders.from_ranks(list(range(RANKS)), tuple([rank] for rank in range(RANKS)), nodes, 1)


def routed(seed: int) -> torch.Tensor:
    """bool [RANKS, TOKENS, EXPERTS], of one sample a rank."""
    chosen = torch.rand(RANKS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(TOPK).indices
    return torch.zeros(RANKS, TOKENS, EXPERTS, dtype=torch.bool).scatter_(2, chosen, True)


def counted(routing: torch.Tensor, workers: tuple[int, ...], chunks: int) -> torch.Tensor:
    tables = DeviceTables(DomainTables(stationary(workers), 0, EXPERTS), torch.device("cpu"))
    stretches = [TOKENS // chunks] * chunks
    return torch.stack([tables.count_samples(experts_of_tokens(of, TOPK), of, stretches, 1) for of in routing])


def crossings(routing: torch.Tensor, rank: list[int], workers: tuple[int, ...], beside: str) -> tuple[int, int]:
    """Links that tokens cross between nodes, and inside them, token by token, where sample i is on rank[i].

    Args:
        beside: what goes along from the sample's own rank: nothing, a row that is summed, or one that is not.
    """
    inner = workers[-1]
    inter = intra = 0
    for sample, place in enumerate(rank):
        for token in routing[sample]:
            wanted = {int(expert) // (EXPERTS // RANKS) for expert in token.nonzero()}
            wanted |= {sample} if beside == "summed" else set()
            inter += len({one // inner for one in wanted} - {place // inner})
            intra += sum(one % inner != place % inner for one in wanted)
            if beside == "apart":
                inter += sample // inner != place // inner
                intra += sample % inner != place % inner
    return inter, intra


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("beside", ["nothing", "summed", "apart"])
def test_hops_are_counted_and_placed_as_tokens_cross_links(chunks, beside):
    workers, of = (2, 2), holders(("a", "a", "b", "b"))
    costs = HopCosts(of, stationary(workers), EXPERTS, chunks, beside == "apart")
    for seed in range(4):
        routing = routed(seed)
        counts = counted(routing, workers, chunks).numpy()  # [R, 1, C]
        home, rows_beside = np.arange(RANKS), 0 if beside == "nothing" else TOKENS
        on_device = costs.on_device(counts, rows_beside)
        placed = place_samples(on_device, np.arange(RANKS), costs.device_node).tolist()
        sent = {}
        for there in permutations(range(RANKS)):
            volume = costs.volumes(counts[:, 0], home, np.array(there), rows_beside)[1]
            sent[there] = crossings(routing, list(there), workers, beside)
            assert (volume.inter, volume.intra) == sent[there]
        least = min(inter for inter, _ in sent.values())
        assert sent[tuple(placed)][0] == least  # and then as few inside as the nodes' samples allow
        node = [rank // 2 for rank in placed]
        alike = [of_there for there, of_there in sent.items() if [rank // 2 for rank in there] == node]
        assert sent[tuple(placed)] == min(alike)


def test_where_experts_are_cut_links_are_those_between_shards_of_one_rank():
    """Two ranks that hold experts, one a node, of two shards each: EP 2, expert-TP 2."""
    nodes, tp_groups = ("a", "a", "b", "b"), tuple([rank] for rank in range(RANKS))
    of = SampleHolders.from_ranks(list(range(RANKS)), tp_groups, nodes, 2)
    tables = DeviceTables(DomainTables(stationary((2,)), 0, EXPERTS), torch.device("cpu"))
    chosen = torch.rand(RANKS, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(2).indices
    routing = torch.zeros(RANKS, TOKENS, EXPERTS, dtype=torch.bool).scatter_(2, chosen, True)
    counts = torch.stack([tables.count_samples(experts_of_tokens(one, TOPK), one, [TOKENS], 1) for one in routing])
    costs, wanted = HopCosts(of, stationary((2,)), EXPERTS, 1), routing.view(RANKS, TOKENS, 2, -1).any(3)
    assert of.num_devices == 2 and costs.on_device(counts.numpy()).tolist() == wanted.sum(1).tolist()
    for there in permutations(range(RANKS)):
        asks = [wanted[sample] | (sample // 2 == torch.arange(2)) for sample in range(RANKS)]
        other = sum(int(asked[:, 1 - rank // 2].sum()) for asked, rank in zip(asks, there, strict=True))
        _, volume = costs.volumes(counts[:, 0].numpy(), np.arange(RANKS), np.array(there), TOKENS)
        assert (volume.inter, volume.intra) == (other, 0)
    # By rows: shards of one rank that change their samples send each other nothing.
    for there, beside in (([1, 0, 3, 2], 0), ([2, 1, 0, 3], 2 * TOKENS)):
        rows, sent = RowCosts(of, EXPERTS), routing.sum(1).numpy()
        (_, without), (_, with_) = (rows.volumes(sent, np.arange(RANKS), np.array(there), one) for one in (0, TOKENS))
        assert (with_.inter - without.inter, with_.intra - without.intra) == (beside, 0)


def test_on_one_level_ranks_are_what_a_token_touches():
    costs = HopCosts(holders(("a",) * 4), stationary((RANKS,)), EXPERTS, 1)
    routing = routed(0)
    wanted = routing.view(RANKS, TOKENS, RANKS, -1).any(3).sum(1)
    assert costs.on_device(counted(routing, (RANKS,), 1).numpy()).tolist() == wanted.tolist()
    volume, _ = costs.volumes(counted(routing, (RANKS,), 1).numpy()[:, 0], np.arange(4), np.arange(4), 0)
    assert volume.inter == 0 and volume.intra == int(wanted.sum() - wanted.diagonal().sum())


@pytest.mark.parametrize("hops", [False, True])
def test_a_replay_brings_samples_to_the_experts_of_the_next_layer(hops):
    """All tokens of a sample go to the experts of one rank, two ranks on, in every layer: one combine and the last
    differ from stock, which sends everything twice between nodes."""
    of, workers = holders(("a", "a", "b", "b")), (2, 2)
    routing = torch.zeros(RANKS, TOKENS, EXPERTS, dtype=torch.bool)
    for rank in range(RANKS):
        first = (rank + 2) % RANKS * 2
        routing[rank, :, first : first + 2] = True
    rows = counted(routing, workers, 1) if hops else routing.sum(1).view(RANKS, 1, -1)
    costs = HopCosts(of, stationary(workers), EXPERTS, 1) if hops else RowCosts(of, EXPERTS)
    none = torch.zeros(RANKS, 1)
    counts = SampleCounts(rows.unsqueeze(1), torch.full((RANKS, 1, 1), TOKENS), none.bool(), none)
    traffic = replay_counts([[counts] * 3] * 3, of, costs, SampleRowBytes(1, 1, 1, 1))
    each = TOKENS * RANKS * (1 if hops else 2)
    assert traffic.stock_inter == 3 * 3 * 2 * 2 * TOKENS * RANKS
    assert traffic.sent_inter == 3 * 2 * each  # the first dispatch, and the last combine
