"""How long prompts and answers are: a distribution over whole tokens, with what sums need of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

LONGEST = 1 << 18  # tokens; what lies beyond is cut there, as a server's limit does
_ERF = np.vectorize(math.erf, otypes=[np.float64])

KINDS = "128 or fixed:128, uniform:64-192, geometric:128, lognormal:128,1.2 (mean, cv)"


@dataclass(frozen=True, eq=False)
class Lengths:
    """``shares[k]`` is the share of those with k tokens; none has none."""

    text: str
    shares: npt.NDArray[np.float64]

    @staticmethod
    def fixed(tokens: int) -> Lengths:
        return Lengths.observed([tokens], f"{tokens:,} each")

    @staticmethod
    def uniform(low: int, high: int) -> Lengths:
        """Every whole number from ``low`` to ``high`` alike."""
        shares = np.zeros(high + 1)
        shares[low:] = 1 / (high + 1 - low)
        return Lengths(f"uniform from {low:,} to {high:,}", shares)

    @staticmethod
    def geometric(mean: float) -> Lengths:
        """An end as likely after each token as after any other: 1 - (1 - 1/mean)^k have at most k.
        It is the exponential distribution in whole tokens.
        """
        k = np.arange(1, LONGEST)
        end = 1 / mean
        # By powers, not products, so that far tails lose no digits.
        shares = end * np.exp((k - 1) * math.log1p(-end)) if end < 1 else 1.0 * (k == 1)
        return _cut(f"geometric, mean {mean:g}", np.concatenate([[0], shares]))

    @staticmethod
    def lognormal(mean: float, cv: float) -> Lengths:
        """exp of a normal, of this mean and coefficient of variation, in whole tokens from 1 on."""
        variance = math.log1p(cv * cv)
        center, width = math.log(mean) - variance / 2, math.sqrt(2 * variance)
        edges = (np.log(np.arange(1, LONGEST) + 0.5) - center) / width
        below = np.concatenate([[0], (1 + _ERF(edges)) / 2])  # below half a token: one
        return _cut(f"lognormal, mean {mean:g}, cv {cv:g}", np.concatenate([[0], np.diff(below)]))

    @staticmethod
    def observed(lengths: Sequence[int], text: str) -> Lengths:
        """As often as they occur."""
        counts = np.bincount(np.asarray(lengths, np.int64))
        return Lengths(text, counts / counts.sum())

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.shares))

    @cached_property
    def mean(self) -> float:
        return float(self.shares @ self.tokens)

    @cached_property
    def square(self) -> float:
        """The mean of the square."""
        return float(self.shares @ self.tokens.astype(np.float64) ** 2)

    @property
    def cv(self) -> float:
        """Standard deviation ÷ mean."""
        return math.sqrt(max(0.0, self.square - self.mean**2)) / self.mean

    @cached_property
    def beyond(self) -> npt.NDArray[np.float64]:
        """[k] the share of those with more than k tokens, from k = 0 on."""
        return np.clip(np.cumsum(self.shares[::-1])[::-1][1:], 0, 1)

    def longest_of(self, count: int) -> float:
        """The expected length of the longest of ``count`` drawn independently: the sum over k of
        1 - P(a length is at most k)^count.
        """
        return float(self.any_beyond(count).sum())

    def any_beyond(self, count: int) -> npt.NDArray[np.float64]:
        """[k] the chance that one of ``count`` has more than k tokens."""
        with np.errstate(divide="ignore"):
            return np.asarray(-np.expm1(count * np.log1p(-self.beyond)))

    def steps_of(self, size: float) -> float:
        """The mean of ceil(length / size)."""
        return float(self.shares @ np.ceil(self.tokens / size))


def _cut(text: str, shares: npt.NDArray[np.float64]) -> Lengths:
    """The longest gets what is left for longer ones; a tail that does not count is left out."""
    shares = np.append(shares, max(0.0, 1 - shares.sum()))
    kept = int(np.searchsorted(np.cumsum(shares), 1 - 1e-13)) + 1
    shares = shares[:kept]
    return Lengths(text, shares / shares.sum())


def parse(text: str) -> Lengths:
    """A distribution of `KINDS`. Raises `ValueError`."""
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        kind, rest = "fixed", kind
    if kind in ("fixed", "uniform"):
        low, _, high = rest.partition("-")
        bounds = [low, high if kind == "uniform" else low]
        if not all(b.isascii() and b.isdigit() and len(b) < 10 for b in bounds) or (
            kind == "fixed" and rest != low
        ):
            raise ValueError(f"{text!r} is not a length: {KINDS}")
        first, last = map(int, bounds)
        if not 1 <= first <= last <= LONGEST:
            raise ValueError(f"{text!r}: lengths are from 1 to {LONGEST:,} tokens, the least first")
        return Lengths.fixed(first) if kind == "fixed" else Lengths.uniform(first, last)
    names = {"geometric": 1, "exponential": 1, "lognormal": 2}
    figures = rest.split(",")
    try:
        values = [float(figure) for figure in figures]
    except ValueError:
        values = []
    if kind not in names or len(values) != names[kind]:
        raise ValueError(f"{text!r} is not a length: {KINDS}")
    if not 1 <= values[0] <= LONGEST / 4:  # nan neither
        raise ValueError(f"{text!r}: a mean is from 1 to {LONGEST // 4:,} tokens")
    if kind != "lognormal":
        return Lengths.geometric(values[0])
    if not 0 < values[1] <= 10:
        raise ValueError(f"{text!r}: a coefficient of variation is above 0 and at most 10")
    return Lengths.lognormal(*values)
