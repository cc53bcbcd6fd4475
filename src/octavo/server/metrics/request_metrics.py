"""What requests were and how they went: each record read once, when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.scheduler.request import FinishReason, Outcome, RequestRecord
from octavo.server.metrics.metric_families import Families

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
_WAIT = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_SMALL = (1, 2, 5, 10, 20)
_PRIORITIES = 8  # that clients ask for, with series of their own
_CLIENTS = 128

# Why a request was refused. Counted where the refusal is answered, or when its record ends if it
# was shed or replaced, which means that it has waited.
REJECTIONS = (
    *("capacity", "quota", "shed", "replaced", "draining", "invalid", "unauthorized"),
    *("forbidden", "not_found", "misdirected", "timeout", "gone", "error"),
)


class RequestMetrics:
    def __init__(self, families: Families, max_model_len: int) -> None:
        tokens = list(_one_two_five(max_model_len))
        histogram = families.histogram
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", _ITL
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after its first.",
            _ITL,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to first scheduling.", _LATENCY
        )
        self._queue_of_priority = families.open_histogram(
            "request_queue_time_by_priority_seconds",
            "Arrival to first scheduling, by the request's priority (lower runs first).",
            "priority",
            _WAIT,
            most=_PRIORITIES,
        )
        self._inference = histogram(
            "request_inference_time_seconds", "First scheduling to last token.", _LATENCY
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First scheduling to first token.", _LATENCY
        )
        self._decode = histogram(
            "request_decode_time_seconds", "First token to last token.", _LATENCY
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", tokens
        )
        self._generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a request, all choices.", tokens
        )
        self._max_tokens = histogram(
            "request_params_max_tokens", "Tokens that a request may generate, a choice.", tokens
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that no cached block held.",
            tokens,
        )
        self._n = histogram("request_params_n", "Choices a request asks for (n).", _SMALL)
        self._preemptions = histogram(
            "request_num_preemptions", "How often a request was preempted.", (0, *_SMALL)
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
        self._requests_of_client = families.open_counter(
            "client_requests",
            "Requests that have ended or were refused, of each named API key and, with an empty "
            "name, of all others.",
            "client",
            "outcome",
            most=_CLIENTS,
        )
        self._prompt_tokens_of_client = families.open_counter(
            "client_prompt_tokens",
            "Prompt tokens of requests that have ended, likewise.",
            "client",
            most=_CLIENTS,
        )
        self._generation_tokens_of_client = families.open_counter(
            "client_generation_tokens",
            "Tokens generated for requests that have ended, likewise.",
            "client",
            most=_CLIENTS,
        )
        self._requests_of_client.reserve("", *((outcome.value,) for outcome in Outcome))
        self._prompt_tokens_of_client.reserve("", ())
        self._generation_tokens_of_client.reserve("", ())
        self.expect([0])

    def expect(self, priorities: Iterable[int]) -> None:
        """Have series for the priorities that the server itself gives to requests."""
        for priority in priorities:
            self._queue_of_priority.reserve(str(priority), ())

    def refuse(self, reason: str, client: str = "") -> None:
        self._rejected[reason].inc()
        self._requests_of_client(client, Outcome.REJECTED.value).inc()

    def on_end(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.REJECTED:
            for reason in (FinishReason.SHED, FinishReason.REPLACED):
                if reason in record.finish_reasons:
                    self.refuse(reason.value, record.client)
            return
        if record.outcome is not None:
            self._requests_of_client(record.client, record.outcome.value).inc()
            if record.scheduled is not None:
                self._prompt_tokens_of_client(record.client).inc(record.prompt_tokens)
                self._generation_tokens_of_client(record.client).inc(record.completion_tokens)
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
        self._queue_of_priority(str(record.priority)).observe(record.scheduled - record.arrival)
        if record.first_token is None or record.last_token is None:
            return
        self._computed.observe(record.prompt_tokens - record.cached_tokens)
        self._ttft.observe(record.first_token - record.arrival)
        self._prefill.observe(record.first_token - record.scheduled)
        self._decode.observe(record.last_token - record.first_token)
        self._inference.observe(record.last_token - record.scheduled)
        if record.completion_tokens > record.n and not record.pauses:
            self._per_token.observe(record.tpot)


def _reason(record: RequestRecord) -> str:
    """Return one word for how a request ended: of several choices, "length" if any was cut."""
    if record.outcome is Outcome.ABORTED:
        return "abort"
    if record.outcome is not Outcome.FINISHED:
        return "error"
    return "length" if FinishReason.LENGTH in record.finish_reasons else "stop"


def _one_two_five(most: int) -> Iterator[int]:
    """Yield 1, 2, 5, 10, … up to ``most``."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return
            yield digit * scale
        scale *= 10
