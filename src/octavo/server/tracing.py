"""OpenTelemetry spans of generations, made when they are over.

There is one for the request. In it are one for the time until the engine got it (prepare: body,
template, tokens), and for each prompt those in which it waited (queue), went through the model
(prefill) and was answered (decode).

Needs the packages of the extra ``otel``. Attributes follow OpenTelemetry's semantic conventions for
generative AI and HTTP; times have vLLM's names (``gen_ai.latency.*``). Spans wait in a bounded
queue for a thread of their own; those that do not fit are dropped, and the newest kept. A collector
that fails is named once, and once more when it works again; what it missed is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
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
from octavo.server.context import RequestContext

log = logging.getLogger(__name__)

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_MOST_PROMPTS = 16  # of one request that have spans of their own
_LAST_SPANS = 2.0  # seconds that those not yet sent have at the end

Value = bool | int | float | str | list[str]
Attributes = dict[str, Value]


class _Exporter(OTLPSpanExporter):
    """Logs what changes, in place of several lines a batch."""

    def __init__(self, endpoint: str, count: Callable[[str, int], None]) -> None:
        """``count`` is told a state of spans and how many have come to it."""
        super().__init__(endpoint=endpoint)
        self._where = endpoint
        self._count = count
        self._lost: int | None = None  # spans, since it began to fail
        self._level: int | None = None  # of the library's logger, while that is hushed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        complaints: list[str] = []
        thread = threading.get_ident()

        def keep(record: logging.LogRecord) -> bool:
            """Keep what this thread logs, and let none of it be written."""
            if record.thread == thread:
                complaints.append(record.getMessage())
            return record.thread != thread

        logger = logging.getLogger(OTLPSpanExporter.__module__)
        logger.addFilter(keep)
        try:
            result = super().export(spans)
        except Exception as error:  # what the library does not turn into a failure
            result = SpanExportResult.FAILURE
            complaints.append(f"{type(error).__name__}: {error}")
        finally:
            logger.removeFilter(keep)
        if result is SpanExportResult.SUCCESS:
            self._count("sent", len(spans))
            if self._lost is not None:
                log.info("traces: %s takes them again; %d spans were lost", self._where, self._lost)
                self._lost = None
                self.hush(False)
            return result
        self._count("failed", len(spans))
        if self._lost is None:
            self._lost = 0
            log.warning(
                "traces: %s fails, and what it is sent is lost until it works again: %s",
                self._where,
                complaints[0].partition(", retrying in ")[0] if complaints else "no reason given",
            )
            self.hush(True)
        self._lost += len(spans)
        return result

    def hush(self, on: bool) -> None:
        """Let the library's queue log that it is full, or not."""
        logger = logging.getLogger("opentelemetry.sdk")
        if on:
            self._level = logger.level
            logger.setLevel(max(logging.ERROR, logger.level))
        elif self._level is not None:
            logger.setLevel(self._level)
            self._level = None


