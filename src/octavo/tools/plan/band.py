"""How far off a simulation's figures may be: the same load on a slower and a faster device.

What is uncertain is above all the device's speed. A step that takes longer makes every latency
longer by as much, and near saturation waits by far more: the band shows it, as the load is
simulated at both ends of the speeds that nine predictions of ten lie between. Which requests come
is taken as given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import exp, hypot
from typing import Any, NamedTuple

from octavo.engine.calibration import Calibration
from octavo.tools.plan.gpu import FITTED, LARGE_ERROR
from octavo.tools.plan.saturation import Saturation
from octavo.tools.plan.simulation import Setup, Simulation, simulate
from octavo.tools.plan.slo import Figures, Slo
from octavo.tools.workload.metrics import GOODPUT

NINE_IN_TEN = 1.645  # standard deviations of a normal distribution, to either side
# Of the logarithm of the speed, with a refresh right before and with the calibration alone. With
# the first, nine of ten figures of recorded loads lie within the band (benchmarks/error_band.py).
REFRESHED, CALIBRATED = 0.06, 0.10
FRESH = timedelta(minutes=2)
UNCALIBRATED = 2.0  # times as long as the limits say: engines reach half of them, or more
MOST = 1024  # requests; of a longer load it is simulated for the first of them


class Doubt(NamedTuple):
    """How many times as long, and as short, everything may take."""

    slower: float
    faster: float
    basis: str


OF_GIVEN = Doubt(1.1, 1.1, "the figures given, 10 % more or less")


def doubt(setup: Setup, now: datetime | None = None) -> Doubt:
    """The doubt about the speed that a setup is predicted with."""
    if setup.device.measured:
        stored = setup.calibration()
        if stored is None:
            return Doubt(UNCALIBRATED, 1.0, "not calibrated: limits that no engine reaches")
        return of_calibration(stored, now or datetime.now(UTC))
    if setup.device.shares == FITTED:
        end = 1 + LARGE_ERROR
        return Doubt(end, end, "nine of ten published runs of GPUs lie within")
    return OF_GIVEN


def of_calibration(stored: Calibration, now: datetime) -> Doubt:
    """From how the machine wavers, and from what kinds of steps are off by in a fit that has not
    seen them.
    """
    moment = stored.moment
    fresh = moment is not None and abs(now - datetime.fromisoformat(moment.date)) < FRESH
    steps = sum(each.steps for each in stored.errors)
    bias = (sum(each.steps * each.bias**2 for each in stored.errors) / max(steps, 1)) ** 0.5
    end = exp(NINE_IN_TEN * hypot(REFRESHED if fresh else CALIBRATED, bias))
    return Doubt(end, end, "calibrated" + (", and refreshed just now" if fresh else ""))


def band(
    simulation: Simulation,
    doubt: Doubt,
    goodput: Mapping[str, float],
    verdict: Saturation,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The two ends of what figures may be, under their names: [least, most]; None where there is
    no such figure. ``goodput``: limits in milliseconds by metric.
    """
    slo = Slo(goodput)
    nominal = simulation
    if len(simulation.samples) > MOST:
        nominal = _at(simulation, 1.0)
    middle = _figures(nominal, slo)
    ends = []
    for factor in (doubt.slower, 1 / doubt.faster):
        progress(f"the same on a device that takes {factor:.2f} times as long")
        ends.append(middle if factor == 1.0 else _figures(_at(simulation, factor), slo))
    shown = middle if nominal is simulation else _figures(simulation, slo)

    def between(*names: str) -> list[float] | None:
        values = []
        for found in (middle, *ends, shown):
            for name in names:
                found = found[name]
            values.append(found)
        if None in values:
            return None
        among, *others, value = values
        # Of a part of the load, what the ends are of its own figure.
        scaled = [value, *(value * each / among if among else each for each in others)]
        return [min(scaled), max(scaled)]

    latencies = {
        f"{name}_ms": {which: between(f"{name}_ms", which) for which in ("p50", "p99")}
        for name in GOODPUT
    }
    headroom = verdict.headroom
    return {
        "slower": doubt.slower,
        "faster": doubt.faster,
        "basis": doubt.basis,
        **latencies,
        "output_throughput": between("output_throughput"),
        "request_goodput": between("request_goodput"),
        "headroom": headroom and [headroom / doubt.slower, headroom * doubt.faster],
    }


def uncertain(verdict: Saturation, doubt: Doubt) -> str:
    """The warning of a load so near to saturation that it may lie on either side; "": it is not."""
    headroom = verdict.headroom
    if headroom is None or not headroom / doubt.slower < 1 < headroom * doubt.faster:
        return ""
    return (
        f"the load is at {100 / headroom:.3g} % of capacity, and for all that is known of the "
        "device's speed it may be on either side of it: the error band says how far off waits are"
    )


def _at(simulation: Simulation, slowness: float) -> Simulation:
    return simulate(
        replace(simulation.setup, slowness=slowness),
        simulation.samples[:MOST],
        seed=simulation.seed,
        max_concurrency=simulation.max_concurrency,
        target=simulation.target,
    )


def _figures(simulation: Simulation, slo: Slo) -> Any:
    done = simulation.replay
    return Figures.of(done.records, done.duration, slo).as_dict()
