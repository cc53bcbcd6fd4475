"""What a run amounts to, by the definitions of ``vllm bench serve``."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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

    @property
    def tpot(self) -> float:
        """0 where there is no token after the first."""
        if self.output_tokens < 2:
            return 0.0
        return (self.latency - self.ttft) / (self.output_tokens - 1)


SHORTEST = 1e-6  # limit of an SLO, milliseconds


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``ttft:500`` and the like to milliseconds by metric. Raises `ValueError`."""
    return _objectives("--goodput", pairs, ":")


def parse_slo(text: str) -> dict[str, float]:
    """``ttft=500,tpot=50``, limits of `SHORTEST` or more, to milliseconds by metric. Raises
    `ValueError`.
    """
    limits = _objectives("--slo", [pair.strip() for pair in text.split(",")], "=")
    for name, limit in limits.items():
        if limit < SHORTEST:
            raise ValueError(f"--slo {name}={limit:g}: no request takes less than {SHORTEST:g} ms")
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


def summarise(
    records: Sequence[Record],
    duration: float,
    *,
    goodput: Mapping[str, float],
    percentiles: Sequence[float],
    metrics: Sequence[str],
) -> dict[str, Any]:
    """The figures, under vLLM's names. ``goodput`` in milliseconds; ``duration`` in seconds."""
    done = [record for record in records if record.success]
    duration = max(duration, 1e-9)
    total_input = sum(record.prompt_len for record in done)
    total_output = sum(record.output_tokens for record in done)
    good = sum(is_good(record, goodput) for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": total_input,
        "total_cached_tokens": sum(cached) if cached else None,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
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
    samples: dict[str, Sequence[float] | npt.NDArray[np.float64]] = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.output_tokens > 1],
        "itl": all_gaps(done),
        "e2el": [record.latency for record in done],
        "client_queue_time": [record.queue_time for record in done],
        "e2el_including_client_queue": [r.latency + r.queue_time for r in done],
    }
    for name in metrics:
        milliseconds = np.asarray(samples[name]) * 1000 if len(samples[name]) else np.zeros(1)
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        result[f"median_{name}_ms"] = float(np.median(milliseconds))
        result[f"std_{name}_ms"] = float(milliseconds.std())
        for percentile in percentiles:
            value = float(np.percentile(milliseconds, percentile))
            word = int(percentile) if percentile == int(percentile) else percentile
            result[f"p{word}_{name}_ms"] = value
    return result


PER_REQUEST = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times",
    "generated_texts", "errors",
)  # fmt: skip


def all_gaps(done: Sequence[Record]) -> npt.NDArray[np.float64]:
    """Every gap between two events with a token, request after request, in seconds."""
    gaps = array("d")
    for record in done:
        gaps.extend(record.itl)
    return np.asarray(gaps)


def is_good(record: Record, goodput: Mapping[str, float]) -> bool:
    """Whether a request that has succeeded is within all limits (in milliseconds)."""
    measured = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
    return all(measured[name] <= limit / 1000 for name, limit in goodput.items())


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