class Tracer:
    """Sends to ``endpoint``, an OTLP collector's http(s) URL; without a path it gets the usual one.

    OpenTelemetry's environment variables apply: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_* but the endpoint. Raises `ValueError` for
    a protocol that is not HTTP with protobuf.

    ``spans`` counts them by state: made; then sent, failed (with the batch they were in), or
    neither: those that wait, and those for which the queue had no room. ``tell`` tells the metrics.
    """

    tell: Callable[[str, int], None] | None = None

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
        self.spans: Counter[str] = Counter(made=0, sent=0, failed=0)
        self._exporter = _Exporter(endpoint, self._count)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, context: RequestContext) -> str:
        """Make the spans of a request that is over, as part of the trace that its headers name, if
        they do. Returns the trace's id, in hexadecimal; "" for what is not a generation.
        """
        operation = _OPERATIONS.get(context.path)
        if operation is None:
            return ""
        # Contexts and records have the monotonic clock. It is set against the wall clock once for
        # each request: that may be corrected, but distances within a request are of one clock.
        offset = time.time_ns() - time.monotonic_ns()

        def at(clock_seconds: float) -> int:
            return offset + int(clock_seconds * 1e9)

        span = self._tracer.start_span(
            f"{operation} {context.model}".rstrip(),
            context=self._propagator.extract(_carrier(context.headers)),
            kind=SpanKind.SERVER,
            start_time=at(context.started),
        )
        if span.is_recording():
            span.set_attributes(_attributes(operation, context))
            if context.status >= 500 or (context.error_type and context.status < 400):
                span.set_status(Status(StatusCode.ERROR))
            self._count("made", 1)
            parent = set_span_in_context(span)
            for name, start, end, attributes in _children(context):
                child = self._tracer.start_span(
                    name, parent, start_time=at(start), attributes=attributes
                )
                self._count("made", 1)  # first: what has ended may be sent at once
                child.end(at(end))
        span.end(at(context.ended))
        return format(span.get_span_context().trace_id, "032x")

    def _count(self, state: str, spans: int) -> None:
        self.spans[state] += spans
        if self.tell is not None:
            self.tell(state, spans)

    def close(self) -> None:
        """Send what is left, but do not wait long for a collector that does not answer."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_LAST_SPANS)
        self._exporter.hush(False)
        made = self.spans["made"]
        if lost := made - self.spans["sent"]:
            log.warning("traces: %d of %d spans were not sent", lost, made)


Child = tuple[str, float, float, Attributes]  # name, start and end in clock seconds


def _children(context: RequestContext) -> Iterator[Child]:
    if context.records:
        arrival = min(record.arrival for record in context.records)
        yield "prepare", context.started, arrival, {}
    for index, record in enumerate(context.records[:_MOST_PROMPTS]):
        for name, start, end, attributes in _phases(record, context.ended):
            yield name, start, end, {"octavo.prompt_index": index, **attributes}


def _phases(record: RequestRecord, ended: float) -> Iterator[Child]:
    """Yield the phases that a request came to; the last may have ended with the request."""
    ended = ended if record.finished is None else record.finished
    phases: dict[str, Attributes] = {
        "queue": {},
        "prefill": {
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "octavo.computed_tokens": record.prompt_tokens - record.cached_tokens,
        },
        "decode": {
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "octavo.preemptions": record.preemptions,
            "octavo.draft_tokens": record.draft_tokens,
            "octavo.accepted_tokens": record.accepted_tokens,
        },
    }
    times = (record.arrival, record.scheduled, record.first_token, record.last_token)
    for (name, attributes), (start, end) in zip(phases.items(), pairwise(times), strict=True):
        if start is not None:
            yield name, start, ended if end is None else end, attributes


_ASKED = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


def _attributes(operation: str, context: RequestContext) -> Attributes:
    facts: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.id": context.request_id,
        "http.request.method": context.method,
        "http.route": context.path,
        "http.response.status_code": context.status,
        "error.type": context.error_type or None,
    }
    asked = context.asked
    if asked is not None:
        facts |= {f"gen_ai.request.{name}": getattr(asked, name) for name in _ASKED}
        facts |= {
            "gen_ai.request.model": asked.model or context.model,
            "gen_ai.request.choice.count": asked.n,
            "gen_ai.request.n": asked.n or 1,
            "gen_ai.request.stream": bool(asked.stream),
            "gen_ai.response.model": context.model,
            "gen_ai.response.id": context.answer_id,
        }
    if context.records:
        facts |= _of_records(context.records, context.ended)
    return {name: _sendable(value) for name, value in facts.items() if value is not None}


def _sendable(value: Value) -> Value:
    """Return an integer beyond 64 bits as text: it would cost the other spans of its batch."""
    return str(value) if isinstance(value, int) and value.bit_length() > 63 else value


# The access log's names for the same facts (access_log.py), and for times, which it has in ms.
_FACTS = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "outcome": "octavo.outcome",
    "priority": "octavo.priority",
    "preemptions": "octavo.preemptions",
    "slo_met": "octavo.slo_met",
}
_TIMES = {
    "queue_ms": "gen_ai.latency.time_in_queue",
    "ttft_ms": "gen_ai.latency.time_to_first_token",
    "e2e_ms": "gen_ai.latency.e2e",
}


def _of_records(records: list[RequestRecord], now: float) -> dict[str, Value | None]:
    """Return what the access log tells, with times in seconds. Phases only where there is one
    prompt: those of several overlap.
    """
    facts: dict[str, Any] = of_records(records, now)
    attributes: dict[str, Value | None] = {
        "gen_ai.request.max_tokens": records[0].max_tokens,
        "gen_ai.usage.num_sequences": sum(record.n for record in records),
        "gen_ai.response.finish_reasons": [
            reason.value for record in records for reason in record.finish_reasons if reason
        ],
        "octavo.client": records[0].scheduling.client or None,
        **{ours: facts[name] for name, ours in _FACTS.items()},
    }
    for name, ours in _TIMES.items():
        if facts[name] is not None:
            attributes[ours] = round(facts[name] / 1000, 6)
    start, first, last = records[0].scheduled, records[0].first_token, records[0].last_token
    if len(records) == 1 and start is not None and first is not None and last is not None:
        attributes |= {
            "gen_ai.latency.time_in_model_prefill": first - start,
            "gen_ai.latency.time_in_model_decode": last - first,
            "gen_ai.latency.time_in_model_inference": last - start,
        }
    return attributes


def _carrier(headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
    """Return the headers of W3C Trace Context: several states are a list, several parents none."""
    return {
        name: headers[name.encode()].decode("latin-1")
        for name in ("traceparent", "tracestate")
        if name.encode() in headers
    }
