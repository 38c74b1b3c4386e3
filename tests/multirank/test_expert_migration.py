"""`expert-migration` against stock `alltoall` in the same process group, on 4 and on 8 ranks.

Outputs and gradients are sums in another order: fp32 within 1e-6 relative, bf16 within 1e-2.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_moe_opt.options import Options
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import ArrivedExperts
from megatron_moe_opt.runtime.travelling_experts.expert_communicator import DECODING
from tests.multirank.test_dispatchers import DROP, PAD, RECOMPUTE, SHARED, compare
from tests.multirank.test_parm import compare_replicated
from tests.ranks.devices import on_gpus
from tests.ranks.layers import BesideStock, imposed_map, route_to
from tests.ranks.pool import RankFailure, RankPool

ONE_LEVEL, TWO_LEVELS = (4,), (2, 2)


def worst_errors(cases: list[dict[str, Any]]) -> dict[str, float]:
    """The worst error of each case, domain sizes and chunks, by its name; cases as `every_size` makes them."""
    from tests.ranks.megatron import parallel

    worst = {}
    for case in cases:
        with parallel(**case["layout"]):
            beside = BesideStock(**case["arguments"])
            for sizes, chunks in case["sizes"]:
                options = Options(network_levels=case["levels"], domain_sizes=sizes, chunks=chunks)
                errors = beside.errors(beside.run(beside.ours("expert-migration", options)))
                worst[str(case | {"sizes": (sizes, chunks)})] = max(errors.values())
    return worst


def check(pool: RankPool, cases: list[dict[str, Any]], bound: float = 1e-6) -> None:
    for result in pool.run(worst_errors, cases=cases):
        assert all(error < bound for error in result.values()), {k: v for k, v in result.items() if v >= bound}


def every_size(
    levels: tuple[int, ...], layout: dict[str, int] | None = None, chunks: int | None = None, **arguments: Any
) -> dict[str, Any]:
    """A case with every choice of domain sizes, and with so many chunks wherever tokens hop: EP 4 where it has no other
    layout, and arguments of BesideStock.
    """
    from megatron_moe_opt.topology.domains import realisable

    sizes = [(domains.sizes, number) for domains in realisable(levels) for number in (None, chunks)[: 1 + bool(chunks)]
             if number is None or domains.hops]  # fmt: skip
    layout = {"ep": 4} if layout is None else layout
    return {"levels": levels, "sizes": sizes, "layout": layout, "arguments": {"settings": {}} | arguments}


@pytest.mark.parametrize("levels", [ONE_LEVEL, TWO_LEVELS])
def test_every_domain_size_equals_stock(ranks, levels):
    cases = [
        *(every_size(levels, settings={"moe_router_topk": topk}, chunks=topk) for topk in (1, 2, 4)),
        every_size(levels, routing="hot", chunks=200),  # the other ranks get no token, and most chunks have none
        every_size(levels, routing="skewed", steps=2, chunks=3),
    ]
    check(ranks, cases)


@pytest.mark.parametrize(
    "settings", [DROP, PAD, SHARED, RECOMPUTE, SHARED | {"moe_shared_expert_overlap": True}], ids=str
)
def test_features_equal_stock(ranks, settings):
    check(ranks, [every_size(TWO_LEVELS, settings=settings, chunks=3)])


def changed_by_chunks() -> list[str]:
    """The results of a layer that are not the same bits with tokens in chunks."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        beside = BesideStock({"moe_router_topk": 4})
        whole, cut = (
            beside.run(beside.ours("expert-migration", Options(network_levels=TWO_LEVELS, chunks=chunks)))
            for chunks in (1, 3)
        )
        return [name for name in whole if not torch.equal(whole[name], cut[name])]


def test_chunks_change_gradients_of_weights_alone(ranks):
    """Which are sums over rows, and these are in another order."""
    for names in ranks.run(changed_by_chunks):
        assert all("experts" in name for name in names), names


def test_layouts_equal_stock(ranks):
    check(
        ranks,
        [
            every_size((4,), {"tp": 2, "ep": 4, "etp": 1}),  # tokens split by sequence parallelism
            every_size((2,), {"ep": 2}),  # two expert-parallel groups
            every_size((2,), {"cp": 2, "ep": 2}),
            every_size((1,), {}),
            every_size((2,), {"tp": 2, "ep": 2, "etp": 2}) | {"sizes": [((1,), 1), ((1,), 3)]},  # experts are cut
        ],
    )


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_that_all_tp_ranks_hold_give_what_sequence_parallelism_gives(ranks, size):
    arguments = {"layout": {"tp": 2, "ep": 4, "etp": 1}, "settings": {}, "routing": None}
    options = Options(network_levels=ONE_LEVEL, domain_sizes=(size,))
    for errors in ranks.run(compare_replicated, dispatcher="expert-migration", options=options, **arguments):
        assert max(errors.values()) < 1e-6, errors


def test_bf16_is_within_the_contract(ranks):
    check(ranks, [every_size(levels, dtype="bfloat16") for levels in (TWO_LEVELS, ONE_LEVEL)], bound=1e-2)


@pytest.mark.parametrize("levels", [(8,), (2, 4), (4, 2)])
def test_eight_ranks_equal_stock(eight_ranks, levels):
    check(eight_ranks, [every_size(levels, {"ep": 8}, settings={"num_moe_experts": 16, "moe_router_topk": 4})])


ALL_ENTRIES = 0.5
"""A compression ratio at which every entry travels: what is left to differ from stock is the way of the entries."""


def options_of(**settings: Any) -> Options:
    """Options, whose compression ratios may be ALL_ENTRIES, which users are refused."""
    ratios = {name: value for name, value in settings.items() if value == ALL_ENTRIES}
    options = Options(**settings | dict.fromkeys(ratios, 2.0))
    for name, value in ratios.items():
        object.__setattr__(options, name, value)
    return options


def layers(
    number: int,
    sizes: tuple[int, ...] = (2, 2),
    levels: tuple[int, ...] = TWO_LEVELS,
    dispatcher: str = "expert-migration",
    biases: bool = False,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Builds as many layers of stock `alltoall` as of ours, with equal weights; call it inside `parallel`."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from tests.ranks.megatron import moe_config

    torch.manual_seed(11 + dist.get_rank())
    settings = {"add_bias_linear": biases}
    stock = [build_layer(moe_config(**settings)) for _ in range(number)]
    megatron_moe_opt.register(options_of(network_levels=levels, domain_sizes=sizes, **options))
    ours = [build_layer(moe_config(moe_token_dispatcher_type=dispatcher, **settings)) for _ in range(number)]
    megatron_moe_opt.register()
    for layer, other in zip(ours, stock, strict=True):
        layer.load_state_dict(other.state_dict())
    return stock, ours


def hidden_states(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(24, 3, 64, generator=generator).requires_grad_()


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def write_weights(layer: Any, factor: float) -> None:
    """Writes weights as a distributed optimizer does: past the parameters, whose version counters do not count it."""
    for parameter in layer.experts.parameters():
        version = parameter._version
        parameter.data.mul_(factor)
        assert parameter._version == version


def gathers_of(step: Any, collective: str = "all_gather") -> int:
    """Returns how many gathers of experts, or returns of their gradients, this rank takes part in while
    `step` runs, over the levels.
    """
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from megatron_moe_opt.topology.nodes import NodeMap

    groups = []
    with TrafficCounter(NodeMap((0, 0, 1, 1))) as counter:
        add = counter._add
        counter._add = lambda kind, group, messages: (
            groups.append(group.group_desc) if kind == collective else None, add(kind, group, messages)
        )  # fmt: skip
        step()
    return sum("experts" in group for group in groups)


def micro_batches() -> None:
    """Runs forward, forward, backward, backward; writes weights; evaluates; runs forward and backward again."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        (stock,), (ours,) = layers(1)
        for round_, factor in enumerate((1.0, 1.5)):
            if dist.get_rank() != 1:  # on rank 1 nothing changes
                write_weights(stock, factor), write_weights(ours, factor)
            results = []
            for layer in (stock, ours):
                inputs = [hidden_states(2 * round_ + number) for number in range(2)]

                def step(layer: Any = layer, inputs: list[torch.Tensor] = inputs) -> None:
                    outputs = [layer(one)[0] for one in inputs]
                    for output in outputs:
                        output.square().sum().backward()
                    with torch.no_grad():
                        layer(inputs[0])

                gathers = gathers_of(step)
                assert gathers == (2 if layer is ours else 0), gathers  # of both levels, once in the round
                results.append([one.grad for one in inputs] + [parameter.grad for parameter in layer.parameters()])
            for one, other in zip(*results, strict=True):
                assert relative(other, one) < 1e-6


def test_experts_travel_once_for_all_micro_batches_and_again_when_weights_are_written(ranks):
    ranks.run(micro_batches)


def generated_first(**options: Any) -> None:
    """Compares gradients with stock's after passes in inference mode, in which experts were gathered."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        stock, ours = layers(2, **options)
        for factor in (1.0, 1.5):
            for layer in (*stock, *ours):
                write_weights(layer, factor)
            with torch.inference_mode():
                hidden = hidden_states(1)
                for layer in ours:
                    hidden = layer(hidden)[0]
            results = []
            for model in (stock, ours):
                hidden = entered = hidden_states(1)
                for layer in model:
                    hidden = hidden + layer(hidden)[0]
                hidden.square().mean().backward()
                results.append([entered.grad, *(one.grad for layer in model for one in layer.parameters())])
            for one, other in zip(*results, strict=True):
                assert relative(other, one) < 3e-6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compression_ratio": ALL_ENTRIES, "gradient_compression_ratio": ALL_ENTRIES},
        {"dispatcher": "mpmoe", "way": "hops", "partitions": 2, "resident_layers": 1, "prefetch_layers": 0},
    ],
    ids=["whole", "compressed", "in partitions"],
)
def test_experts_that_inference_has_gathered_are_trained(ranks, settings):
    ranks.run(generated_first, **settings)


