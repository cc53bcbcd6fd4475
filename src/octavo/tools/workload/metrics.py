"""What a run amounts to, by the definitions of ``vllm bench serve``.

`totals` is where a load's figures are defined; bench serve, simulate and tune only name them.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

GOODPUT = ("ttft", "tpot", "e2el")
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}


@dataclass(slots=True)
class Record:
    """One request that has ended. Times in seconds; ``start`` on the run's own clock."""

    index: int  # of the request, in order of arrival
    success: bool
    start: float
    prompt_len: int
    output_tokens: int
    ttft: float = 0.0
    latency: float = 0.0
    itl: array[float] = field(default_factory=lambda: array("d"))
    queue_time: float = 0.0  # before it was sent
    waited: float = 0.0  # in the server's own queue, where it says so
    preemptions: int = 0  # the same
    cached_tokens: int | None = None  # of the prompt, where the server says so
    text: str = ""
    reason: str = ""
    detail: str = ""
    rejected: bool = False  # not served because there was too much to do: 429 or 503
    told: float = 0.0  # seconds until it was told so
    kind: str = ""  # its class, where a load has several
    limits: Mapping[str, float] | None = None  # its own, milliseconds by metric; None: the load's

    @property
    def tpot(self) -> float:
        """0 where there is no token after the first."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_tokens - 1)


SHORTEST, LONGEST = 1e-6, 1e12  # limits of an SLO, milliseconds


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``ttft:500`` and the like to milliseconds by metric. Raises `ValueError`."""
    return _objectives("--goodput", pairs, ":")


def parse_slo(text: str) -> dict[str, float]:
    """``ttft=500,tpot=50``, to milliseconds by metric. Raises
    `ValueError`.
    """
    limits = _objectives("--slo", [pair.strip() for pair in text.split(",")], "=")
    for name, limit in limits.items():
        if not SHORTEST <= limit <= LONGEST:
            raise ValueError(
                f"--slo {name}={limit:g}: a limit is from {SHORTEST:g} to {LONGEST:g} ms"
            )
    return limits


def _objectives(option: str, pairs: Sequence[str], separator: str) -> dict[str, float]:
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, found, text = pair.partition(separator)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not found or math.isnan(value):
            raise ValueError(
                f"{option} {pair!r} is not KEY{separator}MS, such as ttft{separator}500"
            )
        if name not in GOODPUT:
            raise ValueError(f"{option} {pair!r}: {name!r} is none of {', '.join(GOODPUT)}")
        if not 0 <= value < math.inf:
            raise ValueError(f"{option} {pair!r}: the limit must be 0 or more milliseconds")
        if name in objectives:
            raise ValueError(f"{option} has {name} twice")
        objectives[name] = value
    return objectives


def parse_percentiles(text: str) -> list[float]:
    """``25,50,99.9``. Raises `ValueError`."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles {text!r} is not a list such as 50,99")
    return values


def parse_metrics(text: str) -> list[str]:
    """``ttft,tpot,itl``. Raises `ValueError`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LATENCIES:
            raise ValueError(f"--percentile-metrics: {name!r} is none of {', '.join(LATENCIES)}")
    return names


@dataclass(frozen=True, slots=True)
class Counts:
    """What a load came to. Rates are of its whole time, from the start to the last token; tokens
    and what is good are of the requests that were served.
    """

    requests: int
    completed: int  # that were served
    good: int
    duration: float  # seconds, above 0
    output_tokens: int

    @property
    def goodput(self) -> float:
        """Requests a second that are within all limits (Zhong et al., DistServe, 2024)."""
        return self.good / self.duration

    @property
    def attainment(self) -> float:
        """The share of all requests that is good; 0 of none."""
        return self.good / max(self.requests, 1)

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration


@dataclass(frozen=True, slots=True)
class Totals(Counts):
    """With the requests that were served, and the latencies over them."""

    input_tokens: int
    done: Sequence[Record]

    @property
    def token_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.duration

    def spread(self, name: str, percentiles: Sequence[float]) -> dict[str, float] | None:
        """Return the `spread` of a latency of `seconds`."""
        return spread(seconds(name, self.done), percentiles)


def totals(records: Sequence[Record], duration: float, goodput: Mapping[str, float]) -> Totals:
    """``duration`` in seconds; ``goodput``: limits in milliseconds by metric."""
    done = [record for record in records if record.success]
    return Totals(
        len(records),
        len(done),
        sum(is_good(record, goodput) for record in done),
        max(duration, 1e-9),
        sum(record.output_tokens for record in done),
        sum(record.prompt_len for record in done),
        done,
    )


