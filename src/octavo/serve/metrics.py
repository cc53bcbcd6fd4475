"""Prometheus metrics under vLLM's names, with the prefix ``octavo:``.

Two sources, so that no count is kept twice: `EngineStats`, read when Prometheus asks, and each
request's `RequestRecord`, read once when it ends. Only the gap between tokens is timed here.
Children are looked up by label at the start, not per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from octavo.engine.engine import EngineStats, Step
from octavo.schedule.request import FinishReason, Outcome, RequestRecord

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL = (1, 2, 5, 10, 20)
_STEP_TIME = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1, 2, 5),
)
_LABELS = ("model_name", "engine")


class Metrics:
    """``stats`` is read on each scrape. ``max_model_len`` bounds the token histograms."""

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], max_model_len: int
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        tokens = list(_one_two_five(max_model_len))
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _TTFT
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", _ITL
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after its first.",
            _ITL,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Time in WAITING.", _LATENCY)
        self._inference = self._histogram(
            "request_inference_time_seconds", "First scheduling to last token.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First scheduling to first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to last token.", _LATENCY
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", tokens
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request, all choices.", tokens
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a request.", tokens
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that no cached block held.",
            tokens,
        )
        self._n = self._histogram("request_params_n", "n of a request.", _SMALL)
        self._preemptions = self._histogram(
            "request_num_preemptions", "How often a request was preempted.", (0, *_SMALL)
        )
        success = Counter(
            "octavo:request_success",
            "Requests that have ended, by how.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._ended = {
            reason: success.labels(*self._labels, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._http = Counter(
            "octavo:http_requests",
            "HTTP requests answered.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._rejections = Counter(
            "octavo:admission_rejections",
            "Requests the engine did not admit.",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self.rejected = {
            reason: self._rejections.labels(*self._labels, reason)
            for reason in ("capacity", "invalid")
        }
        self.registry.register(_EngineCollector(self._labels, stats))
        ProcessCollector(registry=self.registry)

        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS
        )

    def info(self, name: str, what: str, facts: dict[str, object]) -> None:
        """A gauge that is always 1 and says something in its labels."""
        Gauge(f"octavo:{name}", what, tuple(facts), registry=self.registry).labels(
            *map(str, facts.values())
        ).set(1)

    def predicting(self, ratio: Callable[[], float]) -> Callable[[float, float], None]:
        """Step times beside a calibrated cost model's; returns what is to be told each step's
        seconds, predicted and actual. ``ratio``, of actual to predicted of late, is read on scrape.
        """
        predicted = self._histogram(
            "predicted_step_time_seconds", "A step's time, as the cost model has it.", _STEP_TIME
        )
        actual = self._histogram(
            "step_time_seconds", "A step's time, from scheduling to delivery.", _STEP_TIME
        )
        Gauge(
            "octavo:step_time_ratio",
            "Actual to predicted step time, of the last steps; above 1: slower than calibrated.",
            _LABELS,
            registry=self.registry,
        ).labels(*self._labels).set_function(ratio)

        def tell(predicted_seconds: float, actual_seconds: float) -> None:
            predicted.observe(predicted_seconds)
            actual.observe(actual_seconds)

        return tell

    def http(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    # Observer, called on the engine's thread

    def on_step(self, step: Step) -> None:
        self._step_tokens.observe(step.scheduled.batch.num_tokens)

    def on_end(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.REJECTED:
            return  # counted where it is answered, by `rejected`
        self._ended[_reason(record)].inc()
        self._prompt_tokens.observe(record.prompt_tokens)
        self._generation_tokens.observe(record.completion_tokens)
        self._n.observe(record.n)
        self._preemptions.observe(record.preemptions)
        if record.max_tokens is not None:
            self._max_tokens.observe(record.max_tokens)
        if record.finished is not None:
            self._e2e.observe(record.latency)
        if record.scheduled is None:
            return
        self._queue.observe(record.scheduled - record.arrival)
        if record.first_token is None or record.last_token is None:
            return
        self._computed.observe(record.prompt_tokens - record.cached_tokens)
        self._ttft.observe(record.first_token - record.arrival)
        self._prefill.observe(record.first_token - record.scheduled)
        self._decode.observe(record.last_token - record.first_token)
        self._inference.observe(record.last_token - record.scheduled)
        if record.completion_tokens > record.n:
            self._per_token.observe(record.tpot)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) in the format that ``accept`` asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _histogram(self, name: str, what: str, buckets: Iterable[float]) -> Any:
        return Histogram(
            f"octavo:{name}", what, _LABELS, buckets=tuple(buckets), registry=self.registry
        ).labels(*self._labels)


class _EngineCollector(Collector):
    def __init__(self, labels: tuple[str, ...], stats: Callable[[], EngineStats]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, what, value in (
            ("num_requests_running", "Sequences in the batch.", stats.running),
            ("num_requests_waiting", "Sequences waiting, preempted ones too.", stats.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("kv_cache_waste_perc", "Share of allocated KV slots not filled.", stats.kv_waste),
        ):
            gauge = GaugeMetricFamily(f"octavo:{name}", what, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, what, value in (
            ("prompt_tokens", "Prompt tokens of scheduled requests.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prompt_tokens_cached", "Prompt tokens not recomputed.", stats.prefix_hits),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("num_preemptions", "Preemptions.", stats.preemptions),
            ("engine_steps", "Steps the engine has run.", stats.steps),
            ("engine_computed_tokens", "Tokens put through the model.", stats.computed_tokens),
            ("decode_passes", "Passes of decoding sequences.", stats.decode_passes),
            ("spec_decode_num_drafts", "Passes that checked a draft.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens checked.", stats.draft_tokens),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens that became output.",
                stats.accepted_tokens,
            ),
            (
                "spec_decode_drafting_seconds",
                "Time that the drafter took.",
                stats.drafting_seconds,
            ),
            (
                "spec_decode_drafter_failures",
                "Drafters given up on; there is no speculation since.",
                stats.drafter_failures,
            ),
        ):
            counter = CounterMetricFamily(f"octavo:{name}", what, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        positions = CounterMetricFamily(
            "octavo:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that became output, by their place in the draft.",
            labels=(*_LABELS, "position"),
        )
        for position, accepted in enumerate(stats.accepted_per_position):
            positions.add_metric((*self._labels, str(position)), accepted)
        yield positions
        saved = GaugeMetricFamily(
            "octavo:spec_decode_time_saved_seconds",
            "Decode time saved by speculation, as steps' times tell; below 0 where it cost more.",
            labels=_LABELS,
        )
        saved.add_metric(self._labels, stats.time_saved_seconds)
        yield saved


def _reason(record: RequestRecord) -> str:
    """One word for a request: of several choices, "length" if any was cut."""
    if record.outcome is Outcome.ABORTED:
        return "abort"
    if record.outcome is not Outcome.FINISHED:
        return "error"
    return "length" if FinishReason.LENGTH in record.finish_reasons else "stop"


def _one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, … up to ``most``."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return
            yield digit * scale
        scale *= 10