def scaled(_: Any, __: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return 2 * outputs[0], outputs[1]


def with_what_stays(**options: Any) -> list[str]:
    """What is said of experts that have a buffer, or a hook of somebody's."""
    from megatron_moe_opt.errors import ConfigurationError
    from tests.ranks.megatron import parallel

    texts = []
    with parallel(ep=4):
        _, found = layers(2, **options)
        expert, other = (layer.experts.local_experts[0] for layer in found)
        expert.register_buffer("scale", torch.ones(1))
        other.register_forward_hook(scaled)
        for layer in found:
            with pytest.raises(ConfigurationError) as caught:
                layer(hidden_states(1))
            texts.append(str(caught.value))
    return texts


@pytest.mark.host_only(reason="has an op fail, which ends an adversary's run")
@pytest.mark.parametrize("settings", [{}, {"dispatcher": "mpmoe", "way": "hops", "partitions": 2}], ids=str)
def test_experts_with_what_does_not_travel_with_their_weights_are_refused(ranks, settings):
    """They would scale, mask or adapt the experts of all ranks by what this rank has for its own."""
    for buffer, hook in ranks.run(with_what_stays, **settings):
        assert "experts travel, and the buffer local_experts.0.scale of experts stays on its rank" in buffer
        assert "a hook on local_experts.0 (tests.multirank.test_expert_migration.scaled) stays" in hook


def frozen_on_rank_one(**options: Any) -> None:
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, (layer,) = layers(1, **options)
        layer.experts.requires_grad_(dist.get_rank() != 1)
        layer(hidden_states(1))[0].sum().backward()


@pytest.mark.parametrize("settings", [{}, {"dispatcher": "mpmoe", "way": "hops", "partitions": 2}], ids=str)
def test_experts_that_are_frozen_on_some_ranks_are_refused(ranks, settings):
    """In backward their rank would not take part in returning the other ranks' gradients."""
    with pytest.raises(RankFailure) as failure:
        ranks.run(frozen_on_rank_one, **settings)
    assert len(failure.value.errors) == 4
    for _, kind, text in failure.value.errors:
        assert kind == "ConfigurationError" and "freeze experts alike on all ranks" in text


def gathers_of_frozen() -> list[int]:
    """Counts the gathers of steps of three layers, each with the begin and the end of an optimizer's step around it: of
    frozen experts twice, after their weights were written, and when they are trained; compares gradients with stock's.
    """
    from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
    from tests.ranks.megatron import parallel

    found = []
    with parallel(ep=4):
        stock, ours = layers(3, levels=(4,), sizes=(4,), resident_layers="all")
        communicator = ours[0].token_dispatcher.dispatcher.migrated.communicator
        for seed, (is_trained, factor) in enumerate(
            ((False, 1.0), (False, 1.0), (False, 1.5), (True, 1.0), (True, 1.1))
        ):
            results = []
            for model in (stock, ours):
                for layer in model:
                    write_weights(layer, factor)
                    layer.experts.requires_grad_(is_trained)
                entered = hidden_states(seed)

                def step(model: Any = model, entered: torch.Tensor = entered) -> None:
                    if model is ours:
                        communicator.before_step()
                    with step_of(1):
                        hidden = entered
                        for layer in model:
                            hidden = hidden + layer(hidden)[0]
                        hidden.square().mean().backward()
                    if model is ours:
                        communicator.after_step()

                gathers = gathers_of(step)
                results.append(entered.grad)
            found.append(gathers)
            assert relative(*results) < 3e-6
    return found


def test_experts_that_nobody_trains_are_sent_once(ranks):
    """As under adapters elsewhere. Whoever writes into them has them sent again, in their own passes."""
    for gathers in ranks.run(gathers_of_frozen):
        assert gathers == [3, 0, 3, 0, 3]


def slow_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gathers of experts take a while, on some ranks longer."""
    import time

    from megatron_moe_opt.runtime.engine import steps

    gather = steps.all_gather

    def slow(*arguments: Any) -> Any:
        return steps.call(lambda: time.sleep(0.02 * (1 + dist.get_rank() % 2))) + gather(*arguments)

    monkeypatch.setattr(steps, "all_gather", slow)


def prefetched() -> None:
    from tests.ranks.megatron import parallel

    with parallel(ep=4), pytest.MonkeyPatch.context() as monkeypatch:
        slow_gathers(monkeypatch)
        stock, ours = layers(4, prefetch_layers=2)
        migrated = [layer.token_dispatcher.dispatcher.migrated for layer in ours]
        communicator = migrated[0].communicator
        for round_ in range(4):
            outputs = []
            for model in (stock, ours):
                hidden, sent = hidden_states(round_), []
                for number, layer in enumerate(model):
                    if number == 2 and round_ == 3:
                        write_weights(layer, 1.3)  # after it was sent ahead
                    hidden = hidden + layer(hidden)[0]
                    sent.append([one.round == communicator.round for one in migrated])
                outputs.append(hidden)
                hidden.square().mean().backward()
            assert relative(outputs[1], outputs[0]) < 1e-6
            if round_ == 1:  # the order is known from the first round
                assert sent == [[True, True, True, False], *[[True] * 4] * 3]
            for layer in (*stock, *ours):
                write_weights(layer, 1.1)
            if round_ == 1:  # as Megatron's optimizers call them
                communicator.after_step()
                assert not any(one.round == communicator.round + 1 for one in migrated)
                communicator.before_step()
                assert [one.round == communicator.round for one in migrated] == [True, True, True, False]
        for one, other in zip(stock, ours, strict=True):
            for weight, same in zip(one.parameters(), other.parameters(), strict=True):
                assert relative(same.grad, weight.grad) < 3e-6  # of four layers in a row


def test_experts_are_sent_ahead_and_compared_when_used(ranks):
    ranks.run(prefetched)


def bounded(ahead: int, sizes: tuple[int, ...] = (2, 2), **options: Any) -> None:
    """Compares three layers, experts of `ahead` + 1 of them in memory, with stock: equal whatever passes are under way,
    and where ranks have no rows.
    """
    from tests.ranks.megatron import parallel

    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        stock, ours = layers(3, sizes, prefetch_layers=ahead, **options)
        migrated = [layer.token_dispatcher.dispatcher.migrated for layer in ours]
        residents, levels = migrated[0].communicator.residents, len(sizes) - sizes.count(1)
        use = residents.use

        def use_within_bound(arrived: Any) -> None:
            use(arrived)
            assert sum(one._arrived is not None and one._arrived.arrive is not None for one in migrated) <= ahead + 1

        patch.setattr(residents, "use", use_within_bound)
        memory, experts_of = {}, ArrivedExperts.experts

        def noted(arrived: Any) -> torch.Tensor:
            experts = experts_of(arrived)
            memory[experts.data_ptr()] = StorageWeakRef(experts.untyped_storage())
            return experts

        patch.setattr(ArrivedExperts, "experts", noted)

        def resident() -> int:
            """Returns the number of gathers that are here or on their way; what was dropped is in nobody's hands."""
            assert sum(not one.expired() for one in memory.values()) <= ahead + 1
            held = [one._arrived for one in migrated if one._arrived is not None]
            here = [one for one in held if one.arrive is not None]
            assert all(one in here or one._experts is None or one._experts() is None for one in held)
            return len(here)

        for round_ in range(2):
            results = []
            for model in (stock, ours):
                inputs = [hidden_states(2 * round_ + number) for number in range(2)]
                for number, layer in enumerate(model):
                    route_to(layer, ("uniform", "hot")[round_], seed=number)

                def step(model: Any = model, inputs: list[torch.Tensor] = inputs) -> None:
                    outputs = []
                    for hidden in inputs:
                        for layer in model:
                            hidden = hidden + layer(hidden)[0]
                            assert resident() <= ahead + 1
                        outputs.append(hidden)
                    for output in outputs:
                        output.square().mean().backward()
                    with torch.no_grad():
                        model[0](inputs[0])

                gathers = gathers_of(step)
                if model is ours:  # all levels, of three layers; again in each of four passes where they were dropped
                    assert resident() == ahead + 1 and levels * 3 < gathers <= levels * 3 * 5, gathers
                results.append([one.grad for one in inputs])
            for one, other in zip(*results, strict=True):
                assert relative(other, one) < 1e-6
            for layer in (*stock, *ours):
                write_weights(layer, 1.1)
        for one, other in zip(stock, ours, strict=True):
            for weight, same in zip(one.parameters(), other.parameters(), strict=True):
                assert relative(same.grad, weight.grad) < 3e-6  # of three layers in a row


def gathers_of_steps(orders: Sequence[str], kept: int, ahead: int) -> list[int]:
    """Counts the gathers of steps of as many micro-batches as their orders name, each with a forward (f) and a backward
    pass (b), through five layers whose weights have been written before each step, and compares gradients with stock's.
    """
    from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
    from tests.ranks.megatron import parallel

    found = []
    with parallel(ep=4):
        stock, ours = layers(5, levels=(4,), sizes=(4,), resident_layers=kept, prefetch_layers=ahead)
        for order in orders:
            for layer in (*stock, *ours):
                write_weights(layer, 1.1)
            results = []
            for model in (stock, ours):
                inputs = [hidden_states(seed) for seed in range(order.count("f"))]

                def step(model: Any = model, inputs: Any = inputs, order: str = order) -> None:
                    to_come, outputs = iter(inputs), deque()
                    with step_of(len(inputs)):
                        for what in order:
                            if what == "f":
                                hidden = next(to_come)
                                for layer in model:
                                    hidden = hidden + layer(hidden)[0]
                                outputs.append(hidden)
                            else:
                                outputs.popleft().square().mean().backward()

                gathers = gathers_of(step)
                results.append([one.grad for one in inputs])
            found.append(gathers)
            for one, other in zip(*results, strict=True):
                assert relative(other, one) < 3e-6
    return found


def misses(order: str, number: int, kept: int) -> int:
    """Returns how often a layer's experts are not there, if those of `kept` layers are that were used last."""
    there: list[int] = []
    missed = 0
    for what in order:
        for layer in range(number) if what == "f" else reversed(range(number)):
            missed += layer not in there
            there = [*(one for one in there if one != layer), layer][-kept:]
    return missed


@pytest.mark.parametrize(("kept", "ahead"), [(2, 1), (3, 2), (1, 0)])
def test_nothing_is_gathered_ahead_that_backward_passes_drop(ranks, kept, ahead):
    whole, pipelined = "fbfbfb", "fffbfbbb"
    for gathers in ranks.run(gathers_of_steps, orders=[whole] * 3 + [pipelined] * 3, kept=kept, ahead=ahead):
        assert gathers[2] == misses(whole, 5, kept)
        assert gathers[5] == misses(pipelined, 5, kept)


BY_HOPS = {"dispatcher": "mpmoe", "way": "hops", "partitions": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"ahead": 0, "resident_layers": 1},
        {"ahead": 1, "sizes": (2, 1)},
        *({"ahead": 0, "resident_layers": 1, **BY_HOPS, "memory_reuse": reuse} for reuse in ("none", "S4")),
        {"ahead": 0, "resident_layers": 1, **BY_HOPS, "memory_reuse": "S1", "biases": True},
    ],
    ids=["named", "by default", "in partitions", "recomputed", "offloaded, with biases"],
)
def test_experts_beyond_the_bound_are_gathered_again(ranks, settings):
    ranks.run(bounded, **settings)


