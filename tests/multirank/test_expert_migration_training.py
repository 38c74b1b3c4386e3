"""Training with experts that travel: through Megatron's optimizers, and compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
from tests.multirank.test_expert_migration import ALL_ENTRIES, gathers_of, hidden_states, layers, options_of, relative
from tests.ranks.pool import RankPool
from tests.ranks.training import losses

BY_HOPS = {"way": "hops", "partitions": 2}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARED_EXPERT = {"residuals": "shared", "shared_expert_interval": 1}


def stocks(ranks: RankPool, **arguments: Any) -> list[float]:
    """Losses of the first rank under stock, trained once for all tests with these arguments of `losses`."""
    if (key := str(arguments)) not in _stocks:
        _stocks[key] = ranks.run(losses, dispatcher="alltoall", **arguments)[0]
    return _stocks[key]


_stocks: dict[str, list[float]] = {}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"ep": 4}, {"distributed_optimizer": False}),
        ({"ep": 2}, {"overlap": True}),
        ({"ep": 2, "pp": 2}, {}),
        ({"tp": 2, "ep": 4}, FULL_RECOMPUTE),
    ],
    ids=str,
)
def test_losses_are_those_of_stock(ranks, layout, settings):
    options = Options(network_levels=(layout["ep"],), domain_sizes=(layout["ep"],))
    ours = ranks.run(losses, options=options, dispatcher="expert-migration", layout=layout, **settings)
    stock = stocks(ranks, layout=layout, **settings)
    assert ours[0] == pytest.approx(stock, rel=1e-5)
    assert stock[-1] < stock[0]


def test_losses_with_a_bound_on_resident_layers_are_those_of_stock(ranks):
    options = Options(network_levels=(2,), domain_sizes=(2,), prefetch_layers=0, resident_layers=1)
    arguments = {"layout": {"ep": 2}, "microbatches": 1, **FULL_RECOMPUTE}
    ours = ranks.run(losses, options=options, dispatcher="expert-migration", **arguments)
    assert ours[0] == pytest.approx(stocks(ranks, **arguments), rel=1e-5)


def test_bf16_losses_are_those_of_stock(ranks):
    options = Options(network_levels=(2, 2), domain_sizes=(2, 1))
    arguments = {"layout": {"ep": 4}, "microbatches": 1, "bf16": True}
    ours = ranks.run(losses, options=options, dispatcher="expert-migration", **arguments)
    assert ours[0] == pytest.approx(stocks(ranks, **arguments), rel=1e-2)


def travelling(settings: dict[str, Any], **options: Any) -> tuple[Options, str]:
    """Options with which all experts travel, and the dispatcher: with BY_HOPS, which is taken out of `settings`, in
    partitions.
    """
    by_hops = {name: settings.pop(name) for name in BY_HOPS if name in settings}
    ranks = (settings["layout"]["ep"],)
    options = options_of(network_levels=ranks, domain_sizes=ranks, **by_hops, **options)
    return options, "mpmoe" if by_hops else "expert-migration"


def accumulated(
    options: Options,
    dispatcher: str,
    layout: dict[str, int],
    microbatches: int,
    aligned: bool = False,
    between_nodes: bool = False,
    **settings: Any,
) -> tuple[int, list[torch.Tensor]]:
    """Returns how often gradients of experts were returned in a step, after one in which nothing is to be returned; and
    what DDP has of all gradients afterwards.

    Args:
        aligned: DDP is told to begin with its reductions, after the last pass (--align-grad-reduce).
        between_nodes: experts are taken to travel between nodes.
    """
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer import expert_migration_layer
    from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    megatron_moe_opt.register(options)
    try:
        with parallel(**layout), pytest.MonkeyPatch.context() as patch:
            patch.setattr(expert_migration_layer, "experts_cross_nodes", lambda groups: between_nodes)
            trained = gpt(
                moe_token_dispatcher_type=dispatcher, microbatches=microbatches, distributed_optimizer=False, **settings
            )
            if aligned:
                trained.config.grad_sync_func = trained.model.start_grad_sync
            for chunk in trained.chunks:
                chunk.zero_grad_buffer()
            assert gathers_of(lambda: trained.forward_backward(forward_only=True), "reduce_scatter") == 0
            HOST_MEMORY.reset_peak()
            used = HOST_MEMORY.used
            returned = gathers_of(trained.forward_backward, "reduce_scatter")
            assert (HOST_MEMORY.peak > used) == (between_nodes and dispatcher != "alltoall")
            return returned, [one.main_grad.clone() for chunk in trained.chunks for one in chunk.parameters()]
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize(
    ("layout", "settings", "bound"),
    [
        ({"ep": 4}, FULL_RECOMPUTE, 1e-5),
        ({"ep": 4}, {"bf16": True, "between_nodes": True, "microbatches": 2}, 1e-2),
        ({"ep": 2}, {"overlap": True}, 1e-5),
        ({"ep": 2, "pp": 2}, {"overlap": True, "aligned": True, "num_layers": 4, "microbatches": 2}, 1e-5),
        ({"ep": 2, "pp": 2}, {"num_layers": 4, **BY_HOPS}, 1e-5),
        ({"ep": 4}, FULL_RECOMPUTE | {"between_nodes": True, "num_layers": 3, **BY_HOPS}, 1e-5),
        ({"ep": 2, "pp": 2, "vpp": 2}, {"between_nodes": True, "num_layers": 4, "microbatches": 4}, 1e-5),
    ],
    ids=str,
)
def test_gradients_return_once_a_step_and_are_those_of_stock(ranks, layout, settings, bound):
    arguments = {"layout": layout, "microbatches": 3, **settings}
    options, dispatcher = travelling(arguments)
    found = ranks.run(accumulated, options=options, dispatcher=dispatcher, **arguments)
    stock = ranks.run(accumulated, options=Options(), dispatcher="alltoall", **arguments)
    for (returned, gradients), (_, expected) in zip(found, stock, strict=True):
        assert returned == arguments.get("num_layers", 2) // layout.get("pp", 1)
        for one, other in zip(gradients, expected, strict=True):
            assert relative(one, other) < bound


@pytest.mark.parametrize(
    ("kept", "between_nodes", "returns"), [(1, False, 1 + 3), (1, True, 2), ("all", False, 2)], ids=str
)
def test_gradients_wait_for_the_last_pass_on_the_host_or_in_as_many_layers_as_experts_stay(
    ranks, kept, between_nodes, returns
):
    options = Options(network_levels=(4,), domain_sizes=(4,), prefetch_layers=0, resident_layers=kept)
    arguments = {"layout": {"ep": 4}, "microbatches": 3, "between_nodes": between_nodes}
    arguments["dispatcher"] = "expert-migration"
    assert {returned for returned, _ in ranks.run(accumulated, options=options, **arguments)} == {returns}


def sent_at_the_begin_of_a_step(**settings: Any) -> None:
    """Checks that the weights of a step are under way before its first pass, and are the right ones;
    after the last step none.
    """
    import megatron_moe_opt
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    megatron_moe_opt.register(Options(network_levels=(2,), domain_sizes=(2,)))
    try:
        with parallel(ep=2):
            model = gpt(moe_token_dispatcher_type="expert-migration", **settings)
            layers = [one for one in model.model.modules() if hasattr(one, "token_dispatcher")]
            for _ in range(2):
                before = [parameter.clone() for parameter in model.model.parameters()]
                model.train_step()
                assert not any(map(torch.equal, before, model.model.parameters()))
                migrated = [layer.token_dispatcher.dispatcher.migrated for layer in layers]
                assert [one.news()[0].item() for one in migrated] == [1, 1]
                begun = migrated[0].communicator.round
                model.optimizer.zero_grad()
                assert [one.news()[0].item() for one in migrated] == [0, 0]
                assert [one.round for one in migrated] == [begun + 1] * 2
                model.optimizer.zero_grad()
                assert [one.round for one in migrated] == [begun + 1] * 2  # once
    finally:
        megatron_moe_opt.register()


@pytest.mark.parametrize("bf16", [False, True])
def test_experts_are_sent_when_an_optimizer_step_begins(ranks, bf16):
    ranks.run(sent_at_the_begin_of_a_step, bf16=bf16)


def messages_at_the_begin_of_a_step() -> None:
    """Checks that the messages of all layers are sent, of which as many are decoded as may be ahead; only so many
    where weights come late.
    """
    from tests.ranks.gpt import gpt
    from tests.ranks.megatron import parallel

    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        _, ours = layers(4, compression_ratio=4.0)
        migrated = [layer.token_dispatcher.dispatcher.migrated for layer in ours]
        communicator = migrated[0].communicator

        def sent() -> tuple[list[bool], list[bool]]:
            hidden = hidden_states(0)
            for layer in ours:
                hidden = layer(hidden)[0]
                change(layer, 0.1)
            communicator.after_step()
            communicator.before_step()
            is_sent = [one.round == communicator.round for one in migrated]
            return is_sent, [one._arrived.arrive is not None for one in migrated]

        sent()
        assert sent() == ([True] * 4, [True, True, False, False])
        patch.setattr(migrated[2].weights, "come_late", lambda: True)
        assert sent()[0] == [True, True, False, False]
    for overlap in (False, True):  # gathers of the distributed optimizer's parameters
        with parallel(ep=2):
            import megatron_moe_opt

            megatron_moe_opt.register(Options(network_levels=(2,), domain_sizes=(2,)))
            model = gpt(moe_token_dispatcher_type="expert-migration", overlap=overlap).model
            megatron_moe_opt.register()
            (first, *_) = [one for one in model.modules() if hasattr(one, "token_dispatcher")]
            assert first.token_dispatcher.dispatcher.migrated.weights.come_late() == overlap


def test_messages_of_all_layers_are_sent_when_a_step_begins(ranks):
    ranks.run(messages_at_the_begin_of_a_step)


def largest_weights() -> float:
    """Checks what migrated experts are as the codec gives them back: their largest entries, found by hand. Returns how
    many times as many bytes they have as travel.
    """
    from megatron_moe_opt.runtime.travelling_experts.expert_codec import kept_entries
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (ours,) = layers(1, (4,), levels=(4,), compression_ratio=8.0, residuals="shared", shared_expert_interval=0)
        migrated = ours.token_dispatcher.dispatcher.migrated
        for round_ in range(2):
            ours(hidden_states(round_))[0].sum().backward()
            own = migrated.weights.current().view(2, -1)  # 2 experts of a rank
            of_all = [torch.empty_like(own) for _ in range(4)]
            dist.all_gather(of_all, own)
            kept = kept_entries(own.size(1), torch.float32, 8.0)
            for place, experts in enumerate(of_all):
                if place == migrated.own:
                    continue
                for expert, decoded in zip(experts, migrated.gathered()[place].view(2, -1), strict=True):
                    threshold = expert.abs().kthvalue(expert.numel() - kept + 1).values
                    assert torch.equal(decoded, torch.where(expert.abs() >= threshold, expert, 0.0)), (round_, place)
            change(ours, 0.01)
        return own.nbytes / migrated.codec.prepare(migrated.weights.current(), None).sent.nbytes


def test_without_a_shared_expert_the_largest_weights_travel(ranks):
    for ratio in ranks.run(largest_weights):
        assert 7.95 < ratio <= 8.05


def change(layer: torch.nn.Module, by: float) -> None:
    """Gives this rank's experts other weights."""
    for parameter in layer.experts.parameters():
        parameter.data.add_(by * torch.randn_like(parameter))


