"""What is best in one thing or another: throughput against latency."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.tools.plan.slo import Slo
from octavo.tools.plan.tune_trial import TuneTrial


def frontier(trials: Sequence[TuneTrial], slo: Slo) -> list[TuneTrial]:
    """The trials that no other beats: with as many output tokens a second, and no 99th percentile
    of the SLO's latencies higher, and better in one of them. By throughput, highest first; of
    trials that are alike the first.
    """

    def costs(trial: TuneTrial) -> tuple[float, ...]:
        figures = trial.figures
        values = (figures.output_throughput, *(figures.latencies[name].p99 for name in slo.limits))
        rounded = [float(f"{value:.4g}") for value in values]  # no difference that means nothing
        return (-rounded[0], *rounded[1:])

    kept: list[TuneTrial] = []
    for trial in sorted(trials, key=costs):
        mine = costs(trial)
        if not any(all(a <= b for a, b in zip(costs(k), mine, strict=True)) for k in kept):
            kept.append(trial)
    return kept
