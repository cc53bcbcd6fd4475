"""A request: what was asked for, and the one account of its progress and its end."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.scheduler.sequence import Sequence


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPLACED = "replaced"  # another request took its place in a full queue; its outcome is REJECTED
    SHED = "shed"  # it waited too long, or can no longer meet its target; its outcome is REJECTED


class Outcome(Enum):
    """How a request ended. It is set exactly once."""

    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    FAILED = "failed"


class AdmissionError(ValueError):
    """A request was refused before it ran; the message carries the arithmetic.

    ``param`` names the request field at fault. ``retryable`` says that the same request may be
    admitted later (the queue is full), which HTTP answers with 429 instead of 400. ``retry_after``
    says in how many seconds, if that is known.
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
    """What a request is promised, in seconds; None promises nothing. The deadline policy orders
    requests by it, and goodput counts the requests that met it.
    """

    ttft: float | None = None  # arrival to first token
    tpot: float | None = None  # mean time per token after the first, for each sequence
    e2el: float | None = None  # arrival to end

    @classmethod
    def first_of(cls, *targets: LatencyTarget | None) -> LatencyTarget | None:
        """Return each limit from the first target that sets it; None if no target sets any."""
        given = [target for target in targets if target is not None]
        limits = [
            next((limit for limit in candidates if limit is not None), None)
            for candidates in zip(*given, strict=True)
        ]
        return cls(*limits) if any(limit is not None for limit in limits) else None

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether a request that has ended met the whole target; False if it did not
        finish.
        """
        return (
            record.outcome is Outcome.FINISHED
            and record.first_token is not None
            and self.would_be_met(record, record.arrival + record.latency)
        )

    def would_be_met(self, record: RequestRecord, end: float) -> bool:
        """Return whether the target would be met if the request ended at ``end`` and had its first
        token by then. A request that was paused, because its client did not read, only has to have
        its first token in time.
        """
        first = end if record.first_token is None else record.first_token
        measured = first - record.arrival, record.tpot, end - record.arrival
        limits = self[:1] if record.pauses else self
        return all(
            limit is None or value <= limit for limit, value in zip(limits, measured, strict=False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParams:
    """Whose request it is and how it is to be scheduled, as `SamplingParams` say how its tokens are
    drawn. The server fills each field from the request's field of the same name, if there is one,
    and ``GET /requests`` shows those that `RequestSnapshot` has.
    """

    client: str = ""  # the name of an API key; fair shares and quotas are per client
    priority: int = 0  # lower runs first, as in vLLM
    weight: float = 1.0  # the client's share under the fair policy, relative to the others'
    target: LatencyTarget | None = None
    cache_salt: str | None = field(default=None, repr=False)


State = Literal["waiting", "prefill", "decode", "paused"]


@dataclass(slots=True)  # not frozen, for then each field would cost a call
class RequestSnapshot:
    """What operators are shown of a request (engine/snapshot.py). Times are in seconds. The
    furthest of a request's n sequences gives the state.
    """

    id: str  # the engine's `request_id`
    client: str
    priority: int
    state: State
    n: int
    prompt_tokens: int
    prompt_tokens_done: int  # in the pool: all that was found, or computed
    cached_tokens: int  # found in the prefix cache when it was first scheduled
    output_tokens: int  # over all n: what usage and log call completion_tokens
    max_tokens: int  # output tokens of each sequence, at most
    age: float  # since its arrival
    queue_time: float | None  # arrival to first scheduling
    ttft: float | None  # arrival to first token
    tokens_per_second: float | None  # since the first token
    preemptions: int
    on_target: bool | None  # whether it has kept its target so far; None: it has none


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The one state object of a request, from its arrival to its end. The scheduler works on it,
    and usage, logs and metrics are read from it. Times are clock seconds.
    """

    request_id: str
    arrival: float
    prompt_tokens: int  # 0 before it is tokenized: of a newcomer that asks for a place
    n: int = 1
    max_tokens: int | None = None  # of each sequence, as asked; once admitted, the actual limit
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
    finish_reasons: list[FinishReason | None] = field(default_factory=list)  # one per sequence
    error: str | None = None
    scheduling: SchedulingParams = SchedulingParams()
    params: SamplingParams = field(default_factory=SamplingParams, repr=False)
    # What the scheduler keeps from admission to the end:
    sequences: list[Sequence] = field(default_factory=list, repr=False)
    num_unfinished: int = field(default=0, repr=False)  # sequences
    charged: int = field(default=0, repr=False)  # prompt tokens to compute, as the policy was told
    counted: bool = field(default=False, repr=False)  # its prompt is in the scheduler's counters

    @property
    def scores_prompt(self) -> bool:
        """Return whether prompt logprobs are still to be computed."""
        return (
            self.params.prompt_logprobs is not None
            and self.sequences[0].num_scored < self.prompt_tokens - 1
        )

    @property
    def tpot(self) -> float:
        """Seconds per token after the first, for each sequence; 0 if there are none."""
        following = self.completion_tokens / self.n - 1
        if following <= 0 or self.first_token is None or self.last_token is None:
            return 0.0
        return (self.last_token - self.first_token) / following

    @property
    def latency(self) -> float:
        """Seconds from arrival to end; 0 before the end."""
        return 0.0 if self.finished is None else self.finished - self.arrival

    @property
    def is_waiting(self) -> bool:
        """Whether it has neither begun to run nor ended."""
        return self.scheduled is None and self.outcome is None

    @property
    def first_token_due(self) -> float | None:
        """Clock seconds at which the target wants the first token; None if it has no deadline."""
        target = self.scheduling.target or LatencyTarget()
        limits = [limit for limit in (target.ttft, target.e2el) if limit is not None]
        return self.arrival + min(limits) if limits else None

    def has_missed_target(self, now: float) -> bool:
        """Return whether the target is missed even if the next token comes now. ``tpot`` is a
        mean, so a request that is behind in it can still catch up.
        """
        target = self.scheduling.target
        if target is None:
            return False
        first = now if self.first_token is None else self.first_token
        return (target.ttft is not None and first > self.arrival + target.ttft) or (
            target.e2el is not None and now > self.arrival + target.e2el
        )


Standing = Literal["kept", "met", "missed", "shed", "aborted"]


def standing(record: RequestRecord, now: float) -> Standing | None:
    """Return how a request stands to its target at ``now`` (clock seconds); None if it has no
    target, or was refused before it was queued. Log, metrics and request list all use this.

    A running request is "kept" until it is "missed". At the end it is "met" if it finished and met
    the whole target, and "shed" if it was dropped from the queue. It is "aborted", which does not
    count against the server, if the client left while the target was still kept: a client that
    leaves later may have left because of the delay.
    """
    target, outcome = record.scheduling.target, record.outcome
    if target is None or not any(limit is not None for limit in target):
        return None
    if outcome is Outcome.REJECTED:
        dropped = {FinishReason.SHED, FinishReason.REPLACED}.intersection(record.finish_reasons)
        return "shed" if dropped else None
    if outcome is Outcome.FINISHED or outcome is Outcome.FAILED:
        return "met" if target.met_by(record) else "missed"
    if not target.would_be_met(record, now if record.finished is None else record.finished):
        return "missed"
    return "kept" if outcome is None else "aborted"


@dataclass(slots=True, kw_only=True)
class Request:
    """What the engine accepts. ``prompt_token_ids`` has at least one id."""

    request_id: str
    prompt_token_ids: Items[int]
    params: SamplingParams
    scheduling: SchedulingParams = SchedulingParams()
    begun: bytes = b""  # of a character at the prompt's end, which the answer's text completes
