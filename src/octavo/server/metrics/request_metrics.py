"""What requests were and how they went: each record read once, when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from octavo.scheduler.request import FinishReason, Outcome, RequestRecord
from octavo.server.metrics.metric_families import Families

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
WAIT = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_SMALL = (1, 2, 5, 10, 20)
PRIORITIES = 8  # that clients ask for, with series of their own
CLIENTS = 128

# Why a request was refused. Counted where the refusal is answered, or when its record ends if it
# was shed or replaced, which means that it has waited.
REJECTIONS = (
    *("capacity", "quota", "shed", "replaced", "draining", "invalid", "unauthorized"),
    *("forbidden", "not_found", "misdirected", "timeout", "gone", "error"),
)

Value = Callable[[RequestRecord], float | None]

# By name: what it is, the two times of a record that it lies between, and its buckets.
_TIMES = {
    "time_to_first_token_seconds": ("Arrival to first token.", "arrival", "first_token", _TTFT),
    "e2e_request_latency_seconds": ("Arrival to end.", "arrival", "finished", _LATENCY),
    "request_queue_time_seconds": (
        *("Arrival to first scheduling.", "arrival", "scheduled", _LATENCY),
    ),
    "request_inference_time_seconds": (
        *("First scheduling to last token.", "scheduled", "last_token", _LATENCY),
    ),
    "request_prefill_time_seconds": (
        *("First scheduling to first token.", "scheduled", "first_token", _LATENCY),
    ),
    "request_decode_time_seconds": (
        *("First token to last token.", "first_token", "last_token", _LATENCY),
    ),
}
# By name: what it is, and how many tokens; None: the record has no such count.
_TOKENS: dict[str, tuple[str, Value]] = {
    "request_prompt_tokens": ("Prompt tokens of a request.", lambda r: r.prompt_tokens),
    "request_generation_tokens": (
        "Generated tokens of a request, all choices.",
        lambda r: r.completion_tokens,
    ),
    "request_params_max_tokens": (
        "Tokens that a request may generate, a choice.",
        lambda r: r.max_tokens,
    ),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that no cached block held.",
        lambda r: None if r.last_token is None else r.prompt_tokens - r.cached_tokens,
    ),
}


def _between(begin: str, end: str) -> Value:
    def value(record: RequestRecord) -> float | None:
        first, last = getattr(record, begin), getattr(record, end)
        return None if first is None or last is None else last - first

    return value


def _per_token(record: RequestRecord) -> float | None:
    return record.tpot if record.completion_tokens > record.n and not record.pauses else None


def histograms(families: Families, max_model_len: int) -> list[tuple[Any, Value]]:
    """Return histograms, and what reads a record's value in each; None: it has none."""
    made = families.histogram
    of_tokens = list(_one_two_five(max_model_len))
    per_token = "A request's mean time per token after its first."
    preemptions = "How often a request was preempted."
    return [
        *(
            (made(name, what, buckets), _between(begin, end))
            for name, (what, begin, end, buckets) in _TIMES.items()
        ),
        *((made(name, what, of_tokens), count) for name, (what, count) in _TOKENS.items()),
        (made("request_time_per_output_token_seconds", per_token, ITL), _per_token),
        (made("request_params_n", "Choices a request asks for (n).", _SMALL), lambda r: r.n),
        (made("request_num_preemptions", preemptions, (0, *_SMALL)), lambda r: r.preemptions),
    ]


def ending(record: RequestRecord) -> str:
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