def bounded_and_compressed(**options: Any) -> None:
    """Compares three layers, experts of two in memory, with ones where all stay: the same bits, and no message more.
    What is kept of experts and of gradients is on the host, to the byte.
    """
    from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY
    from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        models, ratios, used = [], {"compression_ratio": 8.0, "gradient_compression_ratio": 8.0}, HOST_MEMORY.used
        for kept in (2, "all"):
            torch.manual_seed(dist.get_rank())
            models.append(layers(3, resident_layers=kept, **ratios, **options)[1])
        for one, other in zip(*models, strict=True):
            one.load_state_dict(other.state_dict())
        for round_ in range(3):
            results = []
            for model, kept in zip(models, (2, 3), strict=True):
                inputs = [hidden_states(2 * round_ + number) for number in range(2)]
                migrated = [layer.token_dispatcher.dispatcher.migrated for layer in model]

                def step(model: Any = model, inputs: Any = inputs, kept: int = kept, migrated: Any = migrated) -> None:
                    outputs = []
                    for hidden in inputs:
                        for layer in model:
                            hidden = hidden + layer(hidden)[0]
                            assert (
                                sum(one._arrived is not None and one._arrived.arrive is not None for one in migrated)
                                <= kept
                            )
                        outputs.append(hidden)
                    with step_of(2):
                        for output in outputs:
                            output.square().mean().backward()
                    with torch.no_grad():
                        model[0](inputs[0])

                gathers = gathers_of(step)
                assert not round_ or gathers == 2 * 3, gathers  # both levels, of three layers: once
                for one in migrated:  # what was dropped is in nobody's hands
                    assert one._arrived.arrive is not None or one._arrived._experts() is None
                results.append(
                    [one.grad for one in inputs] + [one.grad for layer in model for one in layer.parameters()]
                )
                for layer in model:
                    write_weights(layer, 1.1)
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)
        of_rank = 4 * migrated[0].weights.numel  # bytes
        if torch.empty(1, device="cpu", pin_memory=on_gpus()).is_pinned():
            of_rank = 1 << (of_rank - 1).bit_length()  # PyTorch rounds each of these up, which are 1, 2 and 4 of it
        others, own = 4 * of_rank, of_rank  # experts of all ranks, and what the others hold of this rank's
        gradients = 2 * of_rank + of_rank  # for two owners inside the node, and one outside
        expected = 3 * (others + own + gradients)
        until = time.monotonic() + 60
        while HOST_MEMORY.used - used != expected and time.monotonic() < until:
            time.sleep(0.01)  # a lane may be late on a busy machine
        assert HOST_MEMORY.used - used == expected


