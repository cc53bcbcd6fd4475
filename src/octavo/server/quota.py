"""Quotas of requests and of tokens a minute.

Each is a bucket that fills evenly, to a minute's worth at most. A request takes one of the one
bucket and its prompt of the other before it is queued, or is refused with the time at which there
will be enough. What it then generates is taken as it comes, from the request's record, and may
leave the bucket below empty, for nobody knows it before; who is there is refused until it has
filled again. A prompt longer than a minute's tokens needs a full bucket. Who is refused because
there is too much to do, or for a quota, is not charged; who is refused for what is in the body, or
leaves while it is read, is charged the request, and for the body's length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo.scheduler.request import Outcome, RequestRecord
from octavo.server.errors import TooMany

_BYTES_PER_TOKEN = 4  # of ordinary text
_MINUTE = 60 * 10**9  # nanoseconds


class Bucket:
    """``per_minute`` is how fast it fills, and how much it holds. Counted in whole numbers, so that
    who comes back when told to is not refused for a rounding.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = per_minute * _MINUTE  # in parts, as many as a minute has nanoseconds
        self._at = time.monotonic_ns()

    @property
    def level(self) -> int:
        """What is in it, rounded down; below 0: owed."""
        return self._parts() // _MINUTE

    def take(self, amount: int) -> None:
        """Or give back, below 0."""
        self._level = self._parts() - amount * _MINUTE

    def seconds_until(self, amount: int) -> float:
        """Until it holds so much, or is full; 0: it does."""
        missing = min(amount, self.per_minute) * _MINUTE - self._parts()
        return max(0, -(-missing // self.per_minute)) / 1e9

    def _parts(self) -> int:
        now = time.monotonic_ns()
        filled = self._level + (now - self._at) * self.per_minute
        self._level, self._at = min(filled, self.per_minute * _MINUTE), now
        return self._level


class Quota:
    """One key's. Used on the event loop's thread only."""

    def __init__(self, name: str, requests: int | None, tokens: int | None) -> None:
        """``requests`` and ``tokens`` a minute; None: no limit."""
        self._name = name
        self.requests = None if requests is None else Bucket(requests)
        self.tokens = None if tokens is None else Bucket(tokens)
        self._open: set[Charge] = set()  # of requests that are under way

    def open(self) -> Charge:
        """A request begins. Raises `TooMany` if none may, whatever its prompt."""
        self.settle()
        self._check("requests", self.requests, 1)
        self._check("tokens", self.tokens, 1)
        charge = Charge(self)
        self._open.add(charge)
        if self.requests is not None:
            self.requests.take(1)
        return charge

    @property
    def waiting(self) -> int:
        """Requests, of which one body may have several, that have not begun to run."""
        return sum(charge.waiting for charge in self._open)

    def settle(self) -> None:
        """Take what has been generated since."""
        if self.tokens is not None:
            for charge in self._open:
                charge.settle()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """As OpenAI's clients know them: the limit, what is left, and the time to a full bucket."""
        found = []
        self.settle()
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is None:
                continue
            for what, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", str(max(0, bucket.level))),
                ("reset", _duration(bucket.seconds_until(bucket.per_minute))),
            ):
                found.append((f"x-ratelimit-{what}-{name}".encode(), value.encode()))
        return found

    def _check(self, what: str, bucket: Bucket | None, amount: int) -> None:
        if bucket is None:
            return
        wait = bucket.seconds_until(amount)
        if wait > 0:
            raise TooMany(
                f"the key {self._name!r} has used up its {bucket.per_minute} {what} a minute; "
                f"this request may come again in {wait:.3f} s",
                wait,
                "quota",
            )

    def check_prompts(self, waiting: int, prompts: Sequence[int]) -> None:
        """Whether ``prompts`` of so many tokens each may come to the ``waiting`` ones."""
        self.settle()
        self._check("tokens", self.tokens, sum(prompts))

    def close(self, charge: Charge) -> None:
        self._open.discard(charge)


class Charge:
    """What one HTTP request costs its key."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._records: Sequence[RequestRecord] = ()
        self._prompts = 1  # at least, before it is read
        self._taken = 0  # tokens
        self._fault = False

    def prompts(self, lengths: Sequence[int]) -> None:
        """The prompts' tokens are known and taken. Raises `TooMany` if there are not enough, and
        what else `Quota.check_prompts` refuses.
        """
        self._quota.check_prompts(self._quota.waiting - self.waiting, lengths)
        self._prompts = len(lengths)
        self._take(sum(lengths))

    def of(self, records: Sequence[RequestRecord]) -> None:
        """What has been submitted: from now on these say what it costs."""
        self._records = records

    @property
    def waiting(self) -> int:
        """How many of its requests are still being read, or in the queue."""
        if not self._records:
            return self._prompts
        return sum(each.scheduled is None and each.outcome is None for each in self._records)

    def settle(self) -> None:
        if self._records:
            self._take(_tokens(self._records))

    def fault(self, size: int) -> None:
        """The request is refused for what is in its body of ``size`` bytes, or nobody waits for it
        any more. It has been read: that costs what an ordinary text of its length would.
        """
        self._fault = True
        self._take(size // _BYTES_PER_TOKEN)

    def close(self) -> None:
        """The request has ended, or was refused: that costs nothing unless the client is at
        fault.
        """
        if self._fault:
            self._quota.close(self)
            return
        self._take(_tokens(self._records))
        requests = self._quota.requests
        if requests is not None and all(map(_rejected, self._records)):
            requests.take(-1)
        self._quota.close(self)

    def _take(self, tokens: int) -> None:
        """So many in all."""
        if self._quota.tokens is not None:
            self._quota.tokens.take(tokens - self._taken)
        self._taken = tokens


def _rejected(record: RequestRecord) -> bool:
    return record.outcome is Outcome.REJECTED


def _tokens(records: Sequence[RequestRecord]) -> int:
    return sum(
        record.prompt_tokens + record.completion_tokens
        for record in records
        if not _rejected(record)
    )


def _duration(seconds: float) -> str:
    """As Go writes them, and OpenAI: 1h2m3s, 4.5s, 20ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{text}{rest / 1000:g}s"
