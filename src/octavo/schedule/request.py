"""A request's life: what was asked, how far each of its sequences is, and its one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.sample.params import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Outcome(Enum):
    """How a request ended; set exactly once."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    FAILED = "failed"


class AdmissionError(ValueError):
    """A request refused before it ran; the message carries the arithmetic.

    ``param`` names the request field at fault; ``retryable`` says that the same request may be
    admitted later (queue full), which HTTP answers with 503 instead of 400.
    """

    def __init__(self, message: str, param: str | None = None, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.param = param
        self.retryable = retryable


@dataclass(slots=True)
class RequestRecord:
    """The one record from which usage, logs and metrics are read. Times are clock seconds."""

    request_id: str
    arrival: float
    prompt_tokens: int
    n: int = 1
    max_tokens: int | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first scheduling
    completion_tokens: int = 0  # over all n sequences
    scheduled: float | None = None  # first time in a batch
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    draft_tokens: int = 0  # guessed and checked, over all n sequences
    accepted_tokens: int = 0  # of these, those that became completion tokens
    outcome: Outcome | None = None
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # one a sequence
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Request:
    """What the engine accepts. ``prompt_token_ids`` has at least one id."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str | None = None