@pytest.mark.parametrize("settings", [{}, BY_HOPS], ids=["whole", "in partitions"])
def test_a_bound_on_compressed_experts_has_them_wait_on_the_host(ranks, settings):
    ranks.run(bounded_and_compressed, **settings)


def traffic(sizes: tuple[int, ...], levels: tuple[int, ...], nodes: tuple[int, ...]) -> dict[str, Any]:
    """Returns messages and bytes of a step by collective and group; and the copies a token a node would need."""
    import megatron_moe_opt
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.runtime.observed.traffic import TrafficCounter
    from megatron_moe_opt.topology.nodes import NodeMap
    from tests.ranks.megatron import moe_config, parallel

    settings = {"num_moe_experts": 16, "moe_router_topk": 4}
    with parallel(ep=dist.get_world_size()):
        megatron_moe_opt.register(Options(network_levels=levels, domain_sizes=sizes))
        layer = build_layer(moe_config(moe_token_dispatcher_type="expert-migration", **settings))
        megatron_moe_opt.register()
        route_to(layer, "uniform", seed=dist.get_rank())
        hidden = hidden_states(0)
        with TrafficCounter(NodeMap(nodes)) as counter:
            output = layer(hidden)[0]
            forward = counter.rows()
            output.sum().backward()
        routing = imposed_map("uniform", 72, 16, 4, torch.Generator().manual_seed(dist.get_rank()))
    of_node = routing.view(72, len(set(nodes)), -1).any(2).sum(0)
    copies = int(of_node.sum() - of_node[nodes[dist.get_rank()]])
    return {"forward": forward, "all": counter.rows(), "copies": copies}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_messages_are_those_of_table_vii(eight_ranks, size):
    results = eight_ranks.run(traffic, sizes=(size,), levels=(8,), nodes=(0,) * 8)
    messages = {"all_to_all": 0, "all_gather": 0, "reduce_scatter": 0}
    for result in results:
        for row in result["all"]:
            messages[row.collective] += row.messages
    tokens, experts = 8 * (8 // size - 1), 8 * (size - 1)
    counts = 8 * 7  # of the all-gather of counts
    # Dispatch and combine, forward and backward; experts forward, their gradients backward.
    assert messages == {"all_to_all": 4 * tokens, "all_gather": counts + experts, "reduce_scatter": experts}


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4)])
def test_a_token_crosses_to_a_node_once(eight_ranks, sizes):
    nodes = (0, 0, 0, 0, 1, 1, 1, 1)
    results = eight_ranks.run(traffic, sizes=sizes, levels=(2, 4), nodes=nodes)
    crossed = sum(
        row.bytes
        for result in results
        for row in result["forward"]
        if row.collective == "all_to_all" and row.link == "inter-node"
    )
    there, back = 4 * (64 + 4 + 4), 4 * 64  # 64 elements; 4 probabilities and 4 experts on the way out
    assert crossed == sum(result["copies"] for result in results) * (there + back) > 0


