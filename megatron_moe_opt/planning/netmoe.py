"""NetMoE: what a placement of samples sends, and what the next MoE layer will ask for (sections 3.1 and 3.3).

A placement of samples decides two all-to-alls, the combine of this MoE layer and the dispatch of the next (eq. 5). The
first is known when the placement is solved. The second is predicted from statistics of earlier passes.

All ranks predict and solve for themselves, from the same counts, and must find the same.

Shapes: I samples, E experts, J devices, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WEIGHT_BITS = 16  # weights of the prediction are multiples of 2^-16, and below MAX_WEIGHT
MAX_WEIGHT = 2.0**10
MAX_PASSES_BETWEEN_FITS = 16
MOST_EXPERTS_LOOKING_BACK = 64  # with more, fits of twice as many unknowns would keep decisions waiting


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


def known_of_samples(num: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """What the next layer is predicted from: the samples' counts in this layer, and in the one before it.

    What a sample did earlier tells what sort of text it is where this layer's counts alone leave it open: much where
    counts are small (many experts, short samples), little else.

    Args:
        num: integers [I, E].
        before: integers [I, E] of the same samples, None in the first layer.

    Returns:
        [I, E] or [I, 2 E].
    """
    if before is None or num.shape[1] > MOST_EXPERTS_LOOKING_BACK:
        return num
    return np.hstack([num, before])


class TransitionStatistics:
    """What a sample's tokens in one MoE layer tell about the next layer: a linear map, fitted as training goes on.

    The paper takes transition frequencies, shares of the tokens at expert e that go to e' next. Counts by sample know
    them only mixed: what most samples do alike prevails, and what sets a sample apart, which is what its placement is
    decided by, is predicted far too weak. The linear map with the least squared error sees through the mixture. With x
    the counts of a sample and y those of the next layer, averaged exponentially over passes:

        W = (E[x x'] + r I)^-1 E[x y'],    r = the mean count of an expert, the variance that chance alone gives counts

    With known_of_samples, x holds the counts of two layers.

    All ranks fit and predict alike on any processor: sums of products are exact, as they are whole numbers below 2^53,
    and everything else goes element by element (Gauss-Jordan elimination, which needs no pivots here).
    """

    def __init__(self, num_inputs: int, num_outputs: int, decay: float = 0.95) -> None:
        """
        Args:
            num_inputs: what is known of a sample: its counts for each expert.
            num_outputs: what is predicted of the next layer: its experts, or its devices.
            decay: what an observed pass weighs when the next one is observed.
        """
        self._decay = decay
        self._moments = np.zeros((num_inputs, num_inputs + num_outputs))  # of x with x, and of x with y
        self._tokens = 0.0
        self._weights = np.zeros((num_inputs, num_outputs))
        self._passes = self._fitted = 0

    def observe(self, num: np.ndarray, then: np.ndarray) -> None:
        """Learns what the samples did in one pass.

        Args:
            num: integers [I, inputs], tokens of each sample for each expert (eq. 2).
            then: integers [I, outputs], of the same samples in the next layer.
        """
        counts = num.astype(np.float64)
        self._moments = self._decay * self._moments + counts.T @ np.hstack([num, then]).astype(np.float64)
        self._tokens = self._decay * self._tokens + float(num.sum())
        self._passes += 1
        # The longer it has been learnt from, the less one more pass changes.
        if self._passes - self._fitted > min(self._fitted // 4, MAX_PASSES_BETWEEN_FITS):
            self._weights, self._fitted = self._fit(), self._passes

    def predict(self, num: np.ndarray) -> np.ndarray:
        """What the samples will do in the next layer.

        Args:
            num: integers [I, inputs].

        Returns:
            int64 [I, outputs], none negative; zeros before anything was observed.
        """
        scaled = num.astype(np.float64) @ self._weights
        return np.rint(scaled * 2.0**-WEIGHT_BITS).clip(0).astype(np.int64)

    def _fit(self) -> np.ndarray:
        """[E, outputs], in units of 2^-WEIGHT_BITS, whole numbers."""
        size = len(self._moments)
        system = self._moments.copy()
        system[np.arange(size), np.arange(size)] += max(self._tokens, 1.0) / size
        products = np.empty_like(system)  # fresh memory for each would cost more than the arithmetic
        for k in range(size):
            rest, product = system[:, k + 1 :], products[:, k + 1 :]
            rest[k] /= system[k, k]
            factors = system[:, k].copy()
            factors[k] = 0.0
            np.multiply(factors[:, None], rest[k], out=product)
            rest -= product
        return np.rint(system[:, size:].clip(-MAX_WEIGHT, MAX_WEIGHT) * 2**WEIGHT_BITS)
