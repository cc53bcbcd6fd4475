"""What is shown, reckoned from samples: rates and latencies are differences of two of them."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from octavo.engine.snapshot import EngineSnapshot
from octavo.scheduler.request import RequestSnapshot
from octavo.tools.top.source import HISTOGRAMS, Scrape

WINDOW = 60.0  # seconds that latencies are of
_RECENT = 3.0  # seconds that rates are of


Bound = Literal["", "<", ">"]


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Seconds, interpolated within a histogram's bucket. Of what lies in the first bucket is known
    only that it is less ("<") than that one's bound; in the last, that it is more (">").
    """

    count: int
    p50: float | None = None
    p99: float | None = None
    p50_bound: Bound = ""
    p99_bound: Bound = ""


@dataclass(frozen=True, slots=True)
class BatchStats:
    """``tokens`` and ``seconds``: of a step, on average of late; else those of the last."""

    tokens: float
    seconds: float
    predicted_seconds: float | None
    ratio: float | None  # actual ÷ predicted
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    busy: float  # share of the time that the engine was in a step


@dataclass(frozen=True, slots=True)
class ServerStats:
    """``window``: the seconds that latencies are of; None: since the server's start."""

    at: float
    model: str
    version: str
    draining: bool
    uptime: float
    engine: EngineSnapshot  # the requests' tokens_per_second are those of late
    batch: BatchStats
    hit_rate: float | None  # prompt tokens found in the prefix cache ÷ looked up, in the window
    window: float | None
    latency: dict[str, LatencyStats]  # by HISTOGRAMS' names
    rejected: dict[str, int]  # by reason, since the server's start
    ended: dict[str, int]  # by how
    preemptions: int
    slo_attainment: float | None
    goodput: float | None  # requests a second
    acceptance: float | None  # of draft tokens, in the window


Sort = Literal["order", "age", "tok/s", "out", "prompt", "ttft", "client"]
SORTS: tuple[Sort, ...] = ("order", "age", "tok/s", "out", "prompt", "ttft", "client")


class History:
    """The samples of the last minute. A server that has started anew begins a new history."""

    def __init__(self) -> None:
        self._samples: deque[Scrape] = deque()

    @property
    def empty(self) -> bool:
        return not self._samples

    def add(self, sample: Scrape) -> None:
        if self._samples and _restarted(self._samples[-1], sample):
            self._samples.clear()
        self._samples.append(sample)
        while sample.engine.time - self._samples[0].engine.time > WINDOW:
            if len(self._samples) < 3 or (
                sample.engine.time - self._samples[1].engine.time < WINDOW
            ):
                break  # the whole window stays covered
            self._samples.popleft()

    def figures(self, *, since_start: bool = False) -> ServerStats:
        """Return those of the last sample. ``since_start``: latencies and hit rate are of all there
        was.
        """
        now = self._samples[-1]
        first = None if since_start else self._samples[0]
        if first is now:
            first = None
        recent = next(
            (s for s in reversed(self._samples) if now.engine.time - s.engine.time >= _RECENT),
            self._samples[0],
        )
        counts = now.counts
        return ServerStats(
            at=now.at,
            model=now.model,
            version=now.version,
            draining=now.draining,
            uptime=now.at - counts.started if counts.started else 0.0,
            engine=replace(now.engine, requests=_with_rates(recent, now)),
            batch=_batch(recent, now),
            hit_rate=_share(first, now, "prefix_cache_hits", "prefix_cache_queries"),
            window=None if first is None else now.engine.time - first.engine.time,
            latency={name: _latency(first, now, metric) for name, metric in HISTOGRAMS.items()},
            rejected=_whole(counts.by_label.get("admission_rejections", {})),
            ended=_whole(counts.by_label.get("request_success", {})),
            preemptions=int(counts.totals.get("num_preemptions", 0)),
            slo_attainment=counts.gauges.get("slo_attainment_perc"),
            goodput=counts.gauges.get("goodput_requests_per_second"),
            acceptance=_share(
                first, now, "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"
            ),
        )


def _restarted(before: Scrape, after: Scrape) -> bool:
    return (
        before.counts.started != after.counts.started
        or after.engine.steps < before.engine.steps
        or after.engine.time < before.engine.time
    )


