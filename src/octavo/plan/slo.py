"""What was promised of latency, and how a load's requests kept it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.workload.metrics import GOODPUT as METRICS
from octavo.workload.metrics import SHORTEST, Record, is_good


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
            if name not in METRICS or not SHORTEST <= limit < math.inf:
                raise ValueError(f"{name}={limit:g} is no limit of {', '.join(METRICS)} in ms")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"the attainment must be above 0 and at most 1, not {self.attainment}")


class Latency(NamedTuple):
    """Milliseconds over the requests that were served (TPOT: of two tokens or more)."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of a load; rates are of its whole time, from the start to the last token."""

    requests: int
    completed: int
    good: int
    duration: float  # seconds
    output_tokens: int
    latencies: Mapping[str, Latency]  # of each of METRICS; inf where no request has it

    @classmethod
    def of(cls, records: Sequence[Record], duration: float, slo: Slo) -> Figures:
        done = [record for record in records if record.success]
        milliseconds = {
            "ttft": [1e3 * record.ttft for record in done],
            "tpot": [1e3 * record.tpot for record in done if record.output_tokens > 1],
            "e2el": [1e3 * record.latency for record in done],
        }
        return cls(
            len(records),
            len(done),
            sum(is_good(record, slo.limits) for record in done),
            max(duration, 1e-9),
            sum(record.output_tokens for record in done),
            {name: _latency(values, bool(done)) for name, values in milliseconds.items()},
        )

    @property
    def goodput(self) -> float:
        """Requests a second that are within all limits (Zhong et al., DistServe, 2024)."""
        return self.good / self.duration

    @property
    def attainment(self) -> float:
        return self.good / self.requests

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration

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
            "request_goodput": self.goodput,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "duration": self.duration,
            **{
                f"{name}_ms": {
                    key: value if math.isfinite(value) else None
                    for key, value in latency._asdict().items()
                }
                for name, latency in self.latencies.items()
            },
        }


def _latency(milliseconds: Sequence[float], served: bool) -> Latency:
    if not milliseconds:  # answers of one token have no time between tokens
        return Latency(0.0, 0.0) if served else Latency(math.inf, math.inf)
    p50, p99 = np.percentile(milliseconds, (50, 99))
    return Latency(float(p50), float(p99))
