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

LOWEST_RATE, HIGHEST_RATE = 1e-6, 1e9  # requests a second
LATEST = 1e10  # seconds: times beyond are not told apart to the microsecond


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
    if not (LOWEST_RATE <= rate <= HIGHEST_RATE or rate == math.inf):  # nan neither
        raise ValueError(
            f"--request-rate is from {LOWEST_RATE:g} to {HIGHEST_RATE:g} a second, or inf, not "
            f"{rate:g}"
        )
    if not burstiness > 0:
        raise ValueError(f"--burstiness must be above 0, not {burstiness:g}")
    if ramp is None:
        return
    if not math.isinf(rate):
        raise ValueError("--request-rate and --ramp-up-strategy exclude each other")
    if not LOWEST_RATE <= ramp.start <= ramp.end <= HIGHEST_RATE:
        raise ValueError(
            f"--ramp-up-start-rps is from {LOWEST_RATE:g} to {HIGHEST_RATE:g} and at most "
            f"--ramp-up-end-rps, not {ramp.start:g} to {ramp.end:g}"
        )


def arrival_times(
    count: int, rate: float, burstiness: float, ramp: Ramp | None, seed: int
) -> npt.NDArray[np.float64]:
    """[count] seconds from the start, ascending. ``rate`` inf: all at 0. Raises `ValueError` for
    what numbers cannot express.
    """
    check(rate, burstiness, ramp)
    if ramp is None and math.isinf(rate):
        return np.zeros(count)
    rates = np.full(count, rate) if ramp is None else ramp.rates(count)
    if math.isinf(burstiness):  # the limit of ever more regular intervals
        intervals = 1 / rates
    else:
        rng = np.random.default_rng(seed)
        with np.errstate(over="ignore", invalid="ignore"):
            intervals = rng.gamma(shape=burstiness, scale=1 / (rates * burstiness))
    times = np.cumsum(intervals)
    if count and not 0 < times[-1] < math.inf:  # nan neither
        raise ValueError(f"--burstiness {burstiness:g}: intervals are beyond what numbers express")
    if ramp is None and count:
        times *= count / rate / times[-1]
    if count and times[-1] > LATEST:
        flag = "--request-rate" if ramp is None else "--ramp-up-start-rps"
        raise ValueError(
            f"{flag} is too low for {count} requests: the last would come after {times[-1]:.3g} s, "
            f"beyond {LATEST:g}"
        )
    return times
