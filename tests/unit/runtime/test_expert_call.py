"""One call of experts, its saved tensors and its gradients, without dispatch."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_moe_opt.errors import ConfigurationError
from megatron_moe_opt.runtime.engine.offload import HOST_MEMORY, Kept, OffloadedTensor
from megatron_moe_opt.runtime.through_experts.expert_call import ExpertCall, Experts
from megatron_moe_opt.runtime.through_experts.expert_pipeline import _Sum
from megatron_moe_opt.runtime.through_experts.products import Products
from megatron_moe_opt.runtime.through_experts.saved_middle import addresses_of
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import ArrivedExperts
from megatron_moe_opt.schedules.memory_reuse import Restore

ROWS, HIDDEN, MIDDLE = 12, 8, 20


def experts() -> tuple[Experts, torch.nn.ParameterList]:
    """Two experts with views of what they save (chunk), a shared weight, and one parameter that is not used."""
    torch.manual_seed(3)
    shapes = (HIDDEN, 2 * MIDDLE), (MIDDLE, HIDDEN), (HIDDEN,), (3,)
    weights = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)

    def run(tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, _: object = ()) -> torch.Tensor:
        outputs = []
        for part, factors in zip(tokens.split(counts.tolist()), probs.split(counts.tolist()), strict=True):
            gate, value = (part @ weights[0]).chunk(2, dim=-1)
            outputs.append((torch.nn.functional.silu(gate) * value * factors[:, None]) @ weights[1] + weights[2])
        return torch.cat(outputs)

    return Experts(run, tuple(weights)), weights


def come_back(call: ExpertCall) -> None:
    """Brings back T_M, which was offloaded."""
    call.middle.free()
    call.middle.make_room()
    call.middle.fetch()


@pytest.mark.parametrize(("number", "taken"), [(600, 1024), (1024, 1024)])
def test_pinned_copies_are_counted_as_pytorch_rounds_them(monkeypatch, number, taken):
    tensor = torch.ones(number, dtype=torch.uint8)
    copy = OffloadedTensor(tensor)
    assert HOST_MEMORY.used == number
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    copy = OffloadedTensor(tensor)
    assert HOST_MEMORY.used == taken
    del copy
    assert HOST_MEMORY.used == 0


def test_what_is_put_again_takes_the_same_memory_of_the_host():
    kept, before = Kept(on_host=True), HOST_MEMORY.used
    HOST_MEMORY.reset_peak()
    for number in range(3):
        kept.put(torch.full((4,), float(number)))
        assert HOST_MEMORY.peak == HOST_MEMORY.used == before + 16 and kept.get().tolist() == [number] * 4
    kept.put(torch.ones(8))  # of another shape
    assert kept.get().tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("middle", "hands_over"),
    [(Restore.KEEP, False), (Restore.KEEP, True), (Restore.OFFLOAD, False), (Restore.RECOMPUTE, False)],
)
@pytest.mark.parametrize("counts", [(5, 7), (0, 12), (12, 0)])
def test_gradients_are_autograds(middle, hands_over, counts):
    module, weights = experts()
    counts = torch.tensor(counts)
    tokens, probs, grad = torch.randn(ROWS, HIDDEN), torch.rand(ROWS), torch.randn(ROWS, HIDDEN)
    leaves = tokens.clone().requires_grad_(), probs.clone().requires_grad_()
    expected = module.run(leaves[0], counts, leaves[1])
    of_leaves = torch.autograd.grad(expected, (*leaves, *weights[:3]), grad)

    call = ExpertCall(module, counts, probs, middle, addresses_of(weights), hands_over)
    buffer = tokens.clone()  # overwritten after the forward pass, as partitions that share it do
    output = call.forward(buffer)
    assert torch.equal(output, expected) and not output.requires_grad
    if middle is Restore.OFFLOAD:
        call.offload_middle()
        # fc1's output, silu's, its product with the values, and that with the probabilities: 5 times MIDDLE.
        assert (
            module.shown.middle_row_bytes == 4 * 5 * MIDDLE and HOST_MEMORY.used == ROWS * module.shown.middle_row_bytes
        )
        come_back(call)
    if hands_over:
        handed_over = call.middle.hand_over()
        assert sum(tensor.nbytes for tensor in handed_over) == ROWS * 4 * 5 * MIDDLE
        copies, freed = [tensor.clone() for tensor in handed_over], [weakref.ref(tensor) for tensor in handed_over]
        del handed_over
        assert all(tensor() is None for tensor in freed)
        call.middle.take_back(iter(copies))
    if middle is not Restore.KEEP:
        buffer.fill_(float("nan"))
    again = buffer if middle is Restore.KEEP else torch.cat((torch.zeros(2, HIDDEN), tokens))[2:]  # elsewhere
    if middle is Restore.RECOMPUTE:
        call.recompute(again)
    hooked: list[torch.Tensor] = []
    handle = weights[0].register_hook(hooked.append)  # for the sum over partitions: not now
    taken: dict[int, torch.Tensor] = {}
    found = call.backward(again, grad, taken.__setitem__)
    assert all(torch.equal(*pair) for pair in zip((*found, *(taken[i] for i in range(3))), of_leaves, strict=True))
    assert set(taken) == {0, 1, 2} and HOST_MEMORY.used == 0
    of_tokens = weakref.ref(found[0])
    del found  # the pipeline's, which sends it; the call itself lives until all partitions are through
    assert of_tokens() is None
    assert all(weight.grad is None for weight in weights)
    weights[0].sum().backward()
    assert len(hooked) == 1
    handle.remove()


def test_what_is_handed_over_comes_back_where_a_graph_beside_is_gone():
    """As that of a statistic which a hook of somebody's keeps until the next pass."""
    module, weights = experts()
    run, kept = module.run, {}

    def keeping(tokens: torch.Tensor, *given: object) -> torch.Tensor:
        kept["mean"] = (tokens @ weights[0] - 1.0).square().mean()
        return run(tokens, *given)

    counts, tokens, probs, grad = (
        torch.tensor((5, 7)),
        torch.randn(ROWS, HIDDEN),
        torch.rand(ROWS),
        torch.randn(ROWS, 8),
    )
    expected = torch.autograd.grad(module.run(tokens, counts, probs), weights[:3], grad)
    module.run = keeping
    call = ExpertCall(module, counts, probs, Restore.KEEP, addresses_of(weights), hands_over=True)
    call.forward(tokens)
    handed_over = call.middle.hand_over()
    module.run(tokens, counts, probs)  # the pass that runs again
    call.middle.take_back(iter(handed_over))
    taken: dict[int, torch.Tensor] = {}
    call.backward(tokens, grad, taken.__setitem__)
    assert all(torch.equal(taken[number], one) for number, one in enumerate(expected))


