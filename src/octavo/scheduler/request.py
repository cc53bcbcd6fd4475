"""A request's life: what was asked, how far each of its sequences is, and its one outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from octavo.sampling.params import SamplingParams


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPLACED = "replaced"  # another took its place in a full queue; its outcome is REJECTED
    SHED = "shed"  # it waited too long, or could no longer be in time; its outcome is REJECTED


class Outcome(Enum):
    """How a request ended; set exactly once."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    FAILED = "failed"


class AdmissionError(ValueError):
    """A request refused before it ran; the message carries the arithmetic.

    ``param`` names the request field at fault; ``retryable`` says that the same request may be
    admitted later (queue full), which HTTP answers with 429 instead of 400, and ``retry_after`` in
    how many seconds, where that can be told.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        retryable: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retryable = retryable
        self.retry_after = retry_after


class LatencyTarget(NamedTuple):
    """What a request is promised, in seconds; None: nothing. Of it come its deadlines, and whether
    it counts as good.
    """

    ttft: float | None = None  # arrival to first token
    tpot: float | None = None  # mean time per token after the first, of each sequence
    e2el: float | None = None  # arrival to end

    @classmethod
    def first_of(cls, *targets: LatencyTarget | None) -> LatencyTarget | None:
        """Each limit as the first has it that has one; None if none has any."""
        given = [target for target in targets if target is not None]
        limits = [
            next((limit for limit in of_each if limit is not None), None)
            for of_each in zip(*given, strict=True)
        ]
        return cls(*limits) if any(limit is not None for limit in limits) else None

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request that has ended kept all of it; False if it was not finished."""
        return (
            record.outcome is Outcome.FINISHED
            and record.first_token is not None
            and self._kept(record, record.arrival + record.latency)
        )

    def _kept(self, record: RequestRecord, end: float) -> bool:
        """Whether all would be kept if it ended then, and had its first token by then. Of a request
        that was paused, because its client did not read, only the first token had to be in time.
        """
        first = end if record.first_token is None else record.first_token
        measured = first - record.arrival, record.tpot, end - record.arrival
        limits = self[:1] if record.pauses else self
        return all(
            limit is None or value <= limit for limit, value in zip(limits, measured, strict=False)
        )


@dataclass(slots=True)
class RequestRecord:
    """The one record from which usage, logs and metrics are read. Times are clock seconds."""

    request_id: str
    arrival: float
    prompt_tokens: int
    n: int = 1
    max_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt, in the prefix cache when its computation began
    completion_tokens: int = 0  # over all n sequences
    scheduled: float | None = None  # first time in a batch
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    pauses: int = 0  # because its output was not read
    draft_tokens: int = 0  # guessed and checked, over all n sequences
    accepted_tokens: int = 0  # of these, those that became completion tokens
    outcome: Outcome | None = None
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # one a sequence
    error: str | None = None
    client: str = ""  # as in `Request`, and the next three
    priority: int = 0
    weight: float = 1.0
    target: LatencyTarget | None = None

    @property
    def tpot(self) -> float:
        """Seconds per token after the first, of each sequence; 0 where there are none."""
        following = self.completion_tokens / self.n - 1
        if following <= 0 or self.first_token is None or self.last_token is None:
            return 0.0
        return (self.last_token - self.first_token) / following

    @property
    def latency(self) -> float:
        """Seconds from arrival to end."""
        return 0.0 if self.finished is None else self.finished - self.arrival


Standing = Literal["kept", "met", "missed", "shed", "aborted"]


def standing(record: RequestRecord, now: float) -> Standing | None:
    """What has become of a request's target by ``now`` (clock seconds), for all who tell of it;
    None: nothing is promised, or it was refused before it was queued.

    While it runs it is "kept" or already "missed". Then it is "met" if it was finished and kept to
    all of it; "shed" if it was dropped from the queue; and "aborted", which says nothing of the
    server, if its client left before it was broken: after that it may have left for that reason.
    """
    target, outcome = record.target, record.outcome
    if target is None or not any(limit is not None for limit in target):
        return None
    if outcome is Outcome.REJECTED:
        dropped = {FinishReason.SHED, FinishReason.REPLACED}.intersection(record.finish_reasons)
        return "shed" if dropped else None
    if outcome is Outcome.FINISHED or outcome is Outcome.FAILED:
        return "met" if target.met_by(record) else "missed"
    if not target._kept(record, now if record.finished is None else record.finished):
        return "missed"
    return "kept" if outcome is None else "aborted"


@dataclass(slots=True, kw_only=True)
class Request:
    """What the engine accepts. ``prompt_token_ids`` has at least one id."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str | None = None
    client: str = ""  # who asks: the name of an API key; fair shares and quotas are among these
    weight: float = 1.0  # its client's share among fair ones, against the others'
    target: LatencyTarget | None = None
    begun: bytes = b""  # of a character at the prompt's end, which the answer's text completes