def dead_layers() -> None:
    """Checks that layers which garbage collection has found on some ranks only are not waited for."""
    import gc

    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, first = layers(1)
        first[0](hidden_states(0))
        _, others = layers(1)
        others[0](hidden_states(0))
        others[0].itself = others[0]  # lives on until it is collected
        gc.disable()
        del others
        if dist.get_rank() % 2:
            gc.collect()
        try:
            for number in range(2):
                write_weights(first[0], 1.1)
                first[0](hidden_states(number))
        finally:
            gc.enable()


def test_layers_that_are_gone_are_not_sent(ranks):
    ranks.run(dead_layers)


def next_model() -> None:
    """Checks that layers of a model that is gone, which live on on all ranks, are not sent with the next model's."""
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        _, gone = layers(2)

        def passes(model: list[Any]) -> torch.Tensor:
            hidden = hidden_states(0)
            for layer in model:
                hidden = layer(hidden)[0]
            return hidden

        before = passes(gone)
        passes(gone)
        old = [layer.token_dispatcher.dispatcher.migrated for layer in gone]
        communicator = old[0].communicator
        communicator.after_step()
        _, ours = layers(2)
        new = [layer.token_dispatcher.dispatcher.migrated for layer in ours]
        assert new[0].communicator is communicator
        rounds = [one.round for one in old]
        assert gathers_of(communicator.before_step) == 0
        assert gathers_of(lambda: passes(ours)) == 4  # two layers, two levels
        communicator.after_step()
        assert gathers_of(communicator.before_step) == 4
        assert [one.round for one in old] == rounds and [*communicator.following(old[1])] == [old[0]]
        assert torch.equal(passes(gone), before)


def test_a_model_that_is_gone_is_not_sent_with_the_next_one(ranks):
    ranks.run(next_model)


def two_models() -> None:
    """Checks that steps of one model's optimizer are none of another's, whose experts travel in the same groups."""
    from megatron_moe_opt.integration.optimizer_step import gradients_cleared, step_ended
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        models = [layers(2, gradient_compression_ratio=16.0)[1] for _ in "ab"]
        a, b = optimizers = [SimpleNamespace(model_chunks=[torch.nn.ModuleList(model)]) for model in models]
        migrated = [[layer.token_dispatcher.dispatcher.migrated for layer in model] for model in models]
        assert migrated[0][0].communicator is migrated[1][0].communicator

        def passes() -> None:
            for model in models:
                hidden = hidden_states(0)
                for layer in model:
                    hidden = layer(hidden)[0]
                hidden.square().mean().backward()

        for optimizer in optimizers:  # by which it is known which layers are whose
            step_ended(True, optimizer)
        passes()
        passes()
        assert [one.next and one.next() for one in migrated[0]] == [migrated[0][1], None]
        with torch.no_grad():  # as a teacher, whose layers have no backward pass
            models[0][0](hidden_states(0))
        models[1][0](hidden_states(0))[0].sum().backward()
        assert migrated[1][0].before is None
        rounds = [one.round for one in migrated[0]]
        kept = [dict(one.gradients._kept) for one in migrated[0]]
        assert all(kept) and all(one.gradients._kept for one in migrated[1])
        step_ended(False, b)
        assert not any(one.gradients._kept for one in migrated[1])
        assert gathers_of(lambda: gradients_cleared(b)) == 0
        passes()
        step_ended(True, b)
        assert gathers_of(lambda: gradients_cleared(b)) == 0  # the first pass was a layer's of the other
        assert [one.round for one in migrated[0]] == rounds and all(one.gradients._kept for one in migrated[0])
        step_ended(True, a)
        assert gathers_of(lambda: gradients_cleared(a)) == 4  # two layers, two levels
        assert all(one.gradients._kept for one in migrated[0])


