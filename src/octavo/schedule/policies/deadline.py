"""Earliest deadline first.

A request's target (`LatencyTarget`) gives each of its tokens a deadline: the first is due ``ttft``
after arrival, the n-th after it n × ``tpot`` after the first, and all of them ``e2el`` after
arrival; whichever of these comes first. Then:

- Next is who is due first; and it takes the place of whoever is due last, if that one has a second
  more to spare, for one that is ahead of its deadlines loses nothing by waiting.
- Requests without a target are due ``best_effort`` seconds after arrival, and so are those that
  have missed theirs for good: being in time for another is worth more than being less late. Mostly
  both come after those that may still be in time, but not for ever: from some time on all newcomers
  are due later.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from octavo.schedule.policies.base import Line, Policy
from octavo.schedule.request import RequestRecord
from octavo.schedule.sequence import Sequence

_SPARE = 1.0  # seconds, that who is displaced has more


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
        """``best_effort``: seconds after arrival that requests without a target are due."""
        self._best_effort = best_effort
        self._in_time = Line(lambda seq: (deadline(seq), seq.order))
        self._others = Line(lambda seq: (self._without(seq), seq.order))

    def push(self, seq: Sequence) -> None:
        missed = is_missed(seq.owner.record, self.now)
        line = self._others if missed or deadline(seq) == inf else self._in_time
        line.push(seq)

    def remove(self, seq: Sequence) -> None:
        if not self._in_time.remove(seq):
            self._others.remove(seq)

    def clear(self) -> None:
        self._in_time.clear()
        self._others.clear()

    def head(self) -> Sequence | None:
        first, other = self.challenger(), self._others.first
        if first is None or other is None:
            return first or other
        return first if deadline(first) <= self._without(other) else other

    def challenger(self) -> Sequence | None:
        line = self._in_time
        while (first := line.first) is not None and is_missed(first.owner.record, self.now):
            line.remove(first)
            self._others.push(first)
        return first

    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        return deadline(challenger) + _SPARE < self._due(running)

    def rank(self, seq: Sequence) -> Any:
        return self._due(seq), seq.order

    def __len__(self) -> int:
        return len(self._in_time) + len(self._others)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._in_time
        yield from self._others

    def _without(self, seq: Sequence) -> float:
        return seq.owner.record.arrival + self._best_effort

    def _due(self, seq: Sequence) -> float:
        """When one that runs is due."""
        due = deadline(seq)
        return self._without(seq) if due == inf or is_missed(seq.owner.record, self.now) else due
