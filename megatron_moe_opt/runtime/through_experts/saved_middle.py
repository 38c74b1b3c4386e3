"""What one call of the experts saves for its backward pass, besides its inputs and weights: T_M (MPMoE, Fig. 1).

Where it is offloaded, only what comes out of an expert's first matrix product travels, the paper's T_M. What lies
between that and the second product is the activation, and the probabilities that it is multiplied by: two thirds of the
bytes that Megatron's experts save, and little of their time. In backward the experts run once more without their
products, the first of which gives what was kept, and what their operations then save is put in the place of what was
dropped. It is the same computation on the same tensors, so that gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe_opt.runtime.engine.offload import OffloadedTensor
from megatron_moe_opt.runtime.through_experts.products import Products
from megatron_moe_opt.runtime.travelling_experts.arrived_experts import BorrowedExperts, restore_part


@dataclass(eq=False)
class _Block:
    """The memory of saved tensors that share it: bytes on the device, on the host or, while they are copied, on both.

    The views hold it, and autograd's graph the views: backward frees it as it goes.
    """

    device: torch.Tensor | None
    num_bytes: int
    host: OffloadedTensor | None = None
    is_activation: bool = False
    """Whether the block is computed again, and never offloaded."""


@dataclass(frozen=True)
class _View:
    """A saved tensor, as a place in a block or, without one, in the partition's input."""

    block: _Block | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Activation:
    """The tensors that were saved between two matrix products."""

    output: Any
    """The output of the first product: a tensor until the experts have run, then as it was saved."""
    bias: Any
    """What the first product returned beside; of a borrowed expert in the end its place, as it may be dropped."""
    version: int
    """The version of the output, which an operation in place changes."""
    has_bias: bool
    """Whether the first product returns a bias besides, as Megatron's do; and the second:"""
    ends_in_bias: bool = True
    blocks: list[_Block] = field(default_factory=list)
    """The blocks that the activation saved, in the order in which they were first saved."""
    second_input: int | None = None
    """The address of the second product's input, once that has begun."""
    input_is_saved: bool = False
    """Whether the second product saves its input, as one does whose weights are trained."""

    def owns(self, address: int) -> bool:
        """Whether memory saved for the first time is the activation's own: not the first
        product's, nor the second's.
        """
        is_new = address != _address_of(self.output)
        return is_new and self.second_input in (None, address)


