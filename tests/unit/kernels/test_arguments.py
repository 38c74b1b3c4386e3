"""What the extension takes from Python: plain tensors over memory that is there, and sizes that can be."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe_opt import kernels
from megatron_moe_opt.extension import load_extension

_C = load_extension()

ROUTING = torch.tensor([[True, False, True], [False, True, False]])
ROW_MAP = kernels.build_row_map(ROUTING)
ONE_CHUNK = kernels.ChunkList.from_counts([2], [0])


class Wrapper(torch.Tensor):
    """Stands for another tensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 4), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def fake():
    with FakeTensorMode():
        return torch.ones(2, 4)


def freed():
    tensor = torch.ones(2, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


def beyond_its_memory():
    tensor = torch.ones(2, 4)
    tensor.untyped_storage().resize_(8)
    return tensor


def misaligned():
    return torch.frombuffer(bytearray(33), dtype=torch.float32, offset=1, count=8).view(2, 4)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 4)])


PLAIN = "tokens is no plain tensor over its own memory"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fake, PLAIN),
        (Wrapper, PLAIN),
        (nested, PLAIN),
        (lambda: torch.ones(2, 4).to_sparse(), PLAIN),
        (lambda: torch.ones(2, 4).to_mkldnn(), PLAIN),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 4), 1.0, 0, torch.qint8), PLAIN),
        (lambda: torch._efficientzerotensor(2, 4), PLAIN),
        (lambda: torch.func.functionalize(lambda t: t)(torch.ones(2, 4)).to("meta"), "is on meta"),
        (freed, r"tokens of shape \[2, 4\] has no memory \(any more\): its storage holds 0 bytes"),
        (beyond_its_memory, "its storage holds 8 bytes"),
        (misaligned, r"tokens begins at an address that is no multiple .* pass tokens.clone\(\)"),
        (lambda: torch.empty(0, 1 << 62), "tokens: no machine holds the shape"),
    ],
)
def test_what_is_no_plain_memory_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        _C.permute_rows(ROW_MAP.tensors, make(), None)


def test_tensors_of_a_transform_are_refused():
    def permuted(tokens):
        return _C.permute_rows(ROW_MAP.tensors, tokens, None)[0]

    with pytest.raises(ValueError, match=PLAIN):
        torch.func.vmap(permuted)(torch.ones(3, 2, 4))
    with pytest.raises(ValueError, match=PLAIN):
        torch.func.grad(lambda tokens: permuted(tokens).sum())(torch.ones(2, 4))


def test_lazy_negations_and_conjugations_are_carried_out():
    tokens = torch.randn(2, 4)
    negated = torch._neg_view(tokens)
    assert torch.equal(kernels.permute(negated, ROUTING)[0], kernels.permute(-tokens, ROUTING)[0])
    imaginary = torch.randn(2, 4, dtype=torch.complex64).conj().imag  # negated, and not contiguous
    assert torch.equal(
        kernels.permute(imaginary.contiguous(), ROUTING)[0], kernels.permute(imaginary.clone(), ROUTING)[0]
    )
    numbers = torch.randn(2, 3, dtype=torch.complex64)
    assert torch.equal(kernels.copy_chunks(numbers.conj(), ONE_CHUNK), numbers.conj().resolve_conj())
    routed = torch.tensor([0, -1])
    with pytest.raises(ValueError, match=r"sorted_indices\[1\] is 1"):
        kernels.row_map_from_sources(torch._neg_view(routed), 1)
    expert, shared = torch.randn(20), torch.randn(20)
    sent = kernels.sr_encode(torch._neg_view(expert), torch._neg_view(shared), 5)
    assert all(map(torch.equal, sent, kernels.sr_encode(-expert, -shared, 5)))


def test_lazy_views_that_are_written_or_read_later_are_refused():
    view = torch._neg_view(torch.zeros(2, 4))
    sent = kernels.sr_encode(torch.ones(2, 4), torch.zeros(2, 4), 1)
    for call in (
        lambda: kernels.sr_decode(*sent, view),
        lambda: _C.copy_rows(view, 0, torch.zeros(2, 4), 0, 16, ONE_CHUNK.tensors),
        lambda: _C.copy_rows(torch.zeros(2, 4), 0, view, 0, 16, ONE_CHUNK.tensors),
        lambda: _C.sum_parts([view], torch.zeros(2, 4), 0, 4, torch.float32),
        lambda: _C.sum_parts([torch.zeros(2, 4)], view, 0, 4, torch.float32),
    ):
        with pytest.raises(ValueError, match=r"is a lazily negated or conjugated view: pass .*\.resolve_neg\(\)"):
            call()


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


