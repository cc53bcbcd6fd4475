"""Up to which rate of arrival a setting keeps an SLO, and keeps up with the load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.tools.plan.tune_trial import Report, Trials, TuneTrial, kept
from octavo.tools.workload.datasets import Sample

LASTING = 4  # median times of an answer that a load lasts at least


def arrival_rate(samples: Sequence[Sample]) -> float:
    """Requests a second, from the start to the last arrival; inf: all at once."""
    seconds = max(sample.arrival or 0.0 for sample in samples)
    return len(samples) / seconds if seconds else math.inf


def sustained(
    trials: Trials,
    trial: TuneTrial,
    samples: Sequence[Sample],
    *,
    in_time: Callable[[], bool] = lambda: True,
    report: Report = lambda _: None,
) -> list[tuple[float, TuneTrial]]:
    """The engine of a trial under its load at other speeds, ascending, to find where it no longer
    keeps the SLO: doubled or halved until that changes, then five bisections. Arrivals at
    speed 2 come in half the time; faster than that they last for `LASTING` answers it is a
    burst and no load. Empty where all come at once.
    """
    found = {1.0: trial}
    rate = arrival_rate(samples)
    if math.isinf(rate):
        return []
    if trial.figures.completed < trials.slo.attainment * trial.figures.requests:
        return list(found.items())  # what is refused is refused at any speed
    answer = trial.figures.latencies["e2el"].p50 / 1e3
    most = min(64.0, len(samples) / rate / (LASTING * answer))

    def holds(speed: float) -> bool:
        if speed not in found:
            report(f"the best setting under {speed:.3g} times the load")
            faster = [
                replace(sample, arrival=(sample.arrival or 0.0) / speed) for sample in samples
            ]
            other = trials.run(trial.choice, faster)
            assert other is not None
            found[speed] = other
        return kept(found[speed], trials.slo)

    low = high = 1.0
    if holds(1.0):
        while 2 * high <= most and holds(high) and in_time():
            low, high = high, 2 * high
    else:
        while low > 1 / 64 and not holds(low) and in_time():
            low, high = low / 2, low
    if in_time() and holds(low) and not holds(high):
        for _ in range(5):
            if not in_time():
                break
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
    return sorted(found.items())
