"""NetMoE: what the next MoE layer will ask for (section 3.3).

A placement of samples decides two all-to-alls, the combine of this MoE layer and the dispatch of the next (eq. 5). The
first is known when the placement is solved. The second is predicted from what samples did in earlier passes.

All ranks predict for themselves, from the same counts, and must find the same.

Shapes: I samples, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WINDOW = 256  # samples that predictions are made from
WINDOW_PASSES = 16  # the least number of passes that a full window is from
MAX_PASSES_BETWEEN_FITS = 16
BLOCK = 128  # samples that are predicted at a time
LOCAL = 2.0  # what resemblance to single samples explains a priori, in units of what the linear part does
ROOT_SCALE = 16.0  # square roots of counts are multiples of its inverse
NEAR_BITS, SHARE_BITS, WEIGHT_BITS = 10, 10, 16  # so are resemblances, shares of samples and slopes, of 2 ** -BITS
MAX_SHARE, MAX_WEIGHT = 2.0**19, 2.0**10  # with which all sums of products stay below 2^53, see _share_bits


def known_of_samples(num: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """Returns what the next layer is predicted from: the samples' counts in this layer, and in the one before it.

    What a sample did earlier tells what sort of text it is where this layer's counts alone leave it open: much where
    counts are small (many experts, short samples), little else.

    Args:
        num: integers [I, E].
        before: integers [I, E] of the same samples, None in the first layer.

    Returns:
        [I, E] or [I, 2 E].
    """
    return num if before is None else np.hstack([num, before])


class NextLayerPrediction:
    """Predicts from a sample's tokens in one MoE layer what they do in the next, learning from samples as training goes
    on.

    The paper takes transition frequencies, shares of the tokens at expert e that go to e' next. Counts by sample know
    them only mixed: what most samples do alike prevails, and what sets a sample apart, which is what its placement is
    decided by, is predicted far too weak. Here the last WINDOW samples are kept, x their counts and y those of the next
    layer, and y is predicted for others by kernel ridge regression (a Gaussian process's mean):

        y(x) = y0 + sum_i k(x, x_i) a_i,    a = (K + r I)^-1 (Y - y0)
        k(x, z) = (x - x0)'(z - x0) / v  +  LOCAL / (1 + |sqrt x - sqrt z|^2 / 4 d)^4

    The first term is a linear map. The second lets samples that resemble each other do alike, which no linear map can
    say of several kinds of text. Chance moves the root of every count alike, whatever the count: so distances are of
    roots. x0 and y0 are means over the window, v the variance of x and d the mean square distance there, and r is as
    large a part of k(x, x) as chance is of v, where chance gives a count its mean as variance.

    All ranks fit and predict alike on any processor: sums of products are exact, as they are whole numbers below 2^53,
    and everything else goes element by element (elimination needs no pivots here).
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        """
        Args:
            num_inputs: what is known of a sample: its counts for each expert.
            num_outputs: what is predicted of the next layer: its experts, or its devices.
        """
        self._known = np.zeros((0, num_inputs))
        self._then = np.zeros((0, num_outputs))
        self._passes = self._fitted = 0
        self._fit: _Fit | None = None

    def observe(self, num: np.ndarray, then: np.ndarray) -> None:
        """Learns what the samples did in one pass.

        Args:
            num: integers [I, inputs], tokens of each sample for each expert (eq. 2).
            then: integers [I, outputs], of the same samples in the next layer.
        """
        if not len(num):
            return
        taken = min(len(num), max(WINDOW - len(self._known), WINDOW // WINDOW_PASSES))
        rows = (np.arange(taken) * len(num) // taken + self._passes) % len(num)
        self._known = np.concatenate([self._known, num[rows]])[-WINDOW:]
        self._then = np.concatenate([self._then, then[rows]])[-WINDOW:]
        self._passes += 1
        # The longer training has gone on, the less the routers change from pass to pass.
        if self._passes - self._fitted > min(self._fitted // (4 * WINDOW_PASSES), MAX_PASSES_BETWEEN_FITS):
            self._fit, self._fitted = _Fit.of(self._known, self._then), self._passes

    def predict(self, num: np.ndarray) -> np.ndarray:
        """Predicts what the samples will do in the next layer.

        Args:
            num: integers [I, inputs].

        Returns:
            int64 [I, outputs], none negative; zeros before anything was observed.
        """
        if self._fit is None or not len(num):
            return np.zeros((len(num), self._then.shape[1]), np.int64)
        # A block and its resemblances fit into a core's cache.
        blocks = [self._fit.predict(num[row : row + BLOCK].astype(np.float64)) for row in range(0, len(num), BLOCK)]
        return np.rint(np.concatenate(blocks)).clip(0).astype(np.int64)


@dataclass(frozen=True)
class _Fit:
    """A fit of W samples, and what predictions take from it."""

    center: np.ndarray
    """The mean of the inputs, x0 to whole numbers, [inputs]."""
    roots: np.ndarray
    """The roots of the samples' counts, [W, inputs], see _roots."""
    spread: float
    """The mean square distance d, in the square of the roots' units."""
    mean: np.ndarray
    """The mean of the outputs, y0 to whole numbers, [outputs]."""
    slopes: np.ndarray
    """The linear term, [inputs, outputs], whole numbers in units of 2^-WEIGHT_BITS."""
    shares: np.ndarray
    """The samples' shares, [W, outputs]: LOCAL times a, whole numbers in units of 2^-share_bits."""
    share_bits: int

    @classmethod
    def of(cls, known: np.ndarray, then: np.ndarray) -> _Fit:
        """Fits W samples of whole numbers; known: [W, inputs], then: [W, outputs]."""
        size = len(known)
        center, mean, roots = np.rint(known.mean(axis=0)), np.rint(then.mean(axis=0)), _roots(known)
        centered, distance = known - center, _distance(roots, roots)
        squares = max(float((centered * centered).sum()), 1.0)
        variance, spread = squares / size, max(float(distance.sum()) / size**2, 1.0)
        system = np.hstack([centered @ centered.T / variance + LOCAL * _resemblance(distance, spread), then - mean])
        chance = min(max(float(known.sum()) / squares, 2.0**-10), 1.0)
        system[np.arange(size), np.arange(size)] += (1.0 + LOCAL) * chance
        bits = _share_bits(centered)
        shares = np.rint(_solve(system).clip(-MAX_SHARE, MAX_SHARE) * 2.0**bits)
        slopes = centered.T @ shares / (variance * 2.0**bits)
        slopes = np.rint(slopes.clip(-MAX_WEIGHT, MAX_WEIGHT) * 2**WEIGHT_BITS)
        return cls(center, roots, spread, mean, slopes, LOCAL * shares, bits)

    def predict(self, num: np.ndarray) -> np.ndarray:
        """Predicts [I, outputs] for samples num, whole numbers [I, inputs]."""
        near = _resemblance(_distance(_roots(num), self.roots), self.spread)
        near *= 2**NEAR_BITS
        np.rint(near, out=near)
        linear = (num - self.center) @ self.slopes * 2.0**-WEIGHT_BITS
        return self.mean + linear + near @ self.shares * 2.0 ** -(NEAR_BITS + self.share_bits)


def _share_bits(centered: np.ndarray) -> int:
    """Returns how fine shares are that the columns of `centered`, [W, inputs], are multiplied with: coarser where a
    sample has more than 2^16 tokens for an expert, so that sums of W products stay below 2^53.
    """
    return min(SHARE_BITS, int(53 - np.log2(WINDOW * MAX_SHARE)) - int(np.abs(centered).max()).bit_length())


def _roots(counts: np.ndarray) -> np.ndarray:
    """Returns square roots in units of 1 / ROOT_SCALE, whole numbers."""
    return np.rint(np.sqrt(counts) * ROOT_SCALE)


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the squares [A, B] of the distances between a, [A, inputs], and b, [B, inputs]."""
    distance = a @ (-2.0 * b.T)
    distance += (a * a).sum(axis=1)[:, None]
    distance += (b * b).sum(axis=1)
    return distance


def _resemblance(distance: np.ndarray, spread: float) -> np.ndarray:
    """Returns how much samples at these square distances [A, B] resemble each other, 1 where there is no distance:
    nearly a Gaussian, without a library's exp. Overwrites `distance`.
    """
    distance /= 4.0 * spread
    distance += 1.0
    np.divide(1.0, distance, out=distance)
    for _ in range(2):
        distance *= distance
    return distance


def _solve(system: np.ndarray) -> np.ndarray:
    """Solves a positive definite system, the matrix and right sides [W, W + outputs], overwritten: [W, outputs]."""
    size = len(system)
    products = np.empty_like(system)  # fresh memory for each would cost more than the arithmetic
    for k in range(size):
        system[k, k + 1 :] /= system[k, k]
        rest, product = system[k + 1 :, k + 1 :], products[k + 1 :, k + 1 :]
        np.multiply(system[k + 1 :, k, None], system[k, k + 1 :], out=product)
        rest -= product
    solution = system[:, size:]
    for k in range(size - 1, 0, -1):
        solution[:k] -= system[:k, k, None] * solution[k]
    return solution