ROWS = torch.zeros(2, 4)
MOST = (1 << 63) - 1
NOTHING = torch.zeros(0).long()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: _C.unpermute_probs(ROW_MAP.tensors, torch.ones(3), -3, torch.float32), "hidden is negative: -3"),
        (lambda g: _C.unpermute_probs(ROW_MAP.tensors, torch.ones(3), 1 << 62, torch.float32), "hidden is above"),
        (lambda g: _C.copy_rows(ROWS, -8, ROWS + 1, 0, 8, ONE_CHUNK.tensors), "source_byte is negative: -8"),
        (lambda g: _C.copy_rows(ROWS, 0, ROWS + 1, 0, -8, ONE_CHUNK.tensors), "row_bytes is negative: -8"),
        (lambda g: _C.copy_rows(ROWS, MOST, ROWS + 1, 0, MOST, ONE_CHUNK.tensors), "source_byte is above"),
        (lambda g: _C.copy_rows(ROWS, 1 << 55, ROWS + 1, 0, 8, ONE_CHUNK.tensors), "do not fit rows of 16"),
        (lambda g: _C.copy_rows(ROWS, 0, ROWS, 0, 8, ONE_CHUNK.tensors), "source and target share memory"),
        (lambda g: _C.sum_parts([ROWS], ROWS, 0, -1, torch.float32), "width is negative: -1"),
        (lambda g: _C.sum_parts([ROWS], ROWS, 0, 1 << 56, torch.float32), "do not fit rows of 16"),
        (lambda g: _C.sum_parts([ROWS], ROWS, -4, 1, torch.float32), "first_byte is negative: -4"),
        (lambda g: _C.exchange(g, ROWS, [(1 << 40, 1)], ROWS, [(0, 1)]), r"rows \[1099511627776"),
        (lambda g: _C.exchange(g, ROWS, [(0, -1)], ROWS, [(0, -1)]), "number of rows is negative"),
        (lambda g: _C.exchange(g, fake(), [(0, 1)], ROWS, [(0, 1)]), "sent is no plain tensor"),
        (lambda g: _C.Executor(-1), "the number of lanes is negative"),
        (lambda g: _C.Executor(1 << 30), "1073741824 lanes: at most 64"),
        (
            lambda g: kernels.place_samples(torch.zeros(2, 1).long(), [0], torch.tensor([MOST, 0]), [1, 1]),
            "device_node holds node 9223372036854775807",
        ),
        (lambda g: kernels.place_samples(torch.zeros(1 << 40, 0).long(), NOTHING, [0], [1]), r"more than 2\^31 - 1"),
        (lambda g: ROW_MAP.cut(0), "cannot be cut into 0 chunks"),
        (lambda g: ROW_MAP.cut(-2), "cannot be cut into -2 chunks"),
        (lambda g: kernels.build_row_map_by_sample(ROUTING, 0), r"\(2, 3\) cannot be cut into 0 samples"),
        (lambda g: kernels.build_row_map_by_sample(ROUTING, 3), r"\(2, 3\) cannot be cut into 3 samples"),
    ],
)
def test_refusals(call, message, group):
    with pytest.raises(ValueError, match=message):
        call(group)


def test_other_types_are_refused_without_a_look_at_them():
    """PyTorch crashes where it prints a tensor whose memory was freed."""
    for call in (
        lambda: _C.exchange(None, ROWS, [(0, 1)], ROWS, [(0, 1)]),
        lambda: _C.Executor(1).run([(0, [], [None], 0)], 0, False),
        lambda: _C.Executor(1).run(freed()),
        lambda: _C.build_info(freed()),
        lambda: _C.permute_rows(freed(), freed()),
        lambda: _C.Exchange.wait(freed()),
    ):
        with pytest.raises(TypeError, match="takes arguments of other types, or another number of them"):
            call()


def test_rows_of_nothing_are_not_counted_one_by_one():
    many = torch.zeros(1 << 48, 0)
    assert kernels.count_routing_map(many.bool(), 1 << 48).shape == (1 << 48, 0)
    _C.sum_parts([many], many, 0, 0, torch.float32).run()


def test_objects_that_were_never_made_are_refused():
    for call in (
        lambda: _C.Action.__new__(_C.Action).run(),
        lambda: _C.Action.run(None),
        lambda: _C.Exchange.__new__(_C.Exchange).begin(),
        lambda: _C.Exchange.wait(None),
        lambda: _C.Executor.__new__(_C.Executor).run([], 0, False),
        lambda: _C.Executor.run(None, [], 0, False),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call()


def test_an_action_keeps_what_was_checked():
    """Python may change a list, and what a tensor refers to, between the check and the run."""
    source, target = torch.arange(8.0).view(4, 2), torch.zeros(4, 2)
    lists = [torch.tensor([0]), torch.tensor([2]), torch.tensor([2])]
    copy = _C.copy_rows(source, 0, target, 0, 8, (*lists, 2))
    expected = torch.tensor([[0.0, 0], [0, 0], [0, 1], [2, 3]])
    for numbers in lists:
        numbers.fill_(1 << 40)
    memory = target.view(-1)
    source.set_(torch.empty(0))
    target.data = torch.empty(0)
    copy.run()
    assert torch.equal(memory.view(4, 2), expected)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["copy_rows", "sum_parts", "exchange"])
def test_an_action_whose_memory_was_freed_fails(kind, which, group):
    tensors = torch.ones(2, 4), torch.zeros(2, 4)
    if kind == "copy_rows":
        action = _C.copy_rows(tensors[0], 0, tensors[1], 0, 16, ONE_CHUNK.tensors)
    elif kind == "sum_parts":
        action = _C.sum_parts([tensors[0]], tensors[1], 0, 4, torch.float32)
    else:
        action = _C.exchange(group, tensors[0], [(0, 2)], tensors[1], [(0, 2)])
    tensors[which].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"has no memory \(any more\)"):
        action.run()


def test_an_exchange_runs_once(group):
    sent, received = torch.ones(2, 4), torch.zeros(2, 4)
    action = _C.exchange(group, sent, [(0, 2)], received, [(0, 2)])
    action.run()
    assert torch.equal(received, sent)
    with pytest.raises(ValueError, match="an exchange was run before"):
        action.run()
