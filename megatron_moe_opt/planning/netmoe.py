"""NetMoE: what a placement of samples sends, and what the next MoE layer will ask for (sections 3.1 and 3.3).

A placement of samples decides two all-to-alls, the combine of this MoE layer and the dispatch of the next (eq. 5). The
first is known when the placement is solved. The second is predicted from transition frequencies: of the tokens of a
sample that went to expert e, how many went to expert e' of the next layer.

All ranks predict and solve for themselves and must find the same, on whatever processors they run. So counts stay
integers: products go through float64 only while every number and every sum is a whole number below 2^53, where no order
of additions changes anything; and averages are taken element by element.

Shapes: I samples, E experts of this layer, F experts of the next, J devices, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FREQUENCY_BITS = 16  # frequencies are multiples of 2^-16


@dataclass(frozen=True)
class Volume:
    """Tokens of one all-to-all, by the slowest link that they cross (eqs. 3 and 4)."""

    inter: int
    """Between nodes."""
    intra: int
    """Between devices of one node."""
    local: int
    """Inside a device."""


def tokens_by_device(num: np.ndarray, expert_device: np.ndarray, num_devices: int) -> np.ndarray:
    """What each sample exchanges with each device; all that a placement is decided by.

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
    """What the samples exchange with the experts where they are placed (eqs. 3 and 4).

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


def moved_shares(before: np.ndarray, after: np.ndarray, device_node: np.ndarray) -> tuple[float, float]:
    """Shares of the samples that change their node, and their device (Table 5).

    Args:
        before, after: integers [I], the device of each sample.
        device_node: integers [J].
    """
    if not len(before):
        return 0.0, 0.0
    return float((device_node[before] != device_node[after]).mean()), float((before != after).mean())


def settle(device: np.ndarray, position_device: np.ndarray) -> np.ndarray:
    """Positions for samples that are to be on these devices; who is on the right one stays where it is.

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


class TransitionStatistics:
    """Exponentially averaged frequencies of the experts of two consecutive MoE layers."""

    def __init__(self, num_experts: int, num_next_experts: int, decay: float = 0.9) -> None:
        """`decay`: what an observation weighs when the next one is made."""
        self._decay = decay
        self._pairs = np.zeros((num_experts, num_next_experts))
        self._tokens = np.zeros(num_experts)

    def observe(self, num: np.ndarray, next_num: np.ndarray) -> None:
        """Adds what the samples did in one pass.

        Args:
            num: integers [I, E]. next_num: integers [I, F], of the same samples in the same order.
        """
        chosen = next_num.sum(axis=1, keepdims=True)
        first, then = num.astype(np.float64), next_num.astype(np.float64)
        # Tokens of a sample count as independent: its share of (e, e') is num[i, e] next_num[i, e'] / next_num[i].
        # Samples of one pass are equally long, so that the division is left out and cancels in frequencies().
        self._pairs = self._decay * self._pairs + first.T @ then
        self._tokens = self._decay * self._tokens + first.T @ chosen[:, 0].astype(np.float64)

    def frequencies(self) -> np.ndarray:
        """[E, F], of the tokens at expert e, the share that goes to e' next; zero where e was not seen."""
        return np.divide(
            self._pairs, self._tokens[:, None], out=np.zeros_like(self._pairs), where=self._tokens[:, None] > 0
        )

    def predict(self, num: np.ndarray) -> np.ndarray:
        """Tokens of each sample for each expert of the next layer.

        Args:
            num: integers [I, E], of this layer.

        Returns:
            int64 [I, F]; zeros before anything was observed.
        """
        shares = np.rint(self.frequencies() * 2**FREQUENCY_BITS)
        scaled = num.astype(np.float64) @ shares
        return np.rint(scaled * 2.0**-FREQUENCY_BITS).astype(np.int64)
