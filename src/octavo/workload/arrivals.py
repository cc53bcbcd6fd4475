"""When requests arrive: all at once, as a Poisson or gamma process, or at a rising rate.

The process is vLLM's: intervals are drawn from a gamma distribution of shape ``burstiness`` and
mean 1/rate (shape 1: exponential, so Poisson arrivals), and at a fixed rate the times are scaled so
that the last of n requests arrives at n/rate exactly, whatever the seed.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt


class Ramp(NamedTuple):
    """The rate rises from ``start`` to ``end`` requests a second, by request number."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rates(self, count: int) -> npt.NDArray[np.float64]:
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return np.asarray(self.start * (self.end / self.start) ** progress)


def check(rate: float, burstiness: float, ramp: Ramp | None) -> None:
    """Raises `ValueError` for what is no arrival process."""
    if not rate > 0:
        raise ValueError(f"--request-rate must be above 0, not {rate:g}")
    if not burstiness > 0:
        raise ValueError(f"--burstiness must be above 0, not {burstiness:g}")
    if ramp is None:
        return
    if not math.isinf(rate):
        raise ValueError("--request-rate and --ramp-up-strategy exclude each other")
    if not 0 < ramp.start <= ramp.end < math.inf:
        raise ValueError(
            "--ramp-up-start-rps must be above 0 and at most --ramp-up-end-rps, not "
            f"{ramp.start:g} to {ramp.end:g}"
        )


def arrival_times(
    count: int, rate: float, burstiness: float, ramp: Ramp | None, seed: int
) -> npt.NDArray[np.float64]:
    """[count] seconds from the start, ascending. ``rate`` inf: all at 0."""
    check(rate, burstiness, ramp)
    if ramp is None and math.isinf(rate):
        return np.zeros(count)
    rates = np.full(count, rate) if ramp is None else ramp.rates(count)
    if math.isinf(burstiness):  # the limit of ever more regular intervals
        intervals = 1 / rates
    else:
        rng = np.random.default_rng(seed)
        intervals = rng.gamma(shape=burstiness, scale=1 / (rates * burstiness))
    times = np.cumsum(intervals)
    if ramp is None and count and times[-1] > 0:
        times *= count / rate / times[-1]
    return times