@pytest.mark.parametrize("middle", [Restore.KEEP, Restore.OFFLOAD, Restore.RECOMPUTE])
@pytest.mark.parametrize("way", ["frozen", "leaf", "made of a leaf", "parameter", "made of a parameter"])
def test_what_is_trained_outside_of_the_experts_is_refused(middle, way):
    """As the gate of a hook, whose gradient nobody would ask for; not what was made of it for all calls and is told."""
    module, weights = experts()
    leaf = torch.ones(HIDDEN, requires_grad=way != "frozen")
    gate = leaf * 1 if way.startswith("made") else leaf
    run = module.run
    module.run = lambda *given: run(*given) * gate
    if way.endswith("parameter"):
        module.parameters = *module.parameters, gate
    passes = contextlib.nullcontext()
    if way in ("leaf", "made of a leaf"):
        passes = pytest.raises(ConfigurationError, match=r"a trained tensor of shape \[8\] takes part in the experts")
    counts, tokens = torch.tensor([5, 7]), torch.randn(ROWS, HIDDEN)
    call = ExpertCall(module, counts, torch.rand(ROWS), middle, addresses_of(weights))
    with passes:
        call.forward(tokens)
        if middle is Restore.RECOMPUTE:
            call.recompute(tokens)
        assert module.shown.use_only_their_own


@pytest.mark.parametrize("counts", [(5, 7), (0, 12)])
def test_what_is_recomputed_draws_the_same_random_numbers(counts):
    """And the generator is then where it was."""
    module, weights = experts()
    run = module.run
    module.run = lambda tokens, *given: run(torch.nn.functional.dropout(tokens), *given)
    tokens, probs, grad = torch.randn(ROWS, HIDDEN), torch.rand(ROWS), torch.randn(ROWS, HIDDEN)
    leaf, state = tokens.clone().requires_grad_(), torch.get_rng_state()
    expected = torch.autograd.grad(module.run(leaf, torch.tensor(counts), probs), (leaf, *weights[:3]), grad)
    torch.set_rng_state(state)
    call = ExpertCall(module, torch.tensor(counts), probs, Restore.RECOMPUTE, addresses_of(weights))
    call.forward(tokens)
    torch.rand(3)  # the next partition's
    state = torch.get_rng_state()
    call.recompute(tokens)
    assert torch.equal(torch.get_rng_state(), state)
    taken: dict[int, torch.Tensor] = {}
    found, _ = call.backward(tokens, grad, taken.__setitem__)
    assert all(map(torch.equal, (found, *(taken[i] for i in range(3))), expected))


