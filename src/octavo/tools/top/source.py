"""A server's state at a moment, read from it: ``/requests`` and ``/metrics``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.snapshot import EngineSnapshot
from octavo.tools.bench.load.client import Body, Client, Endpoint

_MOST = 1e18  # of anything that is counted or measured
_TIMEOUT = 15.0  # seconds; a server in a long step answers when it is over
_PREFIX = "octavo:"

HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}
_TOTALS = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_preemptions", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
_BY_LABEL = {"admission_rejections": "reason", "request_success": "finished_reason"}
_GAUGES = ("step_time_ratio", "slo_attainment_perc", "goodput_requests_per_second")
_SUMS = ("step_time_seconds", "predicted_step_time_seconds")
_STARTED = "process_start_time_seconds"
_READ = tuple(
    [_PREFIX + name for name in (*HISTOGRAMS.values(), *_TOTALS, *_BY_LABEL, *_GAUGES, *_SUMS)]
    + [_STARTED]
)


class SourceError(Exception):
    """The server cannot be read. ``final``: nor will it be before something else is asked."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(slots=True)
class ScrapedMetrics:
    """What /metrics says, where labels are of no interest here: summed over them."""

    started: float = 0.0  # Unix time
    totals: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    by_label: dict[str, dict[str, float]] = field(default_factory=dict)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)  # (sum, count)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # cumulative, by bound

    @classmethod
    def read(cls, text: str) -> ScrapedMetrics:
        """Raises `ValueError` for what is no Prometheus text, or has numbers that mean nothing."""
        counts = cls()
        for family in text_string_to_metric_families("".join(_wanted(text.splitlines(True)))):
            for sample in family.samples:
                counts._take(sample.name.removeprefix(_PREFIX), sample.labels, sample.value)
        return counts

    def _take(self, name: str, labels: dict[str, str], value: float) -> None:
        base, _, part = name.rpartition("_")
        if name in _GAUGES and math.isnan(value):  # which is said where nothing is known
            return
        if not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {value:g}")
        if name == _STARTED:
            self.started = value
        elif name in _GAUGES:
            self.gauges[name] = self.gauges.get(name, 0.0) + value
        elif part == "total" and base in _TOTALS:
            self.totals[base] = self.totals.get(base, 0.0) + value
        elif part == "total" and base in _BY_LABEL:
            of = self.by_label.setdefault(base, {})
            key = labels.get(_BY_LABEL[base], "")
            of[key] = of.get(key, 0.0) + value
        elif part in ("sum", "count") and base in _SUMS:
            total, number = self.sums.get(base, (0.0, 0.0))
            sums = (total + value, number) if part == "sum" else (total, number + value)
            self.sums[base] = sums
        elif part == "bucket" and base in HISTOGRAMS.values():
            bounds = self.buckets.setdefault(base, {})
            bound = float(labels["le"])
            bounds[bound] = bounds.get(bound, 0.0) + value


def _wanted(lines: Iterable[str]) -> Iterable[str]:
    """The lines of the metrics that are read: a page has many more."""
    for line in lines:
        if line.removeprefix("# TYPE ").startswith(_READ):
            yield line


class _Answer(msgspec.Struct):
    model: str
    version: str
    draining: bool
    engine: EngineSnapshot


def _read(listed: bytes) -> _Answer:
    """Raises `ValueError` also for numbers that mean nothing: figures are made of them."""
    raw = msgspec.json.decode(listed)
    _check_numbers("", raw)
    answer = msgspec.convert(raw, _Answer)
    pool = answer.engine.pool
    if pool.blocks <= 0 or pool.block_size <= 0:
        raise ValueError(f"there are {pool.blocks} blocks of {pool.block_size} tokens")
    for name in ("used", "cached", "free"):
        if not 0 <= getattr(pool, name) <= pool.blocks:
            raise ValueError(f"{getattr(pool, name)} of {pool.blocks} blocks are {name}")
    return answer


def _check_numbers(name: str, value: object) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers(key, each)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(name, each)
    elif isinstance(value, int | float) and not abs(value) <= _MOST:
        raise ValueError(f"{name} is {str(value)[:20]}")


@dataclass(slots=True)
class Scrape:
    """``at``: Unix time here; differences of time are taken by ``engine.time``."""

    at: float
    model: str
    version: str
    draining: bool
    engine: EngineSnapshot
    counts: ScrapedMetrics


class Source:
    """Reads one server, again and again over one connection."""

    def __init__(self, url: str, api_key: str | None, limit: int, *, insecure: bool) -> None:
        """Raises `ValueError` for what is no URL or no header."""
        headers = {"accept": "text/plain;version=0.0.4, application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = Client(Endpoint.of(self.url), headers, insecure=insecure)
        self._limit = limit

    async def read(self) -> Scrape:
        """Raises `SourceError`."""
        listed = await self._get(f"/requests?limit={self._limit}")
        metrics = await self._get("/metrics")
        try:
            answer = _read(listed)
            counts = ScrapedMetrics.read(metrics.decode())
        except (ValueError, KeyError, RecursionError) as error:  # msgspec's are ValueErrors
            raise SourceError(
                f"{self.url} does not answer as an octavo server of this version: {error}",
                final=True,
            ) from None
        return Scrape(
            time.time(), answer.model, answer.version, answer.draining, answer.engine, counts
        )

    async def _get(self, path: str) -> bytes:
        try:
            body = await self._client.get("GET", path, timeout=_TIMEOUT)
        except TimeoutError:
            raise SourceError("no connection in time") from None
        if body.reason:
            raise SourceError(f"{body.reason}{f' ({body.detail})' if body.detail else ''}")
        if body.status != 200:
            raise SourceError(_refusal(body, path), final=body.status in (401, 403, 404))
        return body.content

    async def close(self) -> None:
        await self._client.close()


def _refusal(body: Body, path: str) -> str:
    if body.status in (401, 403):
        return "the server asks for a key: --api-key, or OCTAVO_API_KEY"
    if body.status == 404:
        return f"there is no {path.partition('?')[0]} there: is it an octavo server?"
    return f"{path.partition('?')[0]} answers {body.status}"
