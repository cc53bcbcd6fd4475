"""What a scheduling policy is.

A policy decides the order: which waiting request is admitted next, and which running sequence is
preempted first. The scheduler carries it out: it admits the head of the policy's queue, gives
prompt chunks to the lowest rank first, preempts the highest rank when blocks run out, and preempts
running sequences for a waiting one if the policy allows it.

A new policy is a subclass of `Policy` in a file of its own and a line in policies/config.py.
Command line, validation, server and simulator ask the class about itself. What it may decide beyond
the order of the queue, each by a switch and the methods it needs:

- ``preempts``, with `may_preempt` and `preemptor`: a waiting sequence may preempt a running one
  before blocks run out. Without it a step with a full batch looks at nobody who waits, and the
  simulator takes many such steps at once.
- ``replaces``, with `replacement_key` or `replaced`: a newcomer may take a waiting request's place
  in a full queue.
- `ahead_of`: whom a newcomer would wait for. Predicted waits (engine/wait_time.py) go by it, and
  with them what ``max_queue_time`` refuses; without it a newcomer is behind all who wait.

A sequence in the queue has a position, a running one has a slot, and a request in a full queue has
a place. Ageing is what the first of an `AgeingQueue` does there; the time since a request's arrival
is its wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from inspect import signature
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:  # the command line reads the classes and needs no engine
    from octavo.scheduler.prompt_rates import PromptRates
    from octavo.scheduler.request import RequestRecord
    from octavo.scheduler.sequence import Sequence

BY_ARRIVAL = attrgetter("order")
_KEY, _SEQUENCE = itemgetter(0), itemgetter(1)  # of an entry


class Policy:
    """The queue of waiting sequences, and an order of the running ones. As it stands here, both
    follow one key, no waiting sequence preempts a running one, and no newcomer replaces a request.

    The parameters of a policy's constructor are its settings, numbers above 0: each is a field of
    `PolicyConfig`, and so an option.
    """

    name: ClassVar[str]
    help: ClassVar[str] = ""  # what it goes by; empty if the name says it
    request_fields: ClassVar[frozenset[Literal["priority", "weight"]]] = frozenset()  # it goes by
    by_client: ClassVar[bool] = False  # it goes by client, and the queue is shared out among them
    preempts: ClassVar[bool] = False  # a waiting sequence may ever preempt a running one
    replaces: ClassVar[bool] = False  # a newcomer may ever replace a request in a full queue

    now: float = 0.0  # clock seconds of the step; the scheduler sets it
    rates: PromptRates  # the scheduler sets it

    def __init__(self) -> None:
        self._queue = SortedQueue(self.queue_key)

    @classmethod
    def settings(cls) -> dict[str, float]:
        """Return the default of each setting, by name."""
        return {each.name: each.default for each in signature(cls).parameters.values()}

    # The queue: of waiting sequences by `queue_key`, unless a policy keeps another

    def queue_key(self, seq: Sequence) -> Any:
        """Return the sequence's position in the queue: unique, and fixed while it is queued."""
        return seq.order

    def push(self, seq: Sequence) -> None:
        """Queue a sequence that is new or was preempted; ``seq.queued`` says when."""
        self._queue.push(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue: it has ended, or is admitted. Raise `KeyError` if it is
        not queued.
        """
        self._queue.remove(seq)

    def clear(self) -> None:
        """Empty the queue, whatever state it is in."""
        self._queue.clear()

    def head(self) -> Sequence | None:
        """Return the sequence to admit next. No other is admitted before it, so that it is not
        passed for ever.
        """
        return self._queue.first

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the queue, whatever state a failure has left it in."""
        return iter(self._queue)

    def in_turn(self) -> Iterator[Sequence]:
        """Iterate over the queue in the order in which all would be admitted if there were capacity
        for all now. Lazy: the first few of many cost little.
        """
        return iter(self)

    # Running sequences

    def rank(self, seq: Sequence) -> Any:
        """Return the order of running sequences: the lowest is served first, the highest is
        preempted first.
        """
        return self.queue_key(seq)

    def preemptor(self) -> Sequence | None:
        """Return the waiting sequence that would preempt a running one, if any. Asked only if the
        policy ``preempts``.
        """
        return self.head()

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether a waiting sequence may take the slot and blocks of a running one. Of two
        running ones it preempts the one with the higher rank first. A preempted sequence must not
        be able to preempt the other in turn for the same reason.
        """
        return False

    # A full queue. Any thread may ask: this reads no sequence and no queue.

    def replacement_key(self, record: RequestRecord) -> float:
        """Return the order in which waiting requests keep their places in a full queue: the highest
        is replaced first. Its ``prompt_tokens`` may be 0: a newcomer asks before it is tokenized.
        """
        return record.arrival

    def replaced(
        self,
        newcomer: RequestRecord | None,
        waiting: Iterator[RequestRecord],
        joining: Items[RequestRecord] = (),
    ) -> RequestRecord | None:
        """Return the waiting request whose place in a full queue a newcomer takes; None: it takes
        none. ``newcomer`` is None if nothing is known of it, and it may come first. ``waiting``:
        by `replacement_key`, the highest first. ``joining``: requests that are queued with it.

        The order must be strict and keep the first to come among equals: then no two requests
        replace each other by turns, and coming back at once gains nothing.
        """
        last = next(waiting, None) if self.replaces else None
        if last is None or newcomer is None:
            return last
        return last if self.replacement_key(newcomer) < self.replacement_key(last) else None

    # Forecasts. Any thread may ask; the queue may change meanwhile (`IndexError` at worst).

    def ahead_of(self, record: RequestRecord) -> list[Sequence] | None:
        """Return the waiting sequences that would be admitted before a newcomer; None: all. It may
        not be tokenized yet (``prompt_tokens`` is 0).
        """
        return None

    # What happens

    def on_admit(self, record: RequestRecord, num_computed: int) -> None:
        """A request's first sequence is admitted for the first time, and ``num_computed`` tokens of
        the prompt are to be computed. Called again with the additional tokens if a part of the
        cached prefix is lost before the sequence had it.
        """

    def on_tokens(self, seqs: Items[Sequence], counts: Iterable[int]) -> None:
        """Running sequences have drawn so many tokens each."""


class SortedQueue:
    """Sequences in the order of their keys when they were pushed. Pushing and removing take log n
    comparisons and move n pointers: microseconds for tens of thousands of sequences.
    """

    __slots__ = ("_entries", "_key", "_keys")

    def __init__(self, key: Callable[[Sequence], Any] = BY_ARRIVAL) -> None:
        """``key``: unique to the sequence. It may change later: the first token of a sequence that
        is preempted in the same step is recorded after it was queued again.
        """
        self._key = key
        self._entries: list[tuple[Any, Sequence]] = []  # sorted by the key
        self._keys: dict[Sequence, Any] = {}

    def push(self, seq: Sequence) -> None:
        key = self._key(seq)
        insort(self._entries, (key, seq), key=_KEY)
        self._keys[seq] = key

    def remove(self, seq: Sequence) -> None:
        """Raise `KeyError` if the sequence is not in the queue."""
        key = self._keys.pop(seq)
        del self._entries[bisect_left(self._entries, key, key=_KEY)]

    def clear(self) -> None:
        self._entries.clear()
        self._keys.clear()

    @property
    def first(self) -> Sequence | None:
        return self._entries[0][1] if self._entries else None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: object) -> bool:
        return seq in self._keys

    def __iter__(self) -> Iterator[Sequence]:
        return map(_SEQUENCE, self._entries)


class AgeingQueue(SortedQueue):
    """A queue in order of arrival that counts in ``seq.stood`` for how many seconds, by the
    policy's clock, each sequence has been its first, without the time in which it ran: so that it
    comes to its turn some time.
    """

    __slots__ = ("_policy", "_since")

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._since = 0.0

    def push(self, seq: Sequence) -> None:
        before = self.first
        super().push(seq)
        self._update(before)

    def remove(self, seq: Sequence) -> None:
        before = self.first
        super().remove(seq)
        self._update(before)

    def _update(self, before: Sequence | None) -> None:
        """Note that the first may no longer be ``before``."""
        first, now = self.first, self._policy.now
        if first is before:
            return
        if before is not None:
            before.stood += max(0.0, now - self._since)
        if first is not None:
            self._since = max(now, first.queued)

    def turns(self) -> Iterator[tuple[float, Sequence]]:
        """Iterate over the queue, each with what `began` will be if those before it leave now."""
        now = self._policy.now
        for position, seq in enumerate(self):
            yield (max(now, seq.queued) - seq.stood if position else self.began), seq

    @property
    def began(self) -> float:
        """Clock seconds when the first would have become the first, had it never run since."""
        first = self.first
        return self._since - (0.0 if first is None else first.stood)
