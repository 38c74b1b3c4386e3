"""Where samples should live: NetMoE's assignment problem (eqs. 5-10), solved to the optimum on the CPU.

Arguments are NumPy arrays (or anything NumPy reads) or CPU tensors; integers or floats where numbers are asked for. The
result is a tensor where the first argument is one, else a NumPy array. The GIL is released, equal input gives equal
output, on every rank and for every number of threads.

Shapes: I samples, E experts, J devices, N nodes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from megatron_moe_opt.extension import load_extension

_C = load_extension()

Array: TypeAlias = "np.ndarray | torch.Tensor"

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def solve_placement(cost: Array, capacity: Array | int) -> Array:
    """Puts every sample on one sink at the least total cost, with no more than capacity[n] samples on sink n.

    Args:
        cost: [I, N], cost of sample i on sink n, of any sign; only differences inside a row matter.
        capacity: integers [N], or one for all sinks; together at least I.

    Returns:
        int64 [I], the sink of each sample. Exact for integers (within 2^62 of zero, those of a row within 2^56 of each
        other). Floats are rounded to a grid of about 2^-52 of the largest difference inside a row first, which is exact
        too where they are integers below 2^51.

    Raises:
        ValueError: shapes or dtypes that do not fit, too little or negative capacity, costs that are not finite or too
            far apart.
    """
    costs = _numbers(cost, "cost")
    if isinstance(capacity, (int, np.integer)):
        capacity = torch.full(costs.shape[-1:], int(capacity))
    return _like(cost, _C.solve_placement(costs, _indices(capacity, "capacity")))


def place_samples(num: Array, expert_device: Array, device_node: Array, capacity: Array | None = None) -> Array:
    """Puts samples on devices in two stages: as few tokens between nodes as possible, then as few between devices.

    The first stage places samples on nodes by the tokens that would cross nodes (eq. 6), the second those of each node
    on its devices by the tokens that would cross devices inside it (eq. 7). Each stage is solved to the optimum. Nodes
    with many samples are solved side by side on PyTorch's threads.

    Args:
        num: [I, E], tokens that sample i exchanges with expert e. A placement decides where this layer's combine ends
            and where the next layer's dispatch begins: pass the sum of both layers' counts, or, where their experts sit
            on different devices, both beside each other along E (and both `expert_device`).
        expert_device: integers [E], the device of each expert.
        device_node: integers [J], the node of each device, counted from 0.
        capacity: integers [J], samples that a device takes, together at least I. None: I / J on every device.

    Returns:
        int64 [I], the device of each sample.

    Raises:
        ValueError: as solve_placement; an index out of range; an integer count of 2^40 or more; no capacity given where
            I is not a multiple of J.
    """
    places = None if capacity is None else _indices(capacity, "capacity")
    experts, nodes = _indices(expert_device, "expert_device"), _indices(device_node, "device_node")
    return _like(num, _C.place_samples(_numbers(num, "num"), experts, nodes, places))


def _tensor(values: Array) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    array = np.asarray(values)
    is_taken = array.flags.writeable and min(array.strides, default=0) >= 0  # as it is, by PyTorch
    return torch.from_numpy(array if is_taken else array.copy())


def _numbers(values: Array, name: str) -> torch.Tensor:
    """Returns the values as a contiguous tensor of int64 or float64."""
    tensor = _tensor(values)
    if tensor.dtype in _INTEGERS:
        return _contiguous(tensor, torch.int64)
    if tensor.dtype in _FLOATS:
        return _contiguous(tensor, torch.float64)
    raise ValueError(f"{name} is {tensor.dtype}: pass signed integers or floats")


def _indices(values: Array, name: str) -> torch.Tensor:
    """Returns the values as a contiguous tensor of int64."""
    tensor = _tensor(values)
    if tensor.dtype in _INTEGERS:
        return _contiguous(tensor, torch.int64)
    raise ValueError(f"{name} is {tensor.dtype}: pass integers")


def _contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor in this dtype and contiguous, usually itself: these calls take a good
    part of a placement's time.
    """
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _like(given: Array, result: torch.Tensor) -> Array:
    return result if isinstance(given, torch.Tensor) else result.numpy()
