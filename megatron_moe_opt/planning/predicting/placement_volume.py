"""NetMoE: what a placement of samples sends, and who moves for it (section 3.1).

Shapes: I samples, E experts, J devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Volume:
    """Tokens of one all-to-all, by the slowest link that they cross (eqs. 3 and 4)."""

    inter: int
    """Tokens that cross nodes."""
    intra: int
    """Tokens that cross devices of one node."""
    local: int
    """Tokens that stay on their device."""


def tokens_by_device(num: np.ndarray, expert_device: np.ndarray, num_devices: int) -> np.ndarray:
    """Returns what each sample exchanges with each device; all that a placement is decided by.

    Args:
        num: integers [I, E], tokens of sample i for expert e (eq. 2).
        expert_device: integers [E], the device of each expert.

    Returns:
        int64 [I, J].
    """
    on_device = np.zeros((len(num), num_devices), np.int64)
    np.add.at(on_device.T, expert_device, num.T)
    return on_device


def placement_volume(on_device: np.ndarray, sample_device: np.ndarray, device_node: np.ndarray) -> Volume:
    """Returns what the samples exchange with the experts where they are placed (eqs. 3 and 4).

    Args:
        on_device: int64 [I, J], see tokens_by_device.
        sample_device: integers [I], the device of each sample.
        device_node: integers [J], the node of each device.
    """
    node = device_node[sample_device]
    same_device = np.arange(on_device.shape[1]) == sample_device[:, None]
    same_node = device_node == node[:, None]
    local, in_node = (int(on_device[mask].sum()) for mask in (same_device, same_node))
    return Volume(inter=int(on_device.sum()) - in_node, intra=in_node - local, local=local)


def crossings(here: np.ndarray, there: np.ndarray, node_of: np.ndarray) -> tuple[int, int]:
    """Returns how many of what goes from one place to another cross nodes, and how many cross places of one node.

    Args:
        here, there: integers [I], places: devices or ranks.
        node_of: the node of each place.
    """
    between = int((node_of[here] != node_of[there]).sum())
    return between, int((here != there).sum()) - between


def moved_shares(before: np.ndarray, after: np.ndarray, device_node: np.ndarray) -> tuple[float, float]:
    """Returns the shares of the samples that change their node, and their device (Table 5).

    Args:
        before, after: integers [I], the device of each sample.
        device_node: integers [J].
    """
    if not len(before):
        return 0.0, 0.0
    between, inside = crossings(before, after, device_node)
    return between / len(before), (between + inside) / len(before)


def settle(device: np.ndarray, position_device: np.ndarray) -> np.ndarray:
    """Returns positions for samples that are to be on these devices; who is on the right one stays where it is.

    Args:
        device: integers [I], the device of the sample that is now at each position.
        position_device: integers [I], the device of each position, as often as samples are to be on it.

    Returns:
        int64 [I], the new position of the sample at each position: a permutation.
    """
    move = np.arange(len(device))
    leaving = np.flatnonzero(device != position_device)
    # As many samples come to a device as leave it: both lists have each device equally often.
    coming = leaving[np.argsort(device[leaving], kind="stable")]
    move[coming] = leaving[np.argsort(position_device[leaving], kind="stable")]
    return move