def by_class(
    records: Sequence[Record], duration: float, goodput: Mapping[str, float]
) -> dict[str, Totals]:
    """`totals` of each class of the load; none where it has none."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.kind:
            found.setdefault(record.kind, []).append(record)
    return {name: totals(each, duration, goodput) for name, each in sorted(found.items())}


def seconds(name: str, done: Sequence[Record]) -> Float64:
    """[values] of one of `LATENCIES`, or of ``queue``, the wait in the server's own, over requests
    that were served. TPOT is that of answers with a token after the first: others have none.
    """
    match name:
        case "ttft":
            values = [record.ttft for record in done]
        case "tpot":
            values = [record.tpot for record in done if record.output_tokens > 1]
        case "itl":
            return all_gaps(done)
        case "e2el":
            values = [record.latency for record in done]
        case "queue":
            values = [record.waited for record in done]
        case "client_queue_time":
            values = [record.queue_time for record in done]
        case "e2el_including_client_queue":
            values = [record.latency + record.queue_time for record in done]
        case _:
            raise ValueError(f"{name!r} is no latency")
    return np.array(values, dtype=np.float64)


def spread(values: Float64, percentiles: Sequence[float]) -> dict[str, float] | None:
    """Summarize seconds, in milliseconds: ``mean``, the percentiles as ``p50`` or ``p99.9``,
    ``max`` and ``std``. Return None for no values: there is no such latency.
    """
    if not len(values):
        return None
    milliseconds = values * 1e3
    found = np.percentile(milliseconds, percentiles)
    return {
        "mean": float(milliseconds.mean()),
        **{_word(each): float(value) for each, value in zip(percentiles, found, strict=True)},
        "max": float(milliseconds.max()),
        "std": float(milliseconds.std()),
    }


def _word(percentile: float) -> str:
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def summarise(
    records: Sequence[Record],
    duration: float,
    *,
    goodput: Mapping[str, float],
    percentiles: Sequence[float],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """The figures, under vLLM's names. ``goodput`` in milliseconds; ``duration`` in seconds. A
    latency that no request has is 0, as vLLM's.
    """
    found = totals(records, duration, goodput)
    done = found.done
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    result: dict[str, Any] = {
        "duration": found.duration,
        "completed": len(done),
        "rejected": sum(record.rejected for record in records),
        "failed": sum(not (record.success or record.rejected) for record in records),
        "total_input_tokens": found.input_tokens,
        "total_cached_tokens": sum(cached) if cached else None,
        "total_output_tokens": found.output_tokens,
        "request_throughput": found.request_throughput,
        "request_goodput": found.goodput if goodput else None,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.token_throughput,
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_tokens if record.success else 0 for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [list(record.itl) for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.start for record in records],
        "queue_times": [record.queue_time for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [f"{r.reason}: {r.detail}" if r.reason else "" for r in records],
        "max_output_tokens_per_s": peak_tokens(done),
        "max_concurrent_requests": peak_requests(done),
    }
    told = spread(np.array([r.told for r in records if r.rejected]), (50, 99)) or {}
    result["median_rejection_ms"] = told.get("p50")
    result["p99_rejection_ms"] = told.get("p99")
    for name in metrics:
        values = found.spread(name, (50, *percentiles)) or defaultdict(float)
        result[f"mean_{name}_ms"] = values["mean"]
        result[f"median_{name}_ms"] = values["p50"]
        result[f"std_{name}_ms"] = values["std"]
        for percentile in percentiles:
            result[f"{_word(percentile)}_{name}_ms"] = values[_word(percentile)]
    return result


PER_REQUEST = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "generated_texts", "errors",
)  # fmt: skip


def all_gaps(done: Sequence[Record]) -> Float64:
    """Every gap between two events with a token, request after request, in seconds."""
    gaps = array("d")
    for record in done:
        gaps.extend(record.itl)
    return np.asarray(gaps)


def is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    """Whether a request that has succeeded is within all limits (in milliseconds): its own, if it
    has any.
    """
    limits = goodput if record.limits is None else record.limits
    measured = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all(measured[name] <= limit / 1000 for name, limit in limits.items())


def peak_tokens(done: Sequence[Record]) -> float:
    """Most events with a token in one of the seconds counted from the first request's start."""
    if not done:
        return 0.0
    begin = min(record.start for record in done)
    times = np.concatenate(
        [record.start + record.ttft - begin + np.cumsum([0.0, *record.itl]) for record in done]
    )
    return float(np.bincount(times.astype(np.int64)).max())


def peak_requests(done: Sequence[Record]) -> int:
    """Most requests in flight at once; one that ends as another starts does not overlap it."""
    changes = [(record.start, 1) for record in done]
    changes += [(record.start + record.latency, -1) for record in done]
    current = peak = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak
