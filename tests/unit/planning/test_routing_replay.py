"""Replay of routing traces: volumes worked out by hand, placements in their order, the command's table and picture."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from megatron_moe_opt.kernels import place_samples
from megatron_moe_opt.planning.traces.routing_replay import decided_share, replay
from megatron_moe_opt.planning.traces.routing_trace import write_routing_trace
from tests.unit.trace_cases import planted_trace, random_trace, trace_of

ONE_EACH = np.tile(np.arange(4), (2, 1))  # 2 layers of 4 experts, each on a device of its own
TWO_NODES = np.array([0, 0, 1, 1])


def test_a_pass_by_hand():
    # Samples 0 and 3 use the other node, as in NetMoE's Fig. 2; in layer 2 all tokens stay with the expert of layer 1.
    of_samples = [[2, 2, 2, 0], [0, 1, 1, 2], [2, 3, 3, 2], [0, 0, 1, 3]]
    experts = np.array(of_samples).reshape(1, 1, 4, 4, 1).repeat(2, axis=1).repeat(2, axis=0)
    done = replay(trace_of(experts, 4).counts(), ONE_EACH, TWO_NODES, place_samples)
    # Stock: of 16 tokens, 3 + 1 + 0 + 3 leave their node, 0 + 1 + 2 + 0 their device only; each for two layers.
    assert done.volumes["stock"][:, 0].tolist() == [[14, 6, 12]] * 2
    # Samples 0 and 3 change nodes: 1 + 1 + 0 + 1 leave. On node 0 sample 3 belongs to device 0 and 1 to device 1 (2 + 2
    # stay), on node 1 sample 0 to device 2 and sample 2 to device 3 (3 + 2 stay).
    for plan in ("predicted", "oracle"):
        assert done.volumes[plan][:, 0].tolist() == [[6, 8, 18]] * 2
        assert done.moved[plan][:, 0].tolist() == [[0.5, 0.75]] * 2
    assert done.reduction("oracle") == done.reduction("predicted") == pytest.approx(8 / 14)
    assert done.share_of_oracle() == 1
    # First dispatch and last combine of a pass: 14 more tokens between nodes.
    assert done.ends[:, 0].tolist() == [14, 14] and done.whole_reduction("oracle") == pytest.approx(8 / 28)
    # 14 of the 28 tokens that stock sends between nodes are the two in between.
    assert decided_share(trace_of(experts, 4).counts(), ONE_EACH, TWO_NODES) == 0.5
    assert done.outside.tolist() == [[(1 + 1 + 0 + 1) / 16]] * 2
    assert done.heaviest.tolist() == [[6 / 4] * 2] * 2  # expert 2 gets 3 + 1 + 2 of 16


def test_placements_are_in_their_order_and_keep_all_tokens():
    counts = random_trace(seed=3, shape=(6, 4, 16, 32, 2), num_experts=8).counts()
    device = np.stack([np.random.default_rng(layer).permutation(8) // 2 for layer in range(4)])
    done = replay(counts, device, TWO_NODES, place_samples)
    inter = {plan: volumes[..., 0] for plan, volumes in done.volumes.items()}
    assert (inter["oracle"] <= inter["predicted"]).all() and (inter["oracle"] < inter["stock"]).any()
    for volumes in done.volumes.values():
        assert (volumes.sum(axis=2) == 2 * 16 * 32 * 2).all()
    assert done.moved["stock"].sum() == 0 and 0 < done.moved["oracle"][..., 0].mean() < 1


def test_parts_are_those_of_the_whole():
    counts = random_trace(seed=1, shape=(6, 3, 8, 16, 2)).counts()
    device = np.tile(np.arange(8) // 2, (3, 1))
    whole = replay(counts, device, TWO_NODES, place_samples)
    first, second = whole.of_passes(0, 2), whole.of_passes(2, 6)
    for plan in ("stock", "predicted", "oracle"):
        sums = [part.volumes[plan].sum() for part in (first, second)]
        assert sum(sums) == whole.volumes[plan].sum() and sums[1] == 2 * sums[0]
    assert np.array_equal(np.concatenate([first.outside, second.outside]), whole.outside)
    # What was learnt before counts: the first pass alone knows nothing of the next layer.
    alone = replay(counts[:2], device, TWO_NODES, place_samples)
    assert np.array_equal(alone.volumes["predicted"], first.volumes["predicted"])


def test_one_node_has_nothing_to_reduce():
    done = replay(random_trace().counts(), np.tile(np.arange(8) // 2, (3, 1)), np.zeros(4, int), place_samples)
    assert (done.reduction("oracle"), done.whole_reduction("oracle"), done.share_of_oracle()) == (0, 0, 1)


def test_the_command(command, tmp_path):
    trace, _ = planted_trace()
    write_routing_trace(tmp_path / "routing.npz", trace)
    replayed = "trace", "replay", tmp_path / "routing.npz", "--nodes", 2, "--ranks-per-node", 2
    code, before, _ = command(*replayed, "-o", tmp_path / "replay.png")
    assert code == 0 and (tmp_path / "replay.png").stat().st_size > 10_000
    assert (
        "8 passes of iterations 1 to 8; 16 samples of prose, code, 16 tokens each; 3 MoE layers, 16 experts" in before
    )
    code, planned, _ = command("trace", "place", *replayed[2:], "-o", tmp_path / "order.json")
    assert code == 0 and "5-8, held out" in planned
    code, after, _ = command(*replayed, "--expert-order", tmp_path / "order.json")
    assert code == 0

    def row(output, start):
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
        first = next(number for number, cells in enumerate(rows) if cells[0] == start)
        return rows[first : first + 3]

    # With the planted groups on one rank each, the oracle leaves nothing between nodes and ranks.
    stock, predicted, oracle = row(after, "all")
    tokens = 2 * 2 * 16 * 16 * 2
    assert [stock[1], predicted[1], oracle[1]] == ["stock", "predicted", "oracle"]
    assert oracle[2:6] == ["0", "0", str(tokens), "100.0%"] and predicted[5:7] == ["100.0%", "100.0%"]
    assert stock[7] == "0.0%" and float(row(before, "all")[0][7].strip("%")) > 20


def test_a_long_recording_is_shown_part_by_part(command, tmp_path):
    trace = random_trace(shape=(20, 2, 8, 4, 2))
    write_routing_trace(tmp_path / "routing.npz", trace)
    code, output, _ = command("trace", "replay", tmp_path / "routing.npz", "--nodes", 2, "--ranks-per-node", 2)
    whole = replay(trace.counts(), np.tile(np.arange(8) // 2, (2, 1)), TWO_NODES, place_samples)
    parts = [line for line in output.splitlines() if " to " in line and "│" in line]
    assert code == 0 and len(parts) == 8
    for line, (begin, end) in zip(parts, pairwise((0, 2, 5, 7, 10, 12, 15, 17, 20)), strict=True):
        name, _, predicted, oracle, *_ = (cell.strip() for cell in line.strip("│").split("│"))
        part = whole.of_passes(begin, end)
        assert name == f"{begin + 1} to {end}"
        assert (predicted, oracle) == tuple(f"{part.reduction(plan):.1%}" for plan in ("predicted", "oracle"))


@pytest.mark.parametrize(
    ("nodes", "ranks", "changes", "problem"),
    [
        (3, 1, {}, "3 ranks do not divide the 8 samples of a pass"),
        (2, 4, {"num_experts": 12}, "8 ranks do not divide the 12 experts"),
        (2, 2, {"shape": (2, 1, 8, 4, 2)}, "has one MoE layer"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(command, tmp_path, nodes, ranks, changes, problem):
    write_routing_trace(tmp_path / "routing.npz", random_trace(**changes))
    sizes = "--nodes", nodes, "--ranks-per-node", ranks
    for words in (("trace", "replay"), ("trace", "place", "-o", tmp_path / "order.json")):
        code, _, errors = command(*words, tmp_path / "routing.npz", *sizes)
        assert code == 2 and problem in errors and errors.count("\n") == 1
