"""Earliest deadline first.

A request's target (`LatencyTarget`) gives each of its tokens a deadline: the first is due ``ttft``
after arrival, the n-th after it n × ``tpot`` after the first, and all of them ``e2el`` after
arrival; whichever of these comes first. Then:

- Next is who is due first. When somebody would be late if it went on waiting, it takes the place
  of whoever is due last: one that is ahead of its deadlines loses nothing by waiting, if it is far
  enough ahead for its tokens to be computed again. An exchange costs that, and the newcomer's
  prompt; to be worth it, it needs several times as much to spare. So two cannot take turns in
  pushing each other aside: between two exchanges, most of the time is spent on new tokens.
- Requests without a target stand in a line of their own, in order of arrival, and with them those
  that have missed theirs for good: being in time for another is worth more than being less late.
  The first of the line is due when it has stood there for ``best_effort`` seconds, and who was let
  in that late is not displaced: so one of them comes to its turn every so often, however many there
  are with targets, and these are not pushed aside, however many there are without.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Any

from octavo.scheduler.policies.base import Line, Policy, Queue
from octavo.scheduler.request import RequestRecord
from octavo.scheduler.sequence import Sequence

_CARE = 2.0  # times what it is predicted to take to be in time, that is kept for it
_WORTH = 4.0  # times what an exchange costs, that who is displaced has to spare
_LOOKED_AT = 32  # of those who wait, for one that would be late
_KEEP = 0.98  # what a step with prompts keeps of its weight at the next
_FAR = 4.0  # times as long as predicted; what takes longer, a stall, counts as if it took so


def deadline(seq: Sequence) -> float:
    """Clock seconds when its next token is due; infinity without a target."""
    target = seq.owner.request.target
    if target is None:
        return inf
    record = seq.owner.record
    end = inf if target.e2el is None else record.arrival + target.e2el
    if record.first_token is None:
        return end if target.ttft is None else min(end, record.arrival + target.ttft)
    if target.tpot is None:
        return end
    drawn = len(seq.token_ids) - seq.owner.num_prompt_tokens
    return min(end, record.first_token + drawn * target.tpot)


def first_due(record: RequestRecord) -> float | None:
    """Clock seconds when a request's first token is due by its target."""
    target = record.target
    if target is None:
        return None
    limits = [limit for limit in (target.ttft, target.e2el) if limit is not None]
    return record.arrival + min(limits) if limits else None


def is_missed(record: RequestRecord, now: float) -> bool:
    """Whether the target can no longer be met, however soon the next token comes. To be behind in
    ``tpot``, a mean, can be made up for.
    """
    target = record.target
    if target is None:
        return False
    first = now if record.first_token is None else record.first_token
    return (target.ttft is not None and first > record.arrival + target.ttft) or (
        target.e2el is not None and now > record.arrival + target.e2el
    )


class Deadline(Policy):
    def __init__(self, best_effort: float) -> None:
        """``best_effort``: seconds after which the first of those without a target is due."""
        self._best_effort = best_effort
        self._in_time = Line(lambda seq: (deadline(seq), seq.order))
        self._others = Queue()
        # Of steps with prompts, as of late: how many, their tokens and seconds.
        self._steps = self._tokens = self._seconds = 0.0

    def push(self, seq: Sequence) -> None:
        if self._is_in_time(seq):
            self._in_time.push(seq)
        else:
            self._others.push(seq, self.now)

    def remove(self, seq: Sequence) -> None:
        if seq in self._in_time:
            self._in_time.remove(seq)
        else:
            self._others.remove(seq, self.now)

    def clear(self) -> None:
        self._in_time.clear()
        self._others.clear()

    def head(self) -> Sequence | None:
        first, other = self._first_in_time(), self._others.first
        if first is None or other is None:
            return first or other
        due = self._others.began + self._best_effort
        return first if deadline(first) <= due else other

    def challenger(self) -> Sequence | None:
        first = self._first_in_time()
        return first if self._presses() else None

    def _first_in_time(self) -> Sequence | None:
        line = self._in_time
        while (first := line.first) is not None and is_missed(first.owner.record, self.now):
            line.remove(first)
            self._others.push(first, self.now)
        return first

    def in_turn(self) -> Iterator[Sequence]:
        """As `head` goes, if whoever it names leaves."""
        in_time, others = iter(self._in_time), self._others.turns(self.now)
        late: list[tuple[tuple[int, int], float, Sequence]] = []  # a heap, by arrival
        first, other = next(in_time, None), next(others, None)
        while True:
            while first is not None and is_missed(first.owner.record, self.now):
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

    def _presses(self) -> bool:
        """Whether somebody may be late unless the line moves now: its prompts, one after the other,
        take up the time that is left.
        """
        each = self._seconds / (self._steps or 1.0)
        tokens = 0
        for seq in islice(self._in_time, _LOOKED_AT):
            tokens += len(seq.token_ids)
            if deadline(seq) - self.now <= _CARE * (each + self._predicted(tokens)):
                return True
        return False

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        due = self._due(running)
        if due <= deadline(challenger):
            return False
        if not self._is_in_time(running):
            return True
        tokens = len(running.token_ids) + len(challenger.token_ids)
        return due - self.now > _WORTH * self._predicted(tokens)

    def took(self, num_tokens: int, seconds: float) -> None:
        if predicted := self._predicted(num_tokens):
            seconds = min(seconds, _FAR * predicted)
        self._steps = _KEEP * self._steps + 1
        self._tokens = _KEEP * self._tokens + num_tokens
        self._seconds = _KEEP * self._seconds + max(0.0, seconds)

    def _predicted(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens of prompts."""
        return num_tokens * self._seconds / self._tokens if self._tokens else 0.0

    def rank(self, seq: Sequence) -> Any:
        return self._due(seq), seq.order

    def ahead_of(self, record: RequestRecord) -> list[Sequence]:
        """Who waits and comes before a newcomer, if those with targets are in time: of the line of
        the others one every ``best_effort`` seconds. Any thread may ask: it may miss who
        comes or goes (`IndexError` at worst).
        """
        line = list(self._others)
        since = self._others.began if line else record.arrival
        due = first_due(record)
        if due is None:
            due = since + (len(line) + 1) * self._best_effort
        return [
            *(seq for seq in list(self._in_time) if deadline(seq) <= due),
            *(seq for place, seq in enumerate(line, 1) if since + place * self._best_effort < due),
        ]

    def __len__(self) -> int:
        return len(self._in_time) + len(self._others)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._in_time
        yield from self._others

    def _due(self, seq: Sequence) -> float:
        """When one that runs is due."""
        if self._is_in_time(seq):
            return deadline(seq)
        return self.now + self._best_effort - seq.stood

    def _is_in_time(self, seq: Sequence) -> bool:
        """Whether it has a target that can still be met."""
        return deadline(seq) < inf and not is_missed(seq.owner.record, self.now)