def test_steps_of_one_model_are_none_of_another_s(ranks):
    ranks.run(two_models)


def order_of_returns() -> list[str]:
    """Returns what is begun in the backward passes of three layers, in turn, where experts of two stay."""
    from megatron_moe_opt.runtime.rows import expert_exchange
    from megatron_moe_opt.runtime.travelling_experts.expert_communicator import ExpertCommunicator
    from tests.ranks.megatron import parallel

    seen: list[str] = []
    gather, reduce, hop_back = ExpertCommunicator.gather, ExpertCommunicator.reduce, expert_exchange.run_to_sources

    def logged_gather(*arguments: Any) -> Any:
        seen.append("experts come back")
        return gather(*arguments)

    def logged_reduce(*arguments: Any) -> Any:
        seen.append("gradients leave")
        arrived = reduce(*arguments)
        return lambda: (seen.append("gradients are waited for"), arrived())[1]

    def logged_hop(*arguments: Any) -> Any:
        seen.append("tokens hop")
        return hop_back(*arguments)

    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        _, ours = layers(3, sizes=(2, 1))
        hidden = hidden_states(0)
        patch.setattr(ExpertCommunicator, "gather", logged_gather)
        for layer in ours:
            hidden = layer(hidden)[0]
        seen.clear()
        patch.setattr(ExpertCommunicator, "reduce", logged_reduce)
        patch.setattr(expert_exchange, "run_to_sources", logged_hop)
        hidden.square().sum().backward()
    return seen


def test_gradients_return_while_tokens_do_and_experts_come_back_a_layer_ahead(ranks):
    of_layer = ["gradients leave", "tokens hop", "gradients are waited for"]
    for seen in ranks.run(order_of_returns):  # of the first layer, when the second one's backward pass begins
        assert seen == [*of_layer, "experts come back", *of_layer, *of_layer]


def weights_read(recompute: bool) -> list[tuple[int, int]]:
    """How often weights are compared, and experts gathered: in a step of four micro-batches, in the next one, before
    which they were written, and in two passes outside of steps, before which they were.
    """
    from megatron.core import tensor_parallel

    from megatron_moe_opt.runtime.travelling_experts.expert_weights import ExpertWeights
    from megatron_moe_opt.runtime.travelling_experts.step_passes import step_of
    from tests.ranks.megatron import parallel

    read, found, equal = [], [], ExpertWeights.equal
    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        _, (ours,) = layers(1, levels=(4,), sizes=(4,))
        ours(hidden_states(0))
        patch.setattr(ExpertWeights, "equal", lambda *arguments: (read.append(1), equal(*arguments))[1])
        run = ours
        if recompute:
            run = lambda tokens: tensor_parallel.checkpoint(ours, False, tokens)  # noqa: E731

        def passes(number: int) -> None:
            for seed in range(number):
                output = run(hidden_states(seed).requires_grad_())
                output[0].square().sum().backward()

        def step() -> None:
            with step_of(4):
                passes(4)

        for what in (step, step, lambda: passes(2)):
            found.append((gathers_of(what), len(read)))
            read.clear()
            write_weights(ours, 1.1)
    return found


def test_weights_are_compared_once_a_step_and_once_a_pass_outside_of_steps(ranks):
    for recompute in (False, True):
        assert ranks.run(weights_read, recompute=recompute) == [[(0, 1), (1, 1), (1, 2)]] * 4


def grouped(recompute: bool) -> None:
    """Checks TEGroupedMLP: one call for the experts of all owners, and results of stock."""
    from tests.ranks.grouped_experts import use_grouped_experts

    with pytest.MonkeyPatch.context() as patch:
        use_grouped_experts(patch)
        settings = RECOMPUTE if recompute else {}
        options = Options(network_levels=TWO_LEVELS, domain_sizes=(2, 2))
        found = compare("expert-migration", {"ep": 4}, settings, routing="hot", options=options)
        assert max(found["errors"].values()) < 1e-6, found
        assert sum("linear_fc1.weight" in name for name in found["errors"]) == 2
        if recompute:
            return
        from tests.ranks.megatron import parallel

        with parallel(ep=4):
            _, (ours,) = layers(1)
            ours(hidden_states(0))
            for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
                assert [len(splits) for splits in linear.calls] == [8] and linear.num_gemms == 2
                assert not linear.is_first_microbatch


@pytest.mark.parametrize("recompute", [False, True])
def test_experts_of_all_owners_are_one_grouped_call(ranks, recompute):
    ranks.run(grouped, recompute=recompute)


