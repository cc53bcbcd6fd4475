"""What was promised of latency, and how a load's requests kept it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.scheduler.request import LatencyTarget
from octavo.tools.workload.metrics import GOODPUT as METRICS
from octavo.tools.workload.metrics import LONGEST, SHORTEST, Counts, Record, by_class, totals


@dataclass(frozen=True, slots=True)
class Slo:
    """``limits`` in milliseconds by metric: a request within all of them is good. The load keeps
    the SLO if a share ``attainment`` of all its requests is good.
    """

    limits: Mapping[str, float]
    attainment: float = 0.99

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError("an SLO needs a limit, such as ttft=500")
        for name, limit in self.limits.items():
            if name not in METRICS or not SHORTEST <= limit <= LONGEST:
                raise ValueError(f"{name}={limit:g} is no limit of {', '.join(METRICS)} in ms")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"slo_attainment is {self.attainment:g}; it must be above 0, up to 1")


def promised(limits: Mapping[str, float]) -> LatencyTarget:
    """What each request of a load is promised by limits in milliseconds."""
    seconds = {name: limits[name] / 1e3 for name in LatencyTarget._fields if name in limits}
    return LatencyTarget(**seconds)


class Latency(NamedTuple):
    """Milliseconds over the requests that were served (TPOT: of two tokens or more)."""

    p50: float
    p99: float


UNSERVED = Latency(math.inf, math.inf)  # no request was served
NONE = Latency(0.0, 0.0)  # answers of one token: there is no time between tokens to be too long


@dataclass(frozen=True, slots=True)
class Figures(Counts):
    """What came of a load, without its requests: of each trial they would take too much memory."""

    latencies: Mapping[str, Latency]  # of each of METRICS; UNSERVED or NONE where no request has it
    classes: Mapping[str, float] = field(default_factory=dict)  # attainment of each that there is

    @classmethod
    def of(cls, records: Sequence[Record], duration: float, slo: Slo) -> Figures:
        found = totals(records, duration, slo.limits)
        missing = NONE if found.completed else UNSERVED
        latencies = {}
        for name in METRICS:
            spread = found.spread(name, (50, 99))
            latencies[name] = missing if spread is None else Latency(spread["p50"], spread["p99"])
        return cls(
            found.requests,
            found.completed,
            found.good,
            found.duration,
            found.output_tokens,
            latencies,
            {n: t.attainment for n, t in by_class(records, duration, slo.limits).items()},
        )

    def pressure(self, slo: Slo) -> float:
        """The 99th percentile nearest to, or farthest beyond, its limit, as a share of it."""
        return max(self.latencies[name].p99 / limit for name, limit in slo.limits.items())

    def as_dict(self) -> dict[str, float | int | dict[str, float | None]]:
        """Under the names of `octavo simulate --json`; what no request has is None."""
        return {
            "requests": self.requests,
            "completed": self.completed,
            "good": self.good,
            "attainment": self.attainment,
            "attainment_by_class": dict(self.classes),
            "request_goodput": self.goodput,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "duration": self.duration,
            **{
                f"{name}_ms": {
                    key: None if latency in (UNSERVED, NONE) else value
                    for key, value in latency._asdict().items()
                }
                for name, latency in self.latencies.items()
            },
        }
