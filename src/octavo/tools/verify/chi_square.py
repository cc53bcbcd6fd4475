"""Pearson's test of whether draws come from a distribution that is known exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LEAST_EXPECTED = 5.0  # Cochran, "Some methods for strengthening the common χ² tests", 1954
_ROUNDING = 1e-3  # that probabilities may be off one in all
_TERMS = 100_000
_TINY = 1e-300


def chi_square(
    counts: Sequence[int] | npt.NDArray[np.integer],
    probabilities: Sequence[float] | npt.NDArray[np.floating],
    least_expected: float = LEAST_EXPECTED,
) -> float:
    """The probability that ``counts`` [n], how often each of n outcomes came, are as far from what
    ``probabilities`` [n] let expect, or farther, if these are the truth.

    It is spread evenly over 0 to 1 if they are, and near 0 if they are not. Pearson's statistic
    (1900), with outcomes expected less than ``least_expected`` times taken together: five are
    enough to read p near 0.01, but far out a cell of five comes true a hundred times as often as p
    says and more. 0 if something came whose probability is 0; 1 if nothing is left to compare.
    Raises `ValueError` where the arguments are no counts or no distribution.
    """
    came = np.asarray(counts, dtype=np.float64)
    exact = np.asarray(probabilities, dtype=np.float64)
    if came.ndim != 1 or came.shape != exact.shape:
        raise ValueError(f"counts have shape {came.shape}, probabilities {exact.shape}")
    if not (exact >= 0).all() or abs(exact.sum() - 1) > _ROUNDING:
        raise ValueError("the probabilities are no distribution")
    total = came.sum()
    if not (came >= 0).all() or not total > 0:
        raise ValueError("the counts are not of any draws")
    if came[exact == 0].any():
        return 0.0
    expected = exact / exact.sum() * total
    order = np.argsort(expected)
    came, expected = came[order], expected[order]
    # The rarest outcomes together, as many as it takes that all cells are large enough.
    rare = int(np.searchsorted(expected, least_expected))
    if rare:
        sums = np.cumsum(expected)
        pooled = max(rare, int(np.searchsorted(sums, least_expected)) + 1)
        expected = np.concatenate((expected[:pooled].sum(keepdims=True), expected[pooled:]))
        came = np.concatenate((came[:pooled].sum(keepdims=True), came[pooled:]))
    if len(expected) < 2:
        return 1.0
    statistic = float(((came - expected) ** 2 / expected).sum())
    return upper_gamma((len(expected) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x) = Γ(a, x) / Γ(a), the regularized upper incomplete gamma function, for a > 0, x >= 0.

    By the power series of the lower function where x < a + 1 (NIST DLMF 8.7.1), and by the
    continued fraction elsewhere (8.9.2, in the even form; evaluated as in Lentz, 1976).
    """
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, _TERMS):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1 - scale * total)
    b = x + 1 - a
    c, d = 1 / _TINY, 1 / b
    fraction = d
    for n in range(1, _TERMS):
        numerator = n * (a - n)
        b += 2
        d = 1 / _nonzero(numerator * d + b)
        c = _nonzero(b + numerator / c)
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return min(1.0, scale * fraction)


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
