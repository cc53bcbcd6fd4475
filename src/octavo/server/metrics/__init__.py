"""Prometheus metrics under vLLM's names, with the prefix ``octavo:``.

Two sources, so that no count is kept twice: `EngineStats`, read when Prometheus asks
(engine_metrics.py), and each request's `RequestRecord`, read once when it ends (request_metrics.py,
slo_metrics.py). Only the gap between tokens is timed apart. Children are looked up by label at the
start, not per token.

docs/metrics.md lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import nan
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from octavo.engine.engine import Step
from octavo.engine.stats import EngineStats
from octavo.scheduler.request import FinishReason, LatencyTarget, Outcome, RequestRecord
from octavo.server.clients import Clients
from octavo.server.metrics import engine_metrics
from octavo.server.metrics.metric_families import Families, Readings
from octavo.server.metrics.request_metrics import (
    CLIENTS,
    ITL,
    PRIORITIES,
    REJECTIONS,
    WAIT,
    ending,
    histograms,
)
from octavo.server.metrics.slo_metrics import SloMetrics

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_TIME = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1, 2, 5),
)

_CLIENT_GAUGES: Readings[tuple[Clients, int]] = {
    "http_connections": ("Connections that are open.", lambda s: len(s[0])),
    "unsent_output_bytes": (
        "Bytes of output, about, that clients have not read.",
        lambda s: s[0].unsent + s[1],
    ),
}
_CLIENT_COUNTERS: Readings[tuple[Clients, int]] = {
    "http_connections_closed": (
        "Connections closed on a client: to make room for others (no_room), because it did not "
        "read its answer (not_read), or because all answers unread were too much "
        "(unsent_total).",
        lambda s: s[0].closed,
        "reason",
    ),
}

_Q = re.compile(r"q=(0(?:\.\d*)?|1(?:\.0*)?)")
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Metrics:
    """``stats`` is read on each scrape. ``max_model_len`` bounds the token histograms."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], max_model_len: int
    ) -> None:
        self.registry = CollectorRegistry()
        self._families = families = Families(self.registry, model_name)
        self._slo = SloMetrics(families)
        self._histograms = histograms(families, max_model_len)
        self.inter_token = families.histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", ITL
        )
        self._queue_of_priority = families.open(
            Histogram,
            "request_queue_time_by_priority_seconds",
            "Arrival to first scheduling, by the request's priority (lower runs first).",
            "priority",
            most=PRIORITIES,
            buckets=WAIT,
        )
        self._ended = families.counters(
            "request_success",
            "Requests that have ended, by how.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self._rejected = families.counters(
            "admission_rejections", "Requests that were not admitted.", "reason", REJECTIONS
        )
        self._requests_of_client = families.open(
            Counter,
            "client_requests",
            "Requests that have ended or were refused, of each named API key and, with an empty "
            "name, of all others.",
            "client",
            "outcome",
            most=CLIENTS,
        )
        self._prompt_tokens_of_client = families.open(
            Counter,
            "client_prompt_tokens",
            "Prompt tokens of requests that have ended, likewise.",
            "client",
            most=CLIENTS,
        )
        self._generation_tokens_of_client = families.open(
            Counter,
            "client_generation_tokens",
            "Tokens generated for requests that have ended, likewise.",
            "client",
            most=CLIENTS,
        )
        self._requests_of_client.reserve("", *((outcome.value,) for outcome in Outcome))
        self._prompt_tokens_of_client.reserve("", ())
        self._generation_tokens_of_client.reserve("", ())
        self.expect((), [0])
        self._http = Counter(
            "octavo:http_requests",
            "HTTP requests answered.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        families.read(stats, engine_metrics.GAUGES, engine_metrics.COUNTERS)
        ProcessCollector(registry=self.registry)
        self._step_tokens = families.histogram(
            "iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS
        )
        # Empty until steps are predicted.
        self._predicted = families.histogram(
            "predicted_step_time_seconds", "A step's time, as the cost model has it.", _STEP_TIME
        )
        self._actual = families.histogram(
            "step_time_seconds", "A step's time, from scheduling to delivery.", _STEP_TIME
        )
        self._ratio = families.gauge(
            "step_time_ratio",
            "Actual to predicted step time, of the last steps; above 1: slower than calibrated.",
        )
        self._ratio.set(nan)
        self._spans = families.counters(
            "trace_spans",
            "Spans for OpenTelemetry: made, sent, and failed with the batch they were sent in.",
            "state",
            ("made", "sent", "failed"),
        )

    def expect(self, targets: Iterable[LatencyTarget], priorities: Iterable[int]) -> None:
        """Have series for what the server and its keys promise and give, without a client's
        asking. Before requests come.
        """
        for target in targets:
            self._slo.expect(target)
        for priority in priorities:
            self._queue_of_priority.reserve(str(priority), ())

    def clients(self, clients: Clients, unsent: Callable[[], int]) -> None:
        """Read the server's connections on each scrape. ``unsent``: bytes on their way to them."""
        self._families.read(lambda: (clients, unsent()), _CLIENT_GAUGES, _CLIENT_COUNTERS)

    def info(self, name: str, what: str, facts: dict[str, object]) -> None:
        """Add a gauge that is always 1 and says something in its labels."""
        Gauge(f"octavo:{name}", what, tuple(facts), registry=self.registry).labels(
            *map(str, facts.values())
        ).set(1)

    def predicting(self, ratio: Callable[[], float]) -> Callable[[float, float], None]:
        """Return what is to be told each step's seconds, predicted by a calibrated cost model and
        actual. ``ratio``, of actual to predicted of late, is read on each scrape.
        """
        self._ratio.set_function(ratio)

        def tell(predicted_seconds: float, actual_seconds: float) -> None:
            self._predicted.observe(predicted_seconds)
            self._actual.observe(actual_seconds)

        return tell

    def spans(self, state: str, number: int) -> None:
        """Count spans. Called on the tracer's threads."""
        self._spans[state].inc(number)

    def http(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    # Observer, called on the engine's thread

    def on_step(self, step: Step) -> None:
        self._step_tokens.observe(step.scheduled.batch.num_tokens)

    def on_end(self, record: RequestRecord) -> None:
        self._slo.on_end(record)
        client = record.scheduling.client
        if record.outcome is Outcome.REJECTED:
            for reason in (FinishReason.SHED, FinishReason.REPLACED):
                if reason in record.finish_reasons:
                    self.refuse(reason.value, client)
            return
        self._ended[ending(record)].inc()
        for histogram, value_of in self._histograms:
            if (value := value_of(record)) is not None:
                histogram.observe(value)
        if record.outcome is not None:
            self._requests_of_client(client, record.outcome.value).inc()
        if record.scheduled is not None:
            waited = record.scheduled - record.arrival
            self._queue_of_priority(str(record.scheduling.priority)).observe(waited)
            self._prompt_tokens_of_client(client).inc(record.prompt_tokens)
            self._generation_tokens_of_client(client).inc(record.completion_tokens)

    def refuse(self, reason: str, client: str = "") -> None:
        """Count a refusal; ``reason`` is of `REJECTIONS`."""
        self._rejected[reason].inc()
        self._requests_of_client(client, Outcome.REJECTED.value).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return body and content type in the format that ``accept`` asks for."""
        wanted = _weight(accept, "application/openmetrics-text")
        if wanted and wanted >= _weight(accept, "text/plain"):
            # Names as they are. Left to itself the library replaces the colon in samples' names,
            # though not in their families', as in one that is not allowed.
            encode: Any = openmetrics.generate_latest
            return encode(self.registry, openmetrics.ALLOWUTF8), _OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


def _weight(accept: str, media: str) -> float:
    """Return how much ``accept`` wants ``media``, by name (RFC 9110, 12.4.2); 0: not at all."""
    weights = [0.0]
    for each in accept.lower().split(","):
        name, *parameters = (part.strip() for part in each.split(";"))
        if name == media:
            given = [_Q.fullmatch(parameter) for parameter in parameters]
            weights.append(next((float(match[1]) for match in given if match), 1.0))
    return max(weights)