def hooks_after_trials() -> tuple[int, int, int, bool]:
    """Returns the hooks on the experts of a layer before, with and after a dispatcher whose experts travelled
    compressed; and whether Megatron would still take the gradients of that one for added by fused products.
    """
    from megatron_moe_opt.integration.auto.planned_layer import PlannedLayer
    from megatron_moe_opt.integration.layer.moe_layer import build_layer
    from megatron_moe_opt.integration.registry import _groups_of, _plug
    from megatron_moe_opt.topology.domain_groups import release_domain_groups
    from tests.ranks.megatron import moe_config, parallel

    with parallel(ep=4):
        _, (ours,) = layers(1)
        layer = build_layer(moe_config())
        experts = layer.experts

        def hooks() -> int:
            counted = (len(one._forward_pre_hooks) for one in experts.modules())
            return sum(counted) + len(experts._load_state_dict_post_hooks)

        def plug(layer: Any, name: str, options: Options) -> None:
            options = dataclasses.replace(options, compression_ratio=4.0)
            _plug(layer, name, options, type(ours.token_dispatcher), groups, says=False)

        groups = _groups_of(layer.token_dispatcher)
        planned = PlannedLayer(layer, groups, Options(network_levels=TWO_LEVELS), plug)
        before = hooks()
        weights = [*experts.parameters()]
        for weight in weights:
            weight.grad_added_to_main_grad = True  # by stock's step; under CUDA graphs it stays
        planned.use("expert-migration:2x2")
        is_passed_over = any(weight.grad_added_to_main_grad for weight in weights)
        layer(hidden_states(0))
        during = hooks()
        planned.use("alltoall")
        planned.keep(())
        release_domain_groups(planned.groups.ep)
        layer(hidden_states(0))
        return before, during, hooks(), is_passed_over


def test_no_hooks_stay_of_dispatchers_that_are_forgotten_nor_what_fused_products_noted(ranks):
    for before, during, after, is_passed_over in ranks.run(hooks_after_trials):
        assert before == after < during
        assert not is_passed_over


def coded_in(residuals: str) -> set[tuple[str, str]]:
    """Returns what encodes and decodes experts that travel compressed, and in which threads."""
    import threading

    from megatron_moe_opt.runtime.travelling_experts import expert_codec
    from tests.ranks.megatron import parallel

    seen: set[tuple[str, str]] = set()
    with parallel(ep=4), pytest.MonkeyPatch.context() as patch:
        for code in (expert_codec.sr_encode, expert_codec.sr_decode):

            def noted(*arguments: Any, code: Any = code, name: str = code.__name__, **out: Any) -> Any:
                seen.add((name, threading.current_thread().name))
                return code(*arguments, **out)

            patch.setattr(expert_codec, code.__name__, noted)
        _, (ours,) = layers(1, compression_ratio=4.0, residuals=residuals)
        for number in range(3):
            ours(hidden_states(number))[0].square().sum().backward()
            write_weights(ours, 1.1)
    return seen


@pytest.mark.host_only(reason="asks for the name of a thread, where streams have none")
@pytest.mark.parametrize("residuals", ["last", "shared"])
def test_experts_are_encoded_and_decoded_where_they_travel(ranks, residuals):
    assert (
        ranks.run(coded_in, residuals=residuals)
        == [{("sr_encode", "experts"), ("sr_decode", "experts"), ("sr_decode", DECODING)}] * 4
    )


def lone_load(residuals: str, ahead: bool) -> float:
    """Returns the error of outputs after one rank alone has loaded the experts of its layers, which were compressed.

    Args:
        ahead: it does so before they are sent at the begin of a step; else behind that.
    """
    from tests.ranks.megatron import parallel

    with parallel(ep=4):
        stock, ours = layers(2, compression_ratio=16.0, residuals=residuals)
        communicator = ours[0].token_dispatcher.dispatcher.migrated.communicator

        def passes(model: list[Any]) -> torch.Tensor:
            hidden = hidden_states(0)
            for layer in model:
                hidden = layer(hidden)[0]
            return hidden

        for number in range(3):
            if number == 2 and ahead and dist.get_rank() == 2:
                for layer in ours:
                    layer.experts.load_state_dict(layer.experts.state_dict())
            if number:
                communicator.after_step()
                communicator.before_step()
            if number == 2 and not ahead and dist.get_rank() == 2:
                for layer in ours:
                    layer.experts.load_state_dict(layer.experts.state_dict())
            expected, got = passes(stock), passes(ours)
            for layer in (*stock, *ours):
                write_weights(layer, 1.1)
        assert not any(layer.token_dispatcher.dispatcher.migrated.codec.begins for layer in ours)
        return relative(got, expected)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("residuals", ["last", "shared"])
def test_ranks_begin_anew_together_where_one_alone_loads_its_experts(ranks, residuals, ahead):
    errors = ranks.run(lone_load, residuals=residuals, ahead=ahead)
    assert residuals == "shared" or max(errors) < 1e-6  # the first messages are whole