class SavedMiddle:
    """T_M of one call: what its operations have saved, block by block.

    It must not know the call: that would be a cycle through autograd's graph, which nothing collects.
    """

    def __init__(self, kept: set[int], borrowed: BorrowedExperts | None) -> None:
        """
        Args:
            kept: addresses of storages that do not count as T_M.
        """
        self._kept, self._borrowed = kept, borrowed
        self.used: set[int] = set()
        """Where tensors of `kept` begin that operations have saved: buffers hold many parameters."""
        self._tokens: torch.Tensor | None = None
        self._blocks: WeakValueDictionary[int, _Block] = WeakValueDictionary()  # by address
        self._handed_over: list[_Block] = []
        """Blocks whose memory a caller has. Held here: a graph that is gone by then must not move the others up."""
        self._activations: list[_Activation] = []
        self._running: _Activation | None = None

    @contextmanager
    def reading(self, tokens: torch.Tensor) -> Iterator[None]:
        """Takes `tokens` for the partition's input inside the context."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    def hooks(self) -> saved_tensors_hooks:
        """Returns a context in which operations save here what they need for backward."""
        return saved_tensors_hooks(self._pack, self.unpack)

    @contextmanager
    def noting_activations(self, products: Sequence[Products]) -> Iterator[None]:
        """Tells what activations save from the rest, inside the context, which goes around that of `hooks`."""
        with ExitStack() as hooks:
            for one in products:
                first, second = one.module._modules[one.first], one.module._modules[one.second]
                hooks.enter_context(first.register_forward_hook(self._begin_activation))
                # Before others' hooks: what these make of the activation is not computed again.
                hooks.enter_context(second.register_forward_pre_hook(self._end_activation, prepend=True))
                hooks.enter_context(second.register_forward_hook(self._leave_activation))
            yield
        if any(one.blocks for one in self._activations):
            for one in self._activations:
                one.output, one.bias = self._pack(one.output), self._lent(one.bias)
        else:  # who checkpoints the experts saves elsewhere
            self._activations.clear()

    def hand_over(self) -> list[torch.Tensor]:
        """Returns all tensors that were saved here, which are forgotten: whoever takes them holds them alone."""
        self._handed_over = [*self._blocks.values()]
        tensors = [block.device for block in self._handed_over]
        for block in self._handed_over:
            block.device = None
        return tensors

    def take_back(self, tensors: Iterator[torch.Tensor]) -> None:
        """Takes back what was handed over, in the same order."""
        blocks, self._handed_over = self._handed_over, []
        for block in blocks:
            block.device = next(tensors)

    def forget_activations(self) -> None:
        """Frees what is computed again."""
        for block in self._blocks.values():
            if block.is_activation:
                block.device = None

    def offload(self) -> tuple[int, int]:
        """Copies all but the activations to the host. Returns the bytes of both."""
        num_bytes = [0, 0]
        for block in self._blocks.values():
            num_bytes[block.is_activation] += block.num_bytes
            if not block.is_activation:
                block.host = OffloadedTensor(block.device)
        return num_bytes[0], num_bytes[1]

    def free(self) -> None:
        """Frees on the device what is on the host; for a caller who computes and has waited for its copy."""
        for block in self._blocks.values():
            if block.host is not None:
                block.device = None

    def make_room(self) -> None:
        """Takes memory on the device for what is on the host; for a caller who computes while others fill it."""
        for block in self._blocks.values():
            if block.host is not None:
                block.device = block.host.room()

    def fetch(self) -> None:
        """Copies back what was offloaded, into the room that was made."""
        for block in self._blocks.values():
            if block.host is not None:
                block.host.to_device(block.device)
                block.host = None

    def activate(self, run: Callable[[], object], products: Sequence[Products]) -> None:
        """Computes again the activations that were not kept.

        Args:
            run: runs the experts on the same input; what it returns is nothing.

        Raises:
            RuntimeError: they save other tensors than before.
        """
        activations, self._activations = self._activations, []
        if activations:
            again = _Again(activations, self)
            with again.in_place_of(products), torch.enable_grad(), saved_tensors_hooks(again.pack, _never_read):
                run()
            again.check_end()

    def is_middle(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is saved is T_M: neither input nor parameter."""
        is_borrowed = self._borrowed is not None and self._borrowed.part(tensor) is not None
        return not is_borrowed and self._address(tensor) is not None and not self._is_input(tensor)

    def unpack(self, saved: Any) -> Any:
        """Returns a tensor that was saved; what is none as it is."""
        if not isinstance(saved, _View):
            return restore_part(saved)
        if saved.block is None:
            memory, first = self._tokens, self._tokens.storage_offset()
            if saved.dtype is not memory.dtype:
                first = first * memory.itemsize // saved.dtype.itemsize
                memory = torch.empty(0, dtype=saved.dtype, device=memory.device).set_(memory.untyped_storage())
        else:
            num_bytes = saved.block.num_bytes // saved.dtype.itemsize * saved.dtype.itemsize
            memory, first = saved.block.device[:num_bytes].view(saved.dtype), 0
        return torch.as_strided(memory, saved.shape, saved.stride, first + saved.offset)

    def _lent(self, tensor: torch.Tensor | None) -> Any:
        """Returns the place of a tensor that is a borrowed expert's, and any other as it is."""
        part = None if self._borrowed is None or tensor is None else self._borrowed.part(tensor)
        return tensor if part is None else part

    def _pack(self, tensor: torch.Tensor) -> Any:
        lent = self._lent(tensor)
        if lent is not tensor:
            return lent
        address, place = self._address(tensor), (tensor.dtype, tuple(tensor.shape), tensor.stride())
        if address is None:
            # An output itself would keep the graph that saves it alive; a parameter has attributes that are looked for.
            return tensor if tensor.is_leaf else tensor.detach()
        if self._is_input(tensor):
            behind = tensor.storage_offset() * tensor.itemsize - self._tokens.storage_offset() * self._tokens.itemsize
            return _View(None, *place, behind // tensor.itemsize)
        if self._running is not None and self._running.second_input == address:
            self._running.input_is_saved = True
        block = self._blocks.get(address)
        if block is None:
            memory = _memory_of(tensor)
            block = _Block(memory, memory.numel())
            self._blocks[address] = block
            if self._running is not None and self._running.owns(address):
                self._running.blocks.append(block)
        return _View(block, *place, tensor.storage_offset())

    def _address(self, tensor: torch.Tensor) -> int | None:
        """Returns where a saved tensor's memory begins, which is T_M's or the input's; None: it is saved as it is."""
        if not _is_plain(tensor) or not tensor.numel() or tensor.device != self._tokens.device:
            return None
        address = _address_of(tensor)
        if address in self._kept:
            self.used.add(tensor.data_ptr())
            return None
        return address

    def _is_input(self, tensor: torch.Tensor) -> bool:
        return _address_of(tensor) == _address_of(self._tokens)

    def _begin_activation(self, _: nn.Module, __: Any, returned: Any) -> None:
        output, bias = returned if isinstance(returned, tuple) else (returned, None)
        self._running = _Activation(output, bias, output._version, isinstance(returned, tuple))
        self._activations.append(self._running)

    def _end_activation(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._running.second_input = _address_of(inputs[0])

    def _leave_activation(self, _: nn.Module, __: Any, returned: Any) -> None:
        running, self._running = self._running, None
        running.ends_in_bias = isinstance(returned, tuple)
        if running.output._version != running.version:  # it is no longer what the activation began with
            running.blocks.clear()
        for block in running.blocks:
            block.is_activation = True


class _Again:
    """Runs experts a second time, without their products, for what their activations save."""

    def __init__(self, activations: Sequence[_Activation], saved: SavedMiddle) -> None:
        self._activations, self._saved = iter(activations), saved
        self.hidden = 0
        """The hidden size of the experts' input, and so of their output."""
        self._input_is_saved = False
        self.ends_in_bias = True
        """Whether the second product of the activation under way returns a bias besides."""
        self._left: list[_Block] | None = None
        """The blocks that the activation under way has not saved yet; None: none runs, or it left none."""
        self._seen: dict[int, torch.Tensor] = {}
        """Memory that was seen, by address: alive, so that no address is used twice. Activations may share some."""

    @contextmanager
    def in_place_of(self, products: Sequence[Products]) -> Iterator[None]:
        """Puts itself in the place of the products inside the context: they ask and tell it instead of multiplying."""
        with ExitStack() as stack:
            for one in products:
                modules = one.module._modules
                for name, stand_in in ((one.first, _First(self)), (one.second, _Second(self))):
                    stack.callback(modules.__setitem__, name, modules[name])
                    modules[name] = stand_in
            yield

    def begin(self) -> Any:
        """Returns what the first product returned."""
        one = next(self._activations, None)
        if one is None:
            raise _other_tensors()
        output = self._saved.unpack(one.output).detach().requires_grad_()
        self._left, self._seen[_address_of(output)] = one.blocks or None, output
        self._input_is_saved, self.ends_in_bias = one.input_is_saved, one.ends_in_bias
        return (output, self._saved.unpack(one.bias)) if one.has_bias else output

    def pack(self, tensor: torch.Tensor) -> None:
        """Puts what an operation saves in its place, if it is an activation's."""
        address = _address_of(tensor)
        if self._left is None or address in self._seen or not self._saved.is_middle(tensor):
            return
        memory = _memory_of(tensor)
        if not self._left or self._left[0].num_bytes != memory.numel():
            raise _other_tensors()
        self._seen[address] = self._left.pop(0).device = memory

    def end(self, second_input: torch.Tensor) -> None:
        """Takes what the second product saved."""
        if self._input_is_saved:
            self.pack(second_input)
        if self._left:
            raise _other_tensors()
        self._left = None

    def check_end(self) -> None:
        """Raises RuntimeError where fewer activations ran."""
        if next(self._activations, None) is not None:
            raise _other_tensors()


class _First(nn.Module):
    def __init__(self, again: _Again) -> None:
        super().__init__()
        self.again = again

    def forward(self, tokens: torch.Tensor, *_: Any) -> Any:
        self.again.hidden = tokens.size(-1)
        return self.again.begin()


class _Second(nn.Module):
    def __init__(self, again: _Again) -> None:
        super().__init__()
        self.again = again

    def forward(self, activated: torch.Tensor, *_: Any) -> Any:
        self.again.end(activated)
        # One zero in the output's shape: nobody reads it, but the experts may put theirs together.
        output = activated.new_zeros(()).expand(*activated.shape[:-1], self.again.hidden)
        return (output, None) if self.again.ends_in_bias else output


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns where the memory of tensors begins; of quantized parameters, which have none of their own, nothing."""
    return {_address_of(tensor) for tensor in tensors if _is_plain(tensor)}


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _never_read(_: Any) -> torch.Tensor:
    raise AssertionError("experts that run again for what they save have no backward pass")


def _other_tensors() -> RuntimeError:
    return RuntimeError(
        "experts saved other tensors when their activations were computed again: give --moe-opt-memory-reuse S3 or S4, "
        "which compute all of it again"
    )
