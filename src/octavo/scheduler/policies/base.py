"""What a scheduling policy decides: who of those that wait is next, and who of those that run gives
way.

A policy orders; the scheduler does. It owns the queue and ranks who runs, and the scheduler lets
the queue's head in, gives chunks of prompts to the lowest rank first, takes blocks from the highest
when they run out, and makes room for a head that may displace whoever runs.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from operator import attrgetter
from typing import Any, ClassVar

from octavo.scheduler.sequence import RequestState, Sequence

BY_ARRIVAL = attrgetter("order")
Key = Callable[[Sequence], Any]


class Policy(Collection[Sequence]):
    """The queue, and an order of those that run."""

    displaces_any: ClassVar[bool] = True  # False: whoever waits is behind all who run, at any time
    now: float = 0.0  # clock seconds of the step, which the scheduler sets

    @abstractmethod
    def push(self, seq: Sequence) -> None:
        """Queue a sequence that is new, or was preempted; ``seq.queued`` says when."""

    @abstractmethod
    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue: it has ended, or will run. `KeyError` if it is not in
        it.
        """

    @abstractmethod
    def clear(self) -> None:
        """Empty the queue, whatever state it is in."""

    @abstractmethod
    def head(self) -> Sequence | None:
        """Who is next. Nobody else takes what is free, so that the head is not passed for ever."""

    def challenger(self) -> Sequence | None:
        """Who of those that wait would displace one that runs, if anybody."""
        return self.head()

    @abstractmethod
    def displaces(self, challenger: Sequence, running: Sequence) -> bool:
        """Whether who waits may have the place and blocks of one that runs. Of two that run it
        rather displaces the one of higher rank, and may not be displaced by it for the same reason.
        """

    @abstractmethod
    def rank(self, seq: Sequence) -> Any:
        """Orders those that run: the lowest is served first, the highest gives way first."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """Whoever waits, in whatever state a failure has left the queue."""

    def in_turn(self) -> Iterator[Sequence]:
        """Whoever waits, in the order in which they would be let in were there room for all now.
        What comes first is had first: a few of many cost little.
        """
        return iter(self)

    def __contains__(self, seq: object) -> bool:
        return any(seq is other for other in self)

    def begins(self, state: RequestState, num_computed: int) -> None:
        """The first of a request's sequences is let in, for the first time; so many tokens of the
        prompt are to be computed. Told again of those that are more, if something of what was
        cached is lost before it had it.
        """

    def drew(self, seqs: Items[Sequence], counts: Iterable[int]) -> None:
        """Sequences that run have drawn so many tokens each."""

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with prompts in it, of so many tokens in all."""


class Queue:
    """A line in order of arrival, and for how long its first has stood there, so that it comes to
    its turn some time: ``seq.stood``, in seconds, without the time in which it ran.
    """

    __slots__ = ("_line", "_since")

    def __init__(self) -> None:
        self._line = Line(BY_ARRIVAL)
        self._since = 0.0

    def push(self, seq: Sequence, now: float) -> None:
        before = self._line.first
        self._line.push(seq)
        self._moved(before, now)

    def remove(self, seq: Sequence, now: float) -> None:
        before = self._line.first
        self._line.remove(seq)
        self._moved(before, now)

    def clear(self) -> None:
        self._line.clear()

    def _moved(self, before: Sequence | None, now: float) -> None:
        """The first may be another than ``before``."""
        first = self._line.first
        if first is before:
            return
        if before is not None:
            before.stood += max(0.0, now - self._since)
        if first is not None:
            self._since = max(now, first.queued)

    @property
    def first(self) -> Sequence | None:
        return self._line.first

    def turns(self, now: float) -> Iterator[tuple[float, Sequence]]:
        """Each in turn, with what `began` is when the others have left now."""
        for place, seq in enumerate(self._line):
            yield (max(now, seq.queued) - seq.stood if place else self.began), seq

    @property
    def began(self) -> float:
        """Clock seconds when the first would have come to stand there, had it never run since."""
        first = self._line.first
        return self._since - (0.0 if first is None else first.stood)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)


class Line:
    """Sequences in the order of their keys when they joined. Joining and leaving take log n
    comparisons, and moving n pointers: microseconds for tens of thousands.
    """

    __slots__ = ("_key", "_keys", "_known", "_seqs")

    def __init__(self, key: Key) -> None:
        """``key``: of a sequence, and nobody else's. It may change later: a first token that was
        drawn in the step after which the sequence was queued again is recorded behind that.
        """
        self._key = key
        self._seqs: list[Sequence] = []
        self._keys: list[Any] = []  # theirs
        self._known: dict[Sequence, Any] = {}

    def push(self, seq: Sequence) -> None:
        key = self._key(seq)
        index = bisect_left(self._keys, key)
        self._known[seq] = key
        self._seqs.insert(index, seq)
        self._keys.insert(index, key)

    def remove(self, seq: Sequence) -> None:
        """`KeyError` if it does not stand in the line."""
        index = bisect_left(self._keys, self._known[seq])
        del self._known[seq], self._seqs[index], self._keys[index]

    def clear(self) -> None:
        self._seqs.clear()
        self._keys.clear()
        self._known.clear()

    @property
    def first(self) -> Sequence | None:
        return self._seqs[0] if self._seqs else None

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, seq: object) -> bool:
        return seq in self._known

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)