def tracked(settings: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Returns the distance of what the others hold, the same on all of them, from the owners' weights: before and after
    these were loaded, and while messages follow one another after they had changed.
    """
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (ours,) = layers(1, (4,), levels=(4,), compression_ratio=8.0, **settings)
        migrated = ours.token_dispatcher.dispatcher.migrated

        def error() -> float:
            own = migrated.weights.current()
            of_all = [torch.empty_like(own) for _ in range(4)]
            dist.all_gather(of_all, own)
            of_owners = list(migrated.gathered())
            of_owners[migrated.own] = migrated.codec._held.experts  # what all others must hold
            held = torch.stack(of_owners)
            of_ranks = [torch.empty_like(held) for _ in range(4)]
            dist.all_gather(of_ranks, held)
            assert all(torch.equal(one, held) for one in of_ranks)
            return relative(held, torch.stack(of_all))

        ours(hidden_states(0))[0].sum().backward()
        first = error()
        change(ours, 0.1)
        found = []
        for number in range(16):
            migrated.forget()
            if number % 3 == 2:  # sent, and never looked at
                migrated.send()
            ours(hidden_states(number))[0].sum().backward()
            found.append(error())
            arrived = migrated._arrived
            with torch.no_grad():  # evaluation, or another micro-batch
                ours(hidden_states(0))
            assert migrated._arrived is arrived
        ours.load_state_dict({name: tensor for name, tensor in ours.state_dict().items() if tensor is not None}, False)
        migrated.forget()
        ours(hidden_states(0))
        return first, error(), found


@pytest.mark.parametrize("settings", [{}, SHARED_EXPERT, SHARED_EXPERT | {"shared_expert_interval": 3}], ids=str)
def test_tracked_experts_near_the_owners(ranks, settings):
    for first, loaded, found in ranks.run(tracked, settings=settings):
        assert found[0] > 0.3 and found[-1] < 1e-7, found
        if settings:
            assert first > 0.3 and loaded > 0.3  # nothing whole is ever sent
        else:
            assert first == loaded == 0 and found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("residuals", "layout", "settings", "bound"),
    [
        ({"residuals": "shared", "shared_expert_interval": 1}, {"ep": 2}, {"microbatches": 1, **FULL_RECOMPUTE}, 1e-5),
        ({"residuals": "shared", "shared_expert_interval": 2}, {"ep": 2, "pp": 2}, {"num_layers": 4}, 1e-5),
        ({"resident_layers": "all"}, {"ep": 2, "pp": 2}, BY_HOPS, 1e-5),
        ({}, {"ep": 2, "pp": 2}, {"num_layers": 4, **BY_HOPS}, 1e-5),
        ({}, {"ep": 4}, {"bf16": True, "microbatches": 3}, 1e-2),
    ],
    ids=str,
)
def test_losses_with_all_residuals_and_a_bound_are_those_of_stock(ranks, residuals, layout, settings, bound):
    arguments = {"layout": layout, **settings}
    ratios = {"compression_ratio": ALL_ENTRIES, "gradient_compression_ratio": ALL_ENTRIES}
    options, dispatcher = travelling(arguments, **{"prefetch_layers": 0, "resident_layers": 1} | ratios | residuals)
    ours = ranks.run(losses, options=options, dispatcher=dispatcher, **arguments)
    assert ours[0] == pytest.approx(stocks(ranks, **arguments), rel=bound)


def straight_through() -> None:
    """Checks that gradients reach the owner as if its weights had travelled whole."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (ours,) = layers(1, (4,), levels=(4,), compression_ratio=4.0, **SHARED_EXPERT)
        _, (whole,) = layers(1, (4,), levels=(4,))
        whole.load_state_dict(ours.state_dict())
        compressed, uncompressed = (layer.token_dispatcher.dispatcher.migrated for layer in (ours, whole))
        losses = [ours(hidden_states(number))[0].square().sum() for number in range(2)]
        decoded = compressed.gathered()
        for loss in losses:
            loss.backward()
        # The same with whole experts that are what the codec makes of them. A rank uses its own as they are.
        send = uncompressed.send

        def send_decoded() -> None:
            send()
            uncompressed._arrived.arrive = lambda: decoded

        uncompressed.send = send_decoded
        for number in range(2):
            whole(hidden_states(number))[0].square().sum().backward()
        for one, other in zip(ours.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def test_gradients_go_straight_through(ranks):
    ranks.run(straight_through)


def experts_of_passes() -> list[list[torch.Tensor]]:
    """Returns, of each of two layers, the experts that its forward passes of a step and their repetitions use."""
    from megatron.core.tensor_parallel import checkpoint

    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, ours = layers(2, (4,), levels=(4,), compression_ratio=8.0, **SHARED_EXPERT)
        used: list[list[torch.Tensor]] = [[], []]
        for layer, of_layer in zip(ours, used, strict=True):
            migrated = layer.token_dispatcher.dispatcher.migrated

            def noted(gathered=migrated.gathered, of_layer=of_layer) -> torch.Tensor:
                of_layer.append(gathered().clone())
                return gathered()

            migrated.gathered = noted
        with step_of(2):
            for number in range(2):
                rows = hidden_states(number).requires_grad_()
                for layer in ours:
                    rows = checkpoint(lambda rows, layer=layer: layer(rows)[0], False, rows)
                rows.square().sum().backward()
        return used


def test_a_pass_of_the_first_step_is_recomputed_with_the_experts_that_it_had(ranks):
    """Each layer finds in its first pass that its experts have changed; no other layer sends its own again for that."""
    for used in ranks.run(experts_of_passes):
        for forward, again, later, later_again in used:
            assert torch.equal(forward, again) and torch.equal(later, later_again)


def states() -> None:
    import megatron_moe_opt
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        (stock,), (ours,) = layers(1, (4,), levels=(4,), compression_ratio=4.0, residuals="shared")
        ours(hidden_states(0))
        assert [(n, t.shape) for n, t in stock.state_dict().items() if t is not None] == [
            (n, t.shape) for n, t in ours.state_dict().items() if t is not None
        ]
        assert stock.sharded_state_dict().keys() == ours.sharded_state_dict().keys()
        description = ours.token_dispatcher.dispatcher.describe()
        assert "4 ranks in expert domains of 4" in description and "LOSSY, compressed 4-fold" in description
    megatron_moe_opt.register()


def test_state_is_stock_and_loss_is_announced(ranks):
    ranks.run(states)
