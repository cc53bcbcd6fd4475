"""Which requests are admitted to the queue. All refusals are made here, with their arithmetic.

A request that can never run is refused for good; one that the queue has no place for, or that would
wait too long by prediction, is refused for now. All of it may be called from any thread and waits
for nothing: refused clients are told at once while the engine is at its busiest. The queue is
compared in integers, and a forecast reads the engine once a step, however many ask.

A bounded queue that refused whoever comes last would refuse urgent requests because of others. So
a newcomer takes the place of a waiting request that the policy orders behind it
(`Policy.replaced`), unless that one has run before.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import AdmissionError, Request, RequestRecord
from octavo.words import plural

if TYPE_CHECKING:
    from octavo.scheduler.scheduler import Scheduler

_WITHIN = 0.8  # of a target that a prediction may take, because it is only a prediction
_FEW = 64  # records that may have left the queue


class Forecast(NamedTuple):
    """Predictions for a request, in seconds. Before the first step nothing is known: ``wait`` is
    None then, and the others are 0, for which no request is refused.
    """

    wait: float | None  # until it is scheduled
    ttft: float  # until its first token
    tpot: float  # per token after it, for it and for all that run beside it


class Forecaster(Protocol):
    @property
    def expected_output(self) -> float:
        """Tokens of an answer, by those of late."""
        ...

    def forecast(
        self, asks: RequestRecord | None = None, pending: int = 0, pending_tokens: int = 0
    ) -> Forecast:
        """Predict for a request that comes now, behind ``pending`` requests on their way to the
        queue; None: one that is behind all others.
        """
        ...


def needed_blocks(num_tokens: int, config: SchedulerConfig, layout: KvLayout) -> int:
    """Return the blocks that must be free for a sequence of ``num_tokens`` positions, at its peak.
    If all are reserved at admission, sliding windows give nothing back in time.
    """
    if config.memory == "reserve":
        blocks = -(-num_tokens // layout.block_size) * len(layout.groups)
        return blocks + layout.state_blocks
    return peak_blocks(layout, num_tokens)


class Admission:
    """Admits requests to a scheduler's queue."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.within_target = False  # refuse requests that would miss their target by prediction
        self.forecaster: Forecaster | None = None
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._lock = threading.Lock()
        # Guarded by the lock:
        # Those that wait, by `Policy.replacement_key`, and a few more
        self._queued: list[RequestRecord] = []
        self._num_alive = 0  # of these, when they were last counted
        self._leaving: list[RequestRecord] = []  # replaced, but still in the queue

    # For good

    def check(self, request: Request) -> int:
        """Return the most output tokens of each sequence; raise `AdmissionError` if the request can
        never run. Of its n sequences only one must fit the pool: the others can be preempted.
        """
        config, layout = self._scheduler.config, self._scheduler.kv.layout
        prompt = len(request.prompt_token_ids)
        limit = config.max_model_len
        if prompt == 0:
            raise AdmissionError("the prompt has no tokens; at least 1 is needed", "prompt")
        if prompt >= limit:
            raise AdmissionError(
                f"the prompt has {prompt} tokens; the context of {limit} tokens leaves room for "
                f"{limit - 1} and at least 1 new token",
                "prompt",
            )
        wanted, n = request.params.max_tokens, request.params.n
        max_tokens = limit - prompt if wanted is None else wanted
        if prompt + max_tokens > limit:
            raise AdmissionError(
                f"{prompt} prompt tokens + {max_tokens} max_tokens = {prompt + max_tokens}, more "
                f"than the context of {limit} tokens",
                "max_tokens",
            )
        if n > config.max_num_seqs:
            raise AdmissionError(f"n is {n}, more than max_num_seqs {config.max_num_seqs}", "n")
        if n > 1 and config.memory == "reserve":
            raise AdmissionError(f"n is {n}; memory is reserved for one sequence", "n")
        # The last token is never put through the model.
        needed = needed_blocks(prompt + max_tokens - 1, config, layout)
        num_blocks = self._scheduler.kv.pool.num_blocks
        if needed > num_blocks:
            raise AdmissionError(
                f"{prompt} prompt tokens + {max_tokens} max_tokens need {needed} KV blocks of "
                f"{layout.block_size} tokens; there are {num_blocks}",
                "max_tokens",
            )
        return max_tokens

    # For now

    def check_queue(
        self, asks: Items[RequestRecord], pending: int, pending_tokens: int
    ) -> list[RequestRecord]:
        """Raise `AdmissionError`, for now, if the queue has no place for all of ``asks``, and for
        good if it can never have. ``pending``: requests on their way to the queue, with so many
        prompt tokens. Without ``asks``: for a request of which nothing is known, and which may come
        first. Return the requests whose places they would take; tell `enter`.
        """
        scheduler = self._scheduler
        config = scheduler.config
        if config.max_num_queued_reqs is not None:
            most = config.max_num_queued_reqs + config.max_num_seqs
            if len(asks) > most:
                raise AdmissionError(
                    f"there are {len(asks)} prompts, and no more than {most} may run and wait",
                    "prompt",
                )
        # Requests that find a free slot at the next step do not wait, whether or not the engine has
        # seen them since the last one.
        left = min(scheduler.num_left_waiting, len(scheduler.waiting))
        slots = 0 if left else scheduler.kv.num_free_slots
        try:
            return self.find_places(asks, pending - slots, pending_tokens)
        except AdmissionError as error:
            if self.forecaster is not None:
                forecast = self.forecaster.forecast(None, pending, pending_tokens)
                error.retry_after = forecast.wait
            raise

    def find_places(
        self, asks: Items[RequestRecord], pending: int = 0, pending_tokens: int = 0
    ) -> list[RequestRecord]:
        """As `check_queue`, for requests that all have to wait, and without a time to retry."""
        waiting = self._scheduler.waiting
        with self._lock:
            self._leaving = [record for record in self._leaving if record.is_waiting]
            queued = len(waiting) + pending - len(self._leaving)
            tokens = waiting.tokens + pending_tokens
            tokens -= sum(record.prompt_tokens for record in self._leaving)
            replaced: list[RequestRecord] = []
            joining: list[RequestRecord] = []
            for newcomer in list[RequestRecord | None](asks) or [None]:
                prompt_tokens = 0 if newcomer is None else newcomer.prompt_tokens
                while refusal := self._refusal(max(0, queued), tokens, prompt_tokens):
                    other = self._policy.replaced(newcomer, self._replaceable(replaced), joining)
                    if other is None:
                        raise AdmissionError(refusal, retryable=True)
                    replaced.append(other)
                    queued -= 1
                    tokens -= other.prompt_tokens
                queued += 1
                tokens += prompt_tokens
                joining += [] if newcomer is None else [newcomer]
            return replaced

    def _refusal(self, queued: int, queued_tokens: int, prompt_tokens: int) -> str | None:
        """Return why a queue of so many requests has no place for another; None if it has. An empty
        queue takes any request.
        """
        config = self._scheduler.config
        bound = config.max_num_queued_reqs
        if bound is not None and queued >= bound:
            return f"{plural(queued, 'request', 'wait')}, of at most {bound}"
        bound = config.max_num_queued_tokens
        if bound is not None and queued and queued_tokens + prompt_tokens > bound:
            return (
                f"{plural(queued_tokens, 'prompt token', 'wait')}; with {prompt_tokens} more they "
                f"exceed {bound}"
            )
        return None

    def would_replace(self, newcomer: RequestRecord | None) -> bool:
        """Return whether a newcomer (None: nothing is known of it) would get a place even if others
        of which nothing is known were on their way to all that are left.
        """
        if not self._policy.replaces:
            return False
        with self._lock:
            waiting = self._replaceable([])
            return not any(waiting) or (
                self._policy.replaced(newcomer, self._replaceable([])) is not None
            )

    def enter(self, records: Items[RequestRecord], replaced: Iterable[RequestRecord]) -> None:
        """Note that ``records`` are in the queue, or on their way to it, and that those they
        replaced will leave it (`Engine.replace`).
        """
        if not self._policy.replaces:
            return
        with self._lock:
            self._leaving += replaced
            for record in records:
                insort(self._queued, record, key=self._policy.replacement_key)
            if len(self._queued) > 2 * self._num_alive + _FEW:
                self._queued = [each for each in self._queued if each.is_waiting]
                self._num_alive = len(self._queued)

    def _replaceable(self, replaced: list[RequestRecord]) -> Iterator[RequestRecord]:
        """Iterate over the requests that may be replaced beside ``replaced``, the last first."""
        while self._queued and not self._queued[-1].is_waiting:
            self._queued.pop()
        gone = {id(record) for record in (*self._leaving, *replaced)}
        return (each for each in reversed(self._queued) if id(each) not in gone and each.is_waiting)

    def check_forecast(self, asks: Items[RequestRecord], pending: int, pending_tokens: int) -> None:
        """Raise `AdmissionError`, for now, if the last of ``asks`` would wait too long by
        prediction or, where that is asked for, miss its target.
        """
        scheduler, forecaster = self._scheduler, self.forecaster
        longest = scheduler.config.max_queue_time
        if not asks or forecaster is None:
            return
        target = asks[-1].scheduling.target if self.within_target else None
        if longest is None and target is None:
            return
        # An idle engine takes any request: waiting makes nothing better, and step times are only
        # learned from steps.
        if not (pending or scheduler.waiting or scheduler.decoding or scheduler.prefilling):
            return
        pending += len(asks) - 1
        pending_tokens += sum(record.prompt_tokens for record in asks[:-1])
        wait, ttft, tpot = forecaster.forecast(asks[-1], pending, pending_tokens)
        if longest is not None and wait is not None and wait > longest:
            raise AdmissionError(
                f"it would wait {wait:.3g} s by prediction, and {longest:g} s is the most",
                retryable=True,
                retry_after=wait - longest,
            )
        if target is None:
            return
        for name, limit, predicted, until in (
            ("first token", target.ttft, ttft, ttft),
            ("token", target.tpot, tpot, forecaster.expected_output * tpot),
        ):
            if limit is not None and predicted > limit * _WITHIN:
                raise AdmissionError(
                    f"too much to do: the {name} would take {1000 * predicted:.0f} ms by "
                    f"prediction, and {1000 * limit:.0f} ms are promised",
                    retryable=True,
                    retry_after=max(until - limit * _WITHIN, 0.0),
                )
