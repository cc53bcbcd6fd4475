"""A span for each generation, for OpenTelemetry, made when it is over: of the request, and in it
one of the time until the engine got it (prepare: body, template, tokens), and for each prompt those
in which it waited (queue), went through the model (prefill) and was answered (decode).

Needs the packages of the extra ``otel``. Attributes follow OpenTelemetry's semantic
conventions for generative AI and HTTP, those of times vLLM's names (``gen_ai.latency.*``). Spans
wait in a bounded queue for a thread of their own; what does not fit is dropped, newest kept. A
collector that fails is named once, and once more when it works again: what it missed is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from octavo import __version__
from octavo.scheduler.request import RequestRecord
from octavo.server.access_log import of_records
from octavo.server.exchange import Exchange

log = logging.getLogger(__name__)

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_MOST_PROMPTS = 16  # of one request that have spans of their own
_LAST_SPANS = 2.0  # seconds that those not yet sent have at the end

Attributes = dict[str, bool | int | float | str | list[str]]


class Spans:
    """How many there were, by state: made; then sent, failed (with the batch they were in), or
    neither: those that wait, and those for which the queue had no room.
    """

    def __init__(self) -> None:
        self.made = self.sent = self.failed = 0
        self.tell: Callable[[str, int], object] = lambda state, spans: None  # for the metrics

    def count(self, state: str, spans: int) -> None:
        setattr(self, state, getattr(self, state) + spans)
        self.tell(state, spans)


class _Exporter(OTLPSpanExporter):
    """Says what changes, in place of several lines a batch."""

    def __init__(self, endpoint: str, spans: Spans) -> None:
        super().__init__(endpoint=endpoint)
        self._where = endpoint
        self._spans = spans
        self._lost: int | None = None  # spans, since it began to fail
        self._level: int | None = None  # of the library's logger, while that is hushed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        complaints = _Complaints()
        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.addFilter(complaints)
        try:
            result = super().export(spans)
        except Exception as error:  # what the library does not turn into a failure
            result = SpanExportResult.FAILURE
            complaints.first = complaints.first or f"{type(error).__name__}: {error}"
        finally:
            logger.removeFilter(complaints)
        if result is SpanExportResult.SUCCESS:
            self._spans.count("sent", len(spans))
            if self._lost is not None:
                log.info("traces: %s takes them again; %d spans were lost", self._where, self._lost)
                self._lost = None
                self.hush(False)
            return result
        self._spans.count("failed", len(spans))
        if self._lost is None:
            self._lost = 0
            log.warning(
                "traces: %s fails, and what it is sent is lost until it works again: %s",
                self._where,
                complaints.first.partition(", retrying in ")[0] or "no reason given",
            )
            self.hush(True)
        self._lost += len(spans)
        return result

    def hush(self, on: bool) -> None:
        """Whether the queue is to keep to itself that it is full."""
        logger = logging.getLogger("opentelemetry.sdk")
        if on:
            self._level = logger.level
            logger.setLevel(max(logging.ERROR, logger.level))
        elif self._level is not None:
            logger.setLevel(self._level)
            self._level = None


class _Complaints(logging.Filter):
    """Keeps the first line that this thread logs, and keeps all of them from being written."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.first = self.first or record.getMessage()
        return False


class Tracer:
    """Sends to ``endpoint``, an OTLP collector's http(s) URL; without a path it gets the usual one.

    OpenTelemetry's environment variables apply: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_* but the endpoint. Raises `ValueError` for
    a protocol that is not HTTP with protobuf.
    """

    def __init__(self, endpoint: str) -> None:
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
        )
        if protocol != "http/protobuf":
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}: traces are sent as "
                "http/protobuf only, which collectors take on port 4318"
            )
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "octavo"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.spans = Spans()
        self._exporter = _Exporter(endpoint, self.spans)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, exchange: Exchange) -> str:
        """Make the spans of an exchange that is over, as part of the trace that its headers name,
        if they do. Returns the trace's id, in hexadecimal; "" for what is no generation.
        """
        operation = _OPERATIONS.get(exchange.path)
        if operation is None:
            return ""
        # Exchanges and records have the monotonic clock. It is set against the wall clock once for
        # each: that may be corrected, but the distances within a request are of one clock.
        offset = time.time_ns() - time.monotonic_ns()

        def at(clock_seconds: float) -> int:
            return offset + int(clock_seconds * 1e9)

        span = self._tracer.start_span(
            f"{operation} {exchange.model}".rstrip(),
            context=self._propagator.extract(_carrier(exchange.headers)),
            kind=SpanKind.SERVER,
            start_time=at(exchange.started),
        )
        if span.is_recording():
            span.set_attributes(_attributes(operation, exchange))
            if exchange.status >= 500 or (exchange.error_type and exchange.status < 400):
                span.set_status(Status(StatusCode.ERROR))
            self.spans.count("made", 1)
            context = set_span_in_context(span)
            if exchange.records:
                arrival = min(record.arrival for record in exchange.records)
                prepare = self._tracer.start_span(
                    "prepare", context, start_time=at(exchange.started)
                )
                self.spans.count("made", 1)  # first: what has ended may be sent at once
                prepare.end(at(arrival))
            for index, record in enumerate(exchange.records[:_MOST_PROMPTS]):
                for phase in _phases(record, exchange.ended):
                    child = self._tracer.start_span(
                        phase.name,
                        context,
                        start_time=at(phase.start),
                        attributes={"octavo.prompt_index": index, **phase.attributes},
                    )
                    self.spans.count("made", 1)
                    child.end(at(phase.end))
        span.end(at(exchange.ended))
        return format(span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Send what is left, but do not wait long for a collector that does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_LAST_SPANS)
        self._exporter.hush(False)
        lost = self.spans.made - self.spans.sent
        if lost:
            log.warning("traces: %d of %d spans were not sent", lost, self.spans.made)


