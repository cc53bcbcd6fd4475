"""Quotas of requests and of tokens a minute, and each key's share of the queue.

A quota is a bucket that fills evenly, to a minute's worth at most. A request takes one from the
bucket of requests and its prompt from the bucket of tokens before it is queued, or is refused with
the time at which there will be enough. Tokens that it generates are taken as they come, from the
request's record. They may leave the bucket below empty, since nobody knows them before; the key is
then refused until the bucket has filled again. A prompt longer than a minute's tokens needs a full
bucket. A request that is refused because there is too much to do, or for a quota, is not charged.
One that is refused for what is in its body, or whose client leaves while the body is read, is
charged as a request and for the body's length.

Used on the event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from octavo.scheduler.request import Outcome, RequestRecord
from octavo.server.api_keys import ApiKey
from octavo.server.errors import ApiError, too_many
from octavo.words import plural

_BYTES_PER_TOKEN = 4  # of ordinary text
_MINUTE = 60 * 10**9  # nanoseconds


class Bucket:
    """``per_minute`` is how fast it fills, and how much it holds.

    It counts in whole numbers, so that a client that comes back when told to is not refused for a
    rounding error.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = per_minute * _MINUTE  # in parts: one whole is as many as nanoseconds a minute
        self._at = time.monotonic_ns()

    @property
    def level(self) -> int:
        """What is in it, rounded down; below 0: owed."""
        return self._parts() // _MINUTE

    def take(self, amount: int) -> None:
        """Take ``amount``, or give back where that is below 0."""
        self._level = self._parts() - amount * _MINUTE

    def seconds_until(self, amount: int) -> float:
        """Return the seconds until it holds ``amount`` or is full; 0: it does now."""
        missing = min(amount, self.per_minute) * _MINUTE - self._parts()
        return max(0, -(-missing // self.per_minute)) / 1e9

    def _parts(self) -> int:
        now = time.monotonic_ns()
        filled = self._level + (now - self._at) * self.per_minute
        self._level, self._at = min(filled, self.per_minute * _MINUTE), now
        return self._level


class Account:
    """A key and what is left of its quotas."""

    def __init__(
        self, key: ApiKey, queue: int | None = None, peers: Collection[Account] = ()
    ) -> None:
        """``queue``: how many requests may wait, if the keys of all ``peers`` share it fairly."""
        self.key = key
        self._queue = queue
        self._peers = peers
        limits = {"requests": key.max_requests_per_minute, "tokens": key.max_tokens_per_minute}
        self._buckets = {what: Bucket(limit) for what, limit in limits.items() if limit is not None}
        self._open: set[Charge] = set()  # of requests that are under way

    def open(self) -> Charge:
        """Begin a request. Raises a 429 if none may begin, whatever its prompt."""
        self.check(self.waiting, 1, {"requests": 1, "tokens": 1})
        charge = Charge(self)
        self._open.add(charge)
        self.take("requests", 1)
        return charge

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run; one body may have several."""
        return sum(charge.waiting for charge in self._open)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the limit, what is left and the time to a full bucket as OpenAI's clients know
        them.
        """
        self._settle()
        return [
            (f"x-ratelimit-{what}-{name}".encode(), value.encode())
            for name, bucket in self._buckets.items()
            for what, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", str(max(0, bucket.level))),
                ("reset", _duration(bucket.seconds_until(bucket.per_minute))),
            )
        ]

    def check(self, waiting: int, prompts: int, amounts: dict[str, int]) -> None:
        """Raise a 429 unless ``prompts`` may join the ``waiting`` requests, and each bucket that
        ``amounts`` names holds so much.
        """
        if self._queue is not None:
            self._check_share(self._queue, waiting, prompts)
        self._settle()
        for what, amount in amounts.items():
            bucket = self._buckets.get(what)
            wait = 0.0 if bucket is None else bucket.seconds_until(amount)
            if bucket is not None and wait > 0:
                raise too_many(
                    f"the key {self.key.name!r} has used up its {bucket.per_minute} {what} a "
                    f"minute; this request may come again in {wait:.3f} s",
                    wait,
                    "quota",
                )

    def _check_share(self, queue: int, own: int, more: int) -> None:
        """Raise a 429 unless ``more`` requests may join the ``own`` that wait, and a 400 for more
        at once than may ever wait.

        One key alone fills no more than half of the queue, and of several keys each its part, so
        that there is room for the next.
        """
        ever = max(1, queue // 2)
        if more > ever:
            raise ApiError(
                400,
                f"prompt has {more} prompts, more than the {ever} requests that a key may have "
                "waiting",
                "prompt",
            )
        others = sum(each is not self and each.waiting > 0 for each in self._peers)
        most = max(1, queue // (others + 2))
        if own + more > most:
            come = "" if more == 1 else f"; with {more} more that is too many"
            raise too_many(
                f"{plural(own, 'request')} of the key {self.key.name!r} "
                f"{'waits' if own == 1 else 'wait'}, of at most {most} while "
                f"{plural(others, 'other key', 'wait')}{come}",
                None,
                "capacity",
            )

    def take(self, what: str, amount: int) -> None:
        if what in self._buckets:
            self._buckets[what].take(amount)

    def close(self, charge: Charge) -> None:
        self._open.discard(charge)

    def _settle(self) -> None:
        """Take what has been generated since the last time."""
        if "tokens" in self._buckets:
            for charge in self._open:
                charge.settle()


class Charge:
    """What one HTTP request costs its key."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._records: Sequence[RequestRecord] = ()
        self._prompts = 1  # at least, before the body is read
        self._taken = 0  # tokens
        self._fault = False

    def prompts(self, lengths: Sequence[int]) -> None:
        """Take the tokens of prompts of these ``lengths``. Raises `ApiError` if there are not
        enough, or too many prompts for the key's share.
        """
        others = self._account.waiting - self.waiting
        self._account.check(others, len(lengths), {"tokens": sum(lengths)})
        self._prompts = len(lengths)
        self._take(sum(lengths))

    def of(self, records: Sequence[RequestRecord]) -> None:
        """Let the records of what has been submitted say what it costs."""
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
        """Charge a request that is refused for what is in its body of ``size`` bytes, or that
        nobody waits for any more: reading it cost as much as an ordinary text of its length.
        """
        self._fault = True
        self._take(size // _BYTES_PER_TOKEN)

    def close(self) -> None:
        """End the request. One that was refused costs nothing unless the client is at fault."""
        if not self._fault:
            self._take(_tokens(self._records))
            if all(map(_rejected, self._records)):
                self._account.take("requests", -1)
        self._account.close(self)

    def _take(self, tokens: int) -> None:
        """Take ``tokens`` in all, of which some may have been taken before."""
        self._account.take("tokens", tokens - self._taken)
        self._taken = tokens


def accounts(keys: Iterable[ApiKey], queue: int | None) -> dict[bytes, Account]:
    """Return the accounts of ``keys`` by digest: the time of looking one up tells nothing of the
    key. ``queue``: how many requests may wait, if keys are to have fair shares of it.
    """
    found: dict[bytes, Account] = {}
    found |= {key.digest: Account(key, queue, found.values()) for key in keys}
    return found


def _rejected(record: RequestRecord) -> bool:
    return record.outcome is Outcome.REJECTED


def _tokens(records: Sequence[RequestRecord]) -> int:
    return sum(
        record.prompt_tokens + record.completion_tokens
        for record in records
        if not _rejected(record)
    )


def _duration(seconds: float) -> str:
    """Return a duration as Go and OpenAI write it: 1h2m3s, 4.5s, 20ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{text}{rest / 1000:g}s"
