"""Whose place in a full queue a newcomer takes.

A bounded queue that refuses whoever comes last would refuse the urgent because of those that are
not. So a newcomer that the policy puts before somebody who waits takes the place of the one that it
puts last of all:

- under ``priority``, of the least urgent by priority; of two alike the later one. Each
  ``priority_ageing`` seconds since its arrival make one a level more urgent, as in the queue: so
  whoever has waited long enough keeps its place.
- under ``deadline``, of the one that is due last; requests without a target, and those that have
  missed theirs, are due ``best_effort_deadline`` seconds after they came.
- under ``fair``, of the latest of the client that has most waiting for its weight, if the
  newcomer's client has less even with it, and with those that come together with it.
- under ``fcfs``, of nobody: who comes last is last.

Each of these orders is strict and puts the first to come first among those alike. So two do not
take turns in replacing each other, and to come back at once gains nobody a place. Whoever has run,
and whoever waits because it was preempted, is not replaced.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from functools import partial
from operator import attrgetter

from octavo.scheduler.policies.config import PolicyConfig
from octavo.scheduler.policies.deadline import first_due, is_missed
from octavo.scheduler.request import AdmissionError, RequestRecord
from octavo.scheduler.scheduler import Scheduler

_FEW = 64  # records that may have left


class Places:
    """The places of a scheduler's queue. Any thread may ask, while the requests that wait begin to
    run, and end, on the engine's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._order = _order(scheduler.config.policy)
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._records: list[RequestRecord] = []  # of those queued, the last to be served last
        self._alive = 0  # of these, when they were counted last
        self._leaving: list[RequestRecord] = []  # replaced, but still in the queue

    def check(
        self, asks: Items[RequestRecord], queued: int = 0, queued_tokens: int = 0
    ) -> list[RequestRecord]:
        """Whether the queue has room for all of ``asks`` beside ``queued`` requests on their way to
        it; without any, for one of which nothing is known, and which may come before everybody.
        Returns those whose places they take: `take` them. Raises `AdmissionError`, retryable.
        """
        with self._lock:
            self._leaving = [record for record in self._leaving if _waits(record)]
            before = queued - len(self._leaving)
            tokens = queued_tokens - sum(record.prompt_tokens for record in self._leaving)
            taken: list[RequestRecord] = []
            come: list[RequestRecord] = []
            for newcomer in list[RequestRecord | None](asks) or [None]:
                prompt_tokens = 0 if newcomer is None else newcomer.prompt_tokens
                while True:
                    try:
                        self._scheduler.check_queue(prompt_tokens, before, tokens)
                    except AdmissionError:
                        if (last := self._last(newcomer, taken, come)) is None:
                            raise
                        taken.append(last)
                        before -= 1
                        tokens -= last.prompt_tokens
                    else:
                        break
                before += 1
                tokens += prompt_tokens
                come += [] if newcomer is None else [newcomer]
            return taken

    def outranks(self, newcomer: RequestRecord | None) -> bool:
        """Whether a newcomer (None: of which nothing is known) would get a place although others,
        of which nothing is known either, are on their way to all that are left.
        """
        if self._order is None:
            return False
        with self._lock:
            return next(self._waiting([]), None) is None or self._last(newcomer, []) is not None

    def take(self, records: Iterable[RequestRecord]) -> None:
        """These are to leave the queue (`Engine.replace`)."""
        with self._lock:
            self._leaving += records

    def enter(self, record: RequestRecord) -> None:
        """It is in the queue, or on its way to it."""
        if self._order is None:
            return
        with self._lock:
            insort(self._records, record, key=self._order)
            if len(self._records) > 2 * self._alive + _FEW:
                self._records = [each for each in self._records if _waits(each)]
                self._alive = len(self._records)

    def _last(
        self,
        newcomer: RequestRecord | None,
        taken: list[RequestRecord],
        come: Items[RequestRecord] = (),
    ) -> RequestRecord | None:
        """The waiting requests that come last, after the newcomer and the others that ``come``."""
        if self._order is None:
            return None
        while self._records and not _waits(self._records[-1]):
            self._records.pop()
        order = self._order
        match self._scheduler.config.policy.scheduling_policy:
            case "fair":
                return self._of_most(newcomer, taken, come)
            case "deadline" if newcomer is not None:  # by then some have missed theirs
                order = partial(self._due, now=newcomer.arrival)
                last = max(self._waiting(taken), key=order, default=None)
            case _:
                last = next(self._waiting(taken), None)
        if last is None or newcomer is None or order(newcomer) < order(last):
            return last
        return None

    def _due(self, record: RequestRecord, now: float) -> float:
        due = first_due(record)
        if due is None or is_missed(record, now):
            best_effort = self._scheduler.config.policy.setting("best_effort_deadline")
            return record.arrival + best_effort
        return due

    def _of_most(
        self,
        newcomer: RequestRecord | None,
        taken: list[RequestRecord],
        come: Items[RequestRecord],
    ) -> RequestRecord | None:
        shares: defaultdict[str, float] = defaultdict(float)
        latest: dict[str, RequestRecord] = {}
        for record in self._waiting(taken):
            shares[record.client] += 1 / record.weight
            latest.setdefault(record.client, record)
        if not shares:
            return None
        for record in come:
            shares[record.client] += 1 / record.weight
        most = max(shares, key=shares.__getitem__)
        if newcomer is not None:
            own = shares.get(newcomer.client, 0.0) + 1 / newcomer.weight
            if own >= shares[most] or newcomer.client == most:
                return None
        return latest.get(most)

    def _waiting(self, taken: list[RequestRecord]) -> Iterator[RequestRecord]:
        """The last first."""
        gone = {id(record) for record in (*self._leaving, *taken)}
        return (each for each in reversed(self._records) if id(each) not in gone and _waits(each))


def _waits(record: RequestRecord) -> bool:
    return record.scheduled is None and record.outcome is None


def _order(policy: PolicyConfig) -> Callable[[RequestRecord], float] | None:
    """What orders those that wait for their places; the later is replaced first."""
    match policy.scheduling_policy:
        case "fcfs":
            return None
        case "priority":
            ageing = policy.setting("priority_ageing")
            return lambda record: record.priority * ageing + record.arrival
    return attrgetter("arrival")
