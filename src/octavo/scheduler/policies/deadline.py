"""Earliest deadline first.

A request's target (`LatencyTarget`) gives each of its tokens a deadline: the first is due ``ttft``
after arrival, the n-th after it n × ``tpot`` after the first, and all of them ``e2el`` after
arrival; the earliest of these counts. Rules:

- Next is the sequence that is due first. If it would be late by waiting longer, it preempts the
  running sequence that is due last, provided that this one is far enough ahead of its deadlines
  for its tokens to be computed again. A preemption costs that and the newcomer's prompt, and the
  preempted sequence needs several times as much to spare. So two sequences cannot preempt each
  other by turns: between two preemptions, most of the time is spent on new tokens.
- Requests without a target have a queue of their own, in order of arrival, together with those that
  have missed their target for good: meeting another target is worth more than being less late.
  The first of this queue is due when it has been the first for ``best_effort_deadline`` seconds,
  and is not preempted after that. So one of them is admitted every so often, however many requests
  have targets, and these are not pushed aside, however many requests have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any

from octavo.scheduler.policies.base import AgeingQueue, Policy, SortedQueue

if TYPE_CHECKING:
    from octavo.scheduler.request import RequestRecord
    from octavo.scheduler.sequence import Sequence

_CARE = 2.0  # times the predicted time to be kept for being in time
_WORTH = 4.0  # times the cost of a preemption that the preempted sequence must have to spare
_LOOKED_AT = 32  # waiting sequences, to find one that would be late


def deadline(seq: Sequence) -> float:
    """Return the clock second at which its next token is due; infinity without a target."""
    record = seq.owner
    target = record.scheduling.target
    if target is None:
        return inf
    end = inf if target.e2el is None else record.arrival + target.e2el
    if record.first_token is None:
        return end if target.ttft is None else min(end, record.arrival + target.ttft)
    if target.tpot is None:
        return end
    drawn = len(seq.token_ids) - record.prompt_tokens
    return min(end, record.first_token + drawn * target.tpot)


class Deadline(Policy):
    name = "deadline"
    help = "who is due first"
    preempts = True
    replaces = True

    def __init__(self, best_effort_deadline: float = 60.0) -> None:
        """``best_effort_deadline``: seconds after which the first without a target is due."""
        self._best_effort = best_effort_deadline
        self._in_time = SortedQueue(lambda seq: (deadline(seq), seq.order))
        self._others = AgeingQueue(self)

    def push(self, seq: Sequence) -> None:
        (self._in_time if self._is_in_time(seq) else self._others).push(seq)

    def remove(self, seq: Sequence) -> None:
        (self._in_time if seq in self._in_time else self._others).remove(seq)

    def clear(self) -> None:
        self._in_time.clear()
        self._others.clear()

    def head(self) -> Sequence | None:
        first, other = self._first_in_time(), self._others.first
        if first is None or other is None:
            return first or other
        due = self._others.began + self._best_effort
        return first if deadline(first) <= due else other

    def _first_in_time(self) -> Sequence | None:
        queue = self._in_time
        while (first := queue.first) is not None and first.owner.has_missed_target(self.now):
            queue.remove(first)
            self._others.push(first)
        return first

    def in_turn(self) -> Iterator[Sequence]:
        """Iterate as `head` goes when each sequence it names leaves."""
        in_time, others = iter(self._in_time), self._others.turns()
        late: list[tuple[tuple[int, int], float, Sequence]] = []  # a heap, by arrival
        first, other = next(in_time, None), next(others, None)
        while True:
            while first is not None and first.owner.has_missed_target(self.now):
                began = max(self.now, first.queued) - first.stood
                heappush(late, (first.order, began, first))
                first = next(in_time, None)
            from_late = bool(late) and (other is None or late[0][0] < other[1].order)
            due = late[0][1:] if from_late else other
            if due is None or (first and deadline(first) <= due[0] + self._best_effort):
                if first is None:
                    return
                yield first
                first = next(in_time, None)
                continue
            yield due[1]
            if from_late:
                heappop(late)
            else:
                other = next(others, None)

    def rank(self, seq: Sequence) -> Any:
        return self._due(seq), seq.order

    def preemptor(self) -> Sequence | None:
        first = self._first_in_time()
        return first if self._is_urgent() else None

    def _is_urgent(self) -> bool:
        """Return whether a waiting sequence may be late unless one is admitted now: the prompts up
        to its own, one after the other, take up the time that is left.
        """
        each = self.rates.step_seconds
        tokens = 0
        for seq in islice(self._in_time, _LOOKED_AT):
            tokens += len(seq.token_ids)
            if deadline(seq) - self.now <= _CARE * (each + self.rates.mean_seconds(tokens)):
                return True
        return False

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        due = self._due(running)
        if due <= deadline(waiting):
            return False
        if not self._is_in_time(running):
            return True
        tokens = len(running.token_ids) + len(waiting.token_ids)
        return due - self.now > _WORTH * self.rates.mean_seconds(tokens)

    def replaced(
        self,
        newcomer: RequestRecord | None,
        waiting: Iterator[RequestRecord],
        joining: Items[RequestRecord] = (),
    ) -> RequestRecord | None:
        """Return the request that is due last, if the newcomer is due before it. Requests without a
        target, and those that have missed theirs, are due ``best_effort_deadline`` seconds after
        arrival.
        """
        if newcomer is None:
            return next(waiting, None)
        now = newcomer.arrival

        def due(record: RequestRecord) -> float:
            first = record.first_token_due
            if first is None or record.has_missed_target(now):
                return record.arrival + self._best_effort
            return first

        last = max(waiting, key=due, default=None)
        return last if last is not None and due(newcomer) < due(last) else None

    def ahead_of(self, record: RequestRecord) -> list[Sequence]:
        """Return those that come first if all requests with targets are in time: of the others,
        one every ``best_effort_deadline`` seconds.
        """
        queue = list(self._others)
        since = self._others.began if queue else record.arrival
        due = record.first_token_due
        if due is None:
            due = since + (len(queue) + 1) * self._best_effort
        return [
            *(seq for seq in list(self._in_time) if deadline(seq) <= due),
            *(seq for turn, seq in enumerate(queue, 1) if since + turn * self._best_effort < due),
        ]

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._in_time
        yield from self._others

    def _due(self, seq: Sequence) -> float:
        """Return the clock second at which a running sequence is due."""
        if self._is_in_time(seq):
            return deadline(seq)
        return self.now + self._best_effort - seq.stood

    def _is_in_time(self, seq: Sequence) -> bool:
        """Return whether it has a target that can still be met."""
        return deadline(seq) < inf and not seq.owner.has_missed_target(self.now)
