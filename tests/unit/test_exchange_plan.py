"""The exchange plan against a hand-computed case and against a simulated exchange."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe_opt.runtime.exchange_plan import plan_exchange


def test_hand_computed_plan():
    # 2 expert-parallel x 2 expert-TP ranks, 4 experts: experts 0, 1 on ep rank 0 and 2, 3 on ep rank 1.
    counts = torch.tensor(
        [
            [[1, 2, 3, 4], [5, 0, 0, 1]],  # ep rank 0, etp ranks 0 and 1
            [[2, 2, 2, 2], [0, 0, 7, 0]],  # ep rank 1
        ]
    )
    plan = plan_exchange(counts, ep_rank=1, etp_rank=0)
    assert plan.send_counts == [4, 4]
    assert plan.receive_counts == [7, 4]  # experts 2 and 3 of (ep 0, etp 0) and (ep 1, etp 0)
    assert plan.gather_counts == [11, 8]  # etp 0: 7 + 4, etp 1: 1 + 7
    assert plan.tokens_per_expert.tolist() == [3 + 2 + 0 + 7, 4 + 2 + 1 + 0]
    # Arrival order: (etp 0: ep 0, ep 1), (etp 1: ep 0, ep 1), each expert 2 then expert 3.
    chunks = plan.by_expert
    moved = {}
    for source, target, rows in zip(
        chunks.source_rows.tolist(), chunks.target_rows.tolist(), chunks.row_counts.tolist(), strict=True
    ):
        for i in range(rows):
            moved[source + i] = target + i
    arrival = [2] * 3 + [3] * 4 + [2] * 2 + [3] * 2 + [3] * 1 + [2] * 7
    assert sorted(moved) == list(range(19)) == sorted(moved.values())
    assert [expert for _, expert in sorted((moved[i], expert) for i, expert in enumerate(arrival))] == sorted(arrival)


@given(data=st.data(), ep=st.sampled_from([1, 2, 4]), etp=st.sampled_from([1, 2, 4]), local=st.integers(1, 3))
def test_plans_of_all_ranks_fit_together(data, ep, etp, local):
    experts = ep * local
    flat = data.draw(st.lists(st.integers(0, 5), min_size=ep * etp * experts, max_size=ep * etp * experts))
    counts = torch.tensor(flat, dtype=torch.int64).view(ep, etp, experts)
    plans = {(e, t): plan_exchange(counts, e, t) for e in range(ep) for t in range(etp)}
    for (e, t), plan in plans.items():
        assert plan.send_counts == [plans[peer, t].receive_counts[e] for peer in range(ep)]
        assert plan.gather_counts == [sum(plans[e, peer].receive_counts) for peer in range(etp)]
        assert plan.tokens_per_expert.tolist() == counts[:, :, e * local : (e + 1) * local].sum((0, 1)).tolist()
        assert sorted_targets(plan) == list(range(sum(plan.gather_counts)))


def sorted_targets(plan):
    chunks = plan.by_expert
    return sorted(
        row
        for target, rows in zip(chunks.target_rows.tolist(), chunks.row_counts.tolist(), strict=True)
        for row in range(target, target + rows)
    )