class _Phase(NamedTuple):
    name: str
    start: float  # clock seconds
    end: float
    attributes: Attributes


def _phases(record: RequestRecord, ended: float) -> Iterator[_Phase]:
    """The phases that a request came to; the last may have ended with the request."""
    ended = ended if record.finished is None else record.finished
    scheduled, first = record.scheduled, record.first_token
    yield _Phase("queue", record.arrival, ended if scheduled is None else scheduled, {})
    if scheduled is None:
        return
    computed = record.prompt_tokens - record.cached_tokens
    prompt: Attributes = {
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "octavo.computed_tokens": computed,
    }
    yield _Phase("prefill", scheduled, ended if first is None else first, prompt)
    if first is None:
        return
    output: Attributes = {
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "octavo.preemptions": record.preemptions,
        "octavo.draft_tokens": record.draft_tokens,
        "octavo.accepted_tokens": record.accepted_tokens,
    }
    yield _Phase("decode", first, record.last_token or ended, output)


def _attributes(operation: str, exchange: Exchange) -> Attributes:
    facts: dict[str, bool | int | float | str | list[str] | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.id": exchange.request_id,
        "http.request.method": exchange.method,
        "http.route": exchange.path,
        "http.response.status_code": exchange.status,
        "error.type": exchange.error_type or None,
    }
    asked = exchange.asked
    if asked is not None:
        facts |= {
            "gen_ai.request.model": asked.model or exchange.model,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.request.top_k": asked.top_k,
            "gen_ai.request.frequency_penalty": asked.frequency_penalty,
            "gen_ai.request.presence_penalty": asked.presence_penalty,
            "gen_ai.request.seed": asked.seed,
            "gen_ai.request.choice.count": asked.n,
            "gen_ai.request.n": asked.n or 1,
            "gen_ai.request.stream": bool(asked.stream),
            "gen_ai.response.model": exchange.model,
            "gen_ai.response.id": exchange.answer_id,
        }
    if exchange.records:
        facts |= _of_records(exchange.records, exchange.ended)
    return {name: _sendable(value) for name, value in facts.items() if value is not None}


def _sendable(value: bool | int | float | str | list[str]) -> bool | int | float | str | list[str]:
    """An integer beyond 64 bits has no place in a trace, and would cost the others of its batch."""
    return str(value) if isinstance(value, int) and value.bit_length() > 63 else value


def _of_records(
    records: list[RequestRecord], now: float
) -> dict[str, bool | int | float | str | list[str] | None]:
    """As in the access log (access_log.py), in seconds. Phases only where there is one prompt: of
    several they lie beside each other.
    """
    facts = of_records(records, now)
    attributes: dict[str, bool | int | float | str | list[str] | None] = {
        "gen_ai.request.max_tokens": records[0].max_tokens,
        "gen_ai.usage.num_sequences": sum(record.n for record in records),
        "gen_ai.usage.input_tokens": sum(record.prompt_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.completion_tokens for record in records),
        "gen_ai.usage.cache_read.input_tokens": sum(record.cached_tokens for record in records),
        "gen_ai.response.finish_reasons": [
            reason.value for record in records for reason in record.finish_reasons if reason
        ],
        "octavo.outcome": str(facts["outcome"]),
        "octavo.client": records[0].client or None,
        "octavo.priority": records[0].priority,
        "octavo.preemptions": sum(record.preemptions for record in records),
    }
    for name, fact in (
        ("time_in_queue", "queue_ms"),
        ("time_to_first_token", "ttft_ms"),
        ("e2e", "e2e_ms"),
    ):
        if isinstance(value := facts[fact], float):
            attributes[f"gen_ai.latency.{name}"] = round(value / 1000, 6)
    if isinstance(met := facts["slo_met"], bool):
        attributes["octavo.slo_met"] = met
    if len(records) == 1:
        (record,) = records
        start, first, last = record.scheduled, record.first_token, record.last_token
        if start is not None and first is not None and last is not None:
            attributes |= {
                "gen_ai.latency.time_in_model_prefill": first - start,
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.time_in_model_inference": last - start,
            }
    return attributes


def _carrier(headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """The headers of W3C Trace Context: several states are one list, several parents are none."""
    return {
        name: headers[name.encode()].decode("latin-1")
        for name in ("traceparent", "tracestate")
        if name.encode() in headers
    }