def _whole(counts: dict[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in counts.items()}


def _grown(first: Scrape | None, now: Scrape, name: str) -> float:
    before = 0.0 if first is None else first.counts.totals.get(name, 0.0)
    return now.counts.totals.get(name, 0.0) - before


def _share(first: Scrape | None, now: Scrape, part: str, whole: str) -> float | None:
    all_of_it = _grown(first, now, whole)
    return _grown(first, now, part) / all_of_it if all_of_it > 0 else None


def _batch(before: Scrape, now: Scrape) -> BatchStats:
    seconds = now.engine.time - before.engine.time
    steps = now.engine.steps - before.engine.steps
    busy = now.engine.busy_seconds - before.engine.busy_seconds
    predicted = _mean(before, now, "predicted_step_time_seconds")
    actual = _mean(before, now, "step_time_seconds")
    ratio = now.counts.gauges.get("step_time_ratio")
    if predicted and actual:
        ratio = actual / predicted
    tokens = now.engine.computed_tokens - before.engine.computed_tokens
    return BatchStats(
        tokens=tokens / steps if steps else now.engine.step_tokens,
        seconds=busy / steps if steps else now.engine.step_seconds,
        predicted_seconds=predicted,
        ratio=ratio,
        prompt_tokens_per_second=_rate(_grown(before, now, "prompt_tokens"), seconds),
        output_tokens_per_second=_rate(_grown(before, now, "generation_tokens"), seconds),
        busy=min(1.0, _rate(busy, seconds)),
    )


def _rate(amount: float, seconds: float) -> float:
    return max(0.0, amount / seconds) if seconds > 0 else 0.0


def _mean(before: Scrape, now: Scrape, name: str) -> float | None:
    total, count = now.counts.sums.get(name, (0.0, 0.0))
    total_before, count_before = before.counts.sums.get(name, (0.0, 0.0))
    return (total - total_before) / (count - count_before) if count > count_before else None


def _with_rates(before: Scrape, now: Scrape) -> list[RequestSnapshot]:
    """Tokens per second of late, where the request was already generating then; else its mean."""
    earlier = {row.id: row.output_tokens for row in before.engine.requests if row.ttft is not None}
    seconds = now.engine.time - before.engine.time
    return [
        replace(row, tokens_per_second=(row.output_tokens - earlier[row.id]) / seconds)
        if row.id in earlier and seconds > 0
        else row
        for row in now.engine.requests
    ]


def _latency(first: Scrape | None, now: Scrape, metric: str) -> LatencyStats:
    bounds = now.counts.buckets.get(metric, {})
    before = {} if first is None else first.counts.buckets.get(metric, {})
    grown = [(bound, bounds[bound] - before.get(bound, 0.0)) for bound in sorted(bounds)]
    count = int(grown[-1][1]) if grown else 0
    if count <= 0:
        return LatencyStats(0)
    (p50, p50_bound), (p99, p99_bound) = quantile(grown, 0.5), quantile(grown, 0.99)
    return LatencyStats(count, p50, p99, p50_bound, p99_bound)


def quantile(cumulative: list[tuple[float, float]], q: float) -> tuple[float, Bound]:
    """Return a quantile of a histogram: (upper bound, observations up to it), the last bound
    infinite. Linear within a bucket, as Prometheus's histogram_quantile, except in the first.
    """
    rank = q * cumulative[-1][1]
    lower, below = -math.inf, 0.0
    for bound, count in cumulative:
        if count >= rank and count > below:
            break
        lower, below = bound, count
    if math.isinf(lower):
        return bound, "<"
    if math.isinf(bound):
        return lower, ">"
    return lower + (bound - lower) * (rank - below) / (count - below), ""


def sorted_requests(rows: list[RequestSnapshot], by: Sort) -> list[RequestSnapshot]:
    """The largest first, but clients by name; "order" is the engine's: running, then who is next.
    What a request does not have comes last. Equals keep their order.
    """
    if by == "order":
        return rows
    if by == "client":
        return sorted(rows, key=lambda row: (not row.client, row.client))
    of: dict[str, Any] = {
        "age": lambda row: row.age,
        "tok/s": lambda row: row.tokens_per_second,
        "out": lambda row: row.output_tokens,
        "prompt": lambda row: row.prompt_tokens,
        "ttft": lambda row: row.ttft,
    }
    return sorted(rows, key=lambda row: (of[by](row) is None, -(of[by](row) or 0)))


def as_json(figures: ServerStats, url: str) -> dict[str, Any]:
    """One object: times in seconds, shares 0 to 1, null where nothing can be told."""
    engine = asdict(figures.engine)
    pool, requests = engine.pop("pool"), engine.pop("requests")
    return {
        "url": url,
        "time": figures.at,
        "model": figures.model,
        "version": figures.version,
        "draining": figures.draining,
        "uptime": figures.uptime,
        "running": engine["running"],
        "waiting": engine["waiting"],
        "waiting_tokens": engine["waiting_tokens"],
        "max_num_seqs": engine["max_num_seqs"],
        "preemptions": figures.preemptions,
        "batch": asdict(figures.batch),
        "pool": pool | {"hit_rate": figures.hit_rate},
        "window": figures.window,
        "latency": {name: asdict(latency) for name, latency in figures.latency.items()},
        "rejected": figures.rejected,
        "ended": figures.ended,
        "slo_attainment": figures.slo_attainment,
        "goodput": figures.goodput,
        "acceptance": figures.acceptance,
        "requests": requests,
        "unlisted": engine["unlisted"],
    }


def trouble_as_json(why: str, url: str) -> dict[str, Any]:
    """The object where the server does not answer."""
    return {"url": url, "time": time.time(), "error": why}