@pytest.mark.parametrize("may_fuse", [False, True])
def test_gradients_of_partitions_are_summed_in_float32_and_rounded_once(may_fuse):
    """Where experts travel (may_fuse=False), also those of a weight to whose main_grad a product of another step has
    added itself.
    """
    parameter = torch.zeros(64, 8, dtype=torch.bfloat16)
    parameter.grad_added_to_main_grad = not may_fuse
    parts = torch.randn(16, 64, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    total = _Sum(parameter, len(parts), may_fuse)
    for part in parts:
        total.add(part)
    rounded = total.take()
    assert torch.equal(rounded, parts.float().sum(0).bfloat16()) and total.take() is None
    one_by_one = parts[0].clone()
    for part in parts[1:]:
        one_by_one += part
    assert not torch.equal(rounded, one_by_one)


class Product(torch.nn.Module):
    """A linear layer that, like Megatron's parallel ones, leaves its bias to others."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((inputs, outputs), (outputs,)))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows @ self.weight, self.bias


class Expert(torch.nn.Module):
    """What it saves besides its products': the sum with the bias, silu's output, its product, and that with the
    probabilities: with the first product's output, of twice the size, seven times MIDDLE."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second, self.calls = way, Product(HIDDEN, 2 * MIDDLE), Product(MIDDLE, HIDDEN), 0

    def activated(self, rows: torch.Tensor, bias: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        rows = rows.add_(bias) if self.way == "in place" else rows + bias
        if self.calls > 1 and self.way == "fewer":
            return rows[:, :MIDDLE]
        if self.calls > 1 and self.way == "more":
            factors = factors.exp()
        if self.calls > 1 and self.way == "larger":
            rows = torch.cat([rows, rows])[: len(rows)]
        if self.way == "dropped out":
            rows = torch.nn.functional.dropout(rows)
        gate, value = rows.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value * factors[:, None]

    def run(self, tokens: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        rows, _ = self.second(self.activated(*self.first(tokens), factors))
        return rows

    def forward(self, tokens: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        if self.way == "checkpointed":
            return checkpoint(self.run, tokens, factors, use_reentrant=False)
        return self.run(tokens, factors)


def offloaded(way: str, counts: tuple[int, ...]) -> tuple[Experts, ExpertCall, list[torch.Tensor], list[torch.Tensor]]:
    """Returns a call whose T_M was offloaded, its input, and the gradients that autograd has for it."""
    torch.manual_seed(3)
    modules = torch.nn.ModuleList(Expert(way) for _ in counts)

    def run(tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, _: object = ()) -> torch.Tensor:
        if way == "shared":
            probs = probs + 1
        parts = zip(modules, tokens.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
        return torch.cat([expert(*part) for expert, *part in parts])

    weights = tuple(weight for one in modules for weight in (one.first.weight, one.first.bias, one.second.weight))
    module = Experts(run, weights, products=tuple(Products(one, "first", "second") for one in modules))
    given = [torch.randn(ROWS, HIDDEN), torch.rand(ROWS)]
    leaves = [one.clone().requires_grad_() for one in given]
    expected = torch.autograd.grad(run(leaves[0], torch.tensor(counts), leaves[1]).sum(), (*leaves, *weights))
    for one in modules:
        one.calls = 0
    call = ExpertCall(module, torch.tensor(counts), given[1], Restore.OFFLOAD, addresses_of(modules.parameters()))
    call.forward(given[0])
    call.offload_middle()
    return module, call, given, list(expected)


@pytest.mark.parametrize(
    ("way", "kept", "again"), [("apart", 2, 5), ("shared", 2, 5), ("in place", 2 + 3, 0), ("checkpointed", 0, 0)]
)
@pytest.mark.parametrize("counts", [(5, 7), (0, 12)])
def test_what_activations_save_is_not_offloaded_and_gradients_are_the_same(way, kept, again, counts):
    """Unless it does not follow from what the first product has left, or is saved elsewhere. Factors that all experts
    are given a part of are one memory."""
    module, call, (tokens, _), expected = offloaded(way, counts)
    assert module.shown.middle_row_bytes == 4 * kept * MIDDLE
    assert module.shown.activation_row_bytes == 4 * (again * MIDDLE + (way == "shared"))
    assert HOST_MEMORY.used == ROWS * module.shown.middle_row_bytes
    come_back(call)
    call.activate(tokens)
    taken: dict[int, torch.Tensor] = {}
    found = call.backward(tokens, torch.ones(ROWS, HIDDEN), taken.__setitem__)
    assert all(map(torch.equal, (*found, *(taken[number] for number in range(len(taken)))), expected))
    assert HOST_MEMORY.used == 0 and len(found) + len(taken) == len(expected)


@pytest.mark.parametrize("middle", [Restore.KEEP, Restore.RECOMPUTE, Restore.OFFLOAD])
@pytest.mark.parametrize(("num_experts", "owners"), [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)])
def test_experts_tell_when_half_of_their_products_have_run_in_either_pass(num_experts, owners, middle):
    """All but those of the first call. Where experts travel they run once for each owner."""
    modules = torch.nn.ModuleList(Expert("apart") for _ in range(num_experts))
    half, log = num_experts * owners, []
    counts = [ROWS // half] * half

    def run(tokens: torch.Tensor, _: torch.Tensor, probs: torch.Tensor, __: object = ()) -> torch.Tensor:
        parts = zip([*modules] * owners, tokens.split(counts), probs.split(counts), strict=True)
        return torch.cat([expert(*part) for expert, *part in parts])

    def note(number: int, returned: tuple[torch.Tensor, torch.Tensor]) -> None:
        log.append(number)
        if returned[0].requires_grad:
            returned[0].register_hook(lambda _: log.append(number))

    for number, one in enumerate(product for expert in modules for product in (expert.first, expert.second)):
        one.register_forward_hook(lambda *hooked, number=number: note(number, hooked[-1]))
    products = tuple(Products(one, "first", "second") for one in modules)
    module, tokens = Experts(run, tuple(modules.parameters()), products=products), torch.randn(ROWS, HIDDEN)
    of_call = torch.tensor(counts), torch.rand(ROWS), middle, addresses_of(modules.parameters())
    first, call = (ExpertCall(module, *of_call, halfway=lambda: log.append("halfway")) for _ in range(2))
    all_products = [*range(2 * num_experts)] * owners
    first.forward(tokens)
    assert log == all_products
    for forward in [call.forward, call.recompute] if middle is Restore.RECOMPUTE else [call.forward]:
        log.clear()
        forward(tokens)
        assert log == [*all_products[:half], "halfway", *all_products[half:]]
    if middle is Restore.OFFLOAD:
        call.offload_middle()
        come_back(call)
        call.activate(tokens)
    log.clear()
    call.backward(tokens, torch.ones(ROWS, HIDDEN), lambda *_: None)
    assert log == [*reversed(all_products[half - 1 :]), "halfway", *reversed(all_products[: half - 1])]


@pytest.mark.parametrize("way", ["fewer", "more", "larger"])
def test_activations_that_save_other_tensors_than_before_are_refused(way):
    _, call, (tokens, _), _ = offloaded(way, (5, 7))
    come_back(call)
    with pytest.raises(RuntimeError, match="experts saved other tensors when their activations were computed again"):
        call.activate(tokens)


def test_activations_that_draw_random_numbers_are_refused():
    _, call, (tokens, _), _ = offloaded("dropped out", (5, 7))
    come_back(call)
    with pytest.raises(ConfigurationError, match="--moe-opt-memory-reuse S1 and S2 .* draw random numbers"):
        call.activate(tokens)


def test_an_output_that_is_saved_beside_experts_that_travel_does_not_keep_its_graph():
    arrived = ArrivedExperts(lambda: lambda: torch.zeros(1))
    with arrived.hooks():
        output = torch.relu(torch.ones(2, requires_grad=True))
    kept = weakref.ref(output)
    del output
    assert kept() is None


def test_what_is_recomputed_chooses_the_same_dtypes():
    module, weights = experts()
    run, seen = module.run, []

    def watched(*given: object) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return run(*given)

    module.run = watched
    counts, tokens = torch.tensor((5, 7)), torch.randn(ROWS, HIDDEN)
    call = ExpertCall(module, counts, torch.rand(ROWS), Restore.RECOMPUTE, addresses_of(weights))
    with torch.autocast("cpu", torch.bfloat16):
        output = call.forward(tokens)
    call.recompute(tokens)
    assert seen == [True, True] and call._exit.dtype == output.dtype


def test_quantized_parameters_have_no_memory_of_their_own():
    """Transformer Engine's are such, whose storage has no address."""
    plain = torch.zeros(2)
    quantized = torch.nn.Parameter(torch.Tensor._make_wrapper_subclass(_Quantized, (2, 2)))
    assert addresses_of([plain, quantized]) == {plain.data_ptr()}


class _Quantized(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.Tensor._make_wrapper_subclass(cls, args[0].shape)  # what a parameter asks for: itself, detached
