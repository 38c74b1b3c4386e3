"""Gradients of migrated experts that return compressed, on 4 ranks: exact where all entries travel, late otherwise."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
from tests.multirank.test_expert_migration import ALL_ENTRIES, hidden_states, layers, relative

DOMAINS = [((4,), (4,)), ((2, 2), (2, 1)), ((2, 2), (2, 2))]


def step(layer: Any, seed: int) -> None:
    """Runs forward and backward of two micro-batches, of different sizes of gradients; in odd
    steps they return together.
    """
    outputs = [layer(hidden_states(2 * seed + number))[0] for number in range(2)]
    with step_of(1 + seed % 2):
        outputs[0].square().mean().backward()
        outputs[1].square().sum().backward()


def gradient(layer: Any) -> torch.Tensor:
    """Returns the gradient [numel] of this rank's experts."""
    weights = layer.token_dispatcher.dispatcher.migrated.weights
    flat = torch.empty(weights.numel)
    weights.flatten([parameter.grad for parameter in weights.parameters], flat)
    return flat


def not_sent(layer: Any) -> torch.Tensor:
    """Returns what all ranks keep that this rank has not got, [numel]. A collective call."""
    migrated = layer.token_dispatcher.dispatcher.migrated
    pending = torch.zeros(4, migrated.weights.numel, device=migrated.weights.parameters[0].device)
    groups = migrated.communicator._groups.values()
    # By place among the peers of each level, the innermost first.
    owners = torch.tensor(migrated.owners).view([group.size() for group in reversed(groups)])
    for group in reversed(groups):
        kept, mine = migrated.gradients._kept[group].get(), owners[group.rank()]
        others = [place for place in range(group.size()) if place != group.rank()]
        pending.index_add_(0, owners[others].reshape(-1), kept.reshape(-1, kept.size(-1)))
        owners = mine
    dist.all_reduce(pending)
    return pending[dist.get_rank()]


def all_entries(domains: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Checks that there are the same bits as for whole gradients, and stock's to rounding."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        for levels, sizes in domains:
            (stock,), (ours,) = layers(1, sizes, levels, gradient_compression_ratio=ALL_ENTRIES)
            _, (whole,) = layers(1, sizes, levels)
            whole.load_state_dict(ours.state_dict())
            for layer in (stock, ours, whole):
                step(layer, 0), step(layer, 1)
            for of_stock, one, other in zip(*(layer.parameters() for layer in (stock, ours, whole)), strict=True):
                assert torch.equal(one.grad, other.grad), (levels, sizes)
                assert relative(one.grad, of_stock.grad) < 1e-6
            assert not not_sent(ours).any()


def test_all_entries_are_whole_gradients(ranks):
    ranks.run(all_entries, domains=DOMAINS)


def late(domains: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[list[float]]:
    """Returns what is missing, and what is missing with what the others keep, of the gradient of each step's sum."""
    from tests.ranks.megatron import parallel

    found = []
    with parallel(ep=4):
        for levels, sizes in domains:
            _, (ours,) = layers(1, sizes, levels, gradient_compression_ratio=16.0)
            _, (again,) = layers(1, sizes, levels, gradient_compression_ratio=16.0)
            _, (whole,) = layers(1, sizes, levels)
            for layer in (whole, again):
                layer.load_state_dict(ours.state_dict())
            for number in range(3):
                for layer in (ours, again, whole):
                    step(layer, number)
                with torch.no_grad():
                    ours(hidden_states(0))  # evaluation sends nothing back
                missing, true = not_sent(ours), gradient(whole)
                found.append([relative(gradient(ours), true), relative(gradient(ours) + missing, true)])
            assert torch.equal(gradient(ours), gradient(again))  # the same bits
            ours.load_state_dict(whole.state_dict())
            assert not ours.token_dispatcher.dispatcher.migrated.gradients._kept
    return found


def test_what_arrived_and_what_is_kept_is_the_whole_gradient(ranks):
    for result in ranks.run(late, domains=DOMAINS):
        assert all(missing > 0.05 for missing, _ in result), result
        assert all(with_kept < 2e-6 for _, with_kept in result), result


def sent() -> dict[float | None, tuple[int, int]]:
    """Returns messages and bytes of gradients, by ratio."""
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from megatron_moe_opt.topology.nodes import NodeMap
    from tests.ranks.megatron import parallel

    found = {}
    with parallel(ep=4):
        for ratio in (None, 8.0):
            _, (layer,) = layers(1, gradient_compression_ratio=ratio)
            output = layer(hidden_states(0))[0].sum()
            with TrafficCounter(NodeMap((0, 0, 1, 1))) as counter:
                output.backward()
            rows = [row for row in counter.rows() if row.collective == "reduce_scatter"]
            assert [row.link for row in rows] == ["inter-node", "intra-node"]
            assert rows[1].bytes == 2 * rows[0].bytes  # inside a node, sums for its own ranks and the other's
            found[ratio] = sum(row.messages for row in rows), sum(row.bytes for row in rows)
    return found


def test_bytes_are_those_of_the_ratio(ranks):
    for result in ranks.run(sent):
        (messages, whole), (as_many, compressed) = result[None], result[8.0]
        assert messages == as_many == 2
        assert 7.95 < whole / compressed < 8.05


def overflow() -> None:
    """Checks that owners hear of a gradient that is not finite; then it is forgotten. After a
    skipped step everything is.
    """
    from megatron_moe_opt.integration.optimizer_step import step_ended
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (ours,) = layers(1, gradient_compression_ratio=16.0)
        gradients = ours.token_dispatcher.dispatcher.migrated.gradients
        step(ours, 0)
        output = ours(hidden_states(0))[0]
        output.backward(torch.full_like(output, float("nan") if dist.get_rank() == 2 else 1.0))
        assert not gradient(ours).isfinite().all()
        assert all(kept.get().isfinite().all() for kept in gradients._kept.values())
        ours.zero_grad()
        step(ours, 0)
        assert gradient(ours).isfinite().all()
        step_ended(updated=True)
        communicator = ours.token_dispatcher.dispatcher.migrated.communicator
        communicator.before_step()
        assert gradients._kept
        step(ours, 0)
        communicator.before_step()  # the step is run again, without the optimizer's: Megatron's rerun state machine
        assert not gradients._kept
        step(ours, 0)
        step_ended(updated=False)
        assert not gradients._kept
        description = ours.token_dispatcher.dispatcher.describe()
        assert "their gradients LOSSY, compressed 16-fold" in description


def test_what_is_not_finite_is_told_and_forgotten(ranks):
    ranks.run(overflow)
