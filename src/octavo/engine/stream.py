"""Carry a request's output from the engine's thread to the coroutine that awaits it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from octavo.engine.outputs import Delta
from octavo.scheduler.request import RequestRecord

logger = logging.getLogger(__name__)

_SLICE = 0.001  # seconds that deliveries may keep a loop from its other work
_MOST_UNSENT = 256 << 10  # bytes that wait for a stream's consumer, before its request is paused
_MOST_UNSENT_TOTAL = 64 << 20  # of all streams, before those are ended that have paused longest


class EngineDead(RuntimeError):
    """The engine thread has stopped or hangs; nothing will be generated any more."""


class OutputUnread(RuntimeError):
    """The request was ended because its output, and that of others, was not read."""


class Stream(AsyncIterator[Delta]):
    """The deltas of a request. Deltas that pile up while the consumer is away are joined into one
    per choice. When they become too many the request is paused until most of them have been taken,
    so that a slow consumer holds little memory and never slows the engine.

    The iteration ends after the delta that carries ``record``. It raises `EngineDead` if the engine
    dies first, and `OutputUnread` if all consumers together have left too much unread and this one
    has been paused for the longest time. Leaving the iteration early does not abort: call `abort`.

    A consumer that waits need not be woken for every token: ``at_once`` is offered each delta but
    the last as it comes, on the stream's loop, and returns whether it took it. What it raises comes
    out of the iteration next, and nothing after it.
    """

    at_once: Callable[[Delta], bool] | None = None

    def __init__(
        self,
        record: RequestRecord,
        mailbox: Mailbox,
        abort: Callable[[str], None],
        pause: Callable[[str, bool], None],
    ):
        self.request_id = record.request_id
        self.record = record  # the live record; complete when record.outcome is set
        self.mailbox = mailbox
        self.unsent = 0  # bytes, about, of what has not been taken
        self._abort = abort
        self._pause = pause
        self._paused = False
        self._unwanted = False  # aborted: what still comes is little, and need not be taken
        self._arrived: list[Delta] = []
        self._wakeup: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._over = False  # nothing more will arrive

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            self._wakeup = self.mailbox.loop.create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        delta, *self._arrived = joined(self._arrived)
        self._hold(sum(map(_size, self._arrived)))
        return delta

    def abort(self) -> None:
        """Ask the engine to end the request, and drop what has arrived and was not taken. Return at
        once.
        """
        self._arrived.clear()
        self._unwanted = True
        self._hold(0)
        if not self._over:
            self._abort(self.request_id)

    # On the stream's own loop

    def _hold(self, unsent: int) -> None:
        """Note that ``unsent`` bytes have not been taken now."""
        if self._unwanted:
            unsent = 0
        self.mailbox.unsent += unsent - self.unsent
        self.unsent = unsent
        if self._paused:
            if unsent <= _MOST_UNSENT // 4:
                self._paused = False
                self.mailbox.paused.pop(self, None)
                self._pause(self.request_id, False)
        elif unsent > _MOST_UNSENT and not self._over:
            self._paused = True
            self.mailbox.paused[self] = None
            self._pause(self.request_id, True)

    def _end_unread(self) -> None:
        """Drop what is unsent, and tell the consumer."""
        logger.warning(
            "request %s is ended: of its output %d bytes are not read, and %d of all requests'",
            self.request_id,
            self.unsent,
            self.mailbox.unsent,
        )
        self.abort()
        self._over = True
        self._error = OutputUnread("the output was not read in time, and others need the memory")
        self._wake()

    def push(self, arrived: Sequence[Delta | EngineDead]) -> None:
        """Take deltas, in their order. What comes behind the engine's death is dropped: the engine
        has posted it meanwhile, from its own thread.
        """
        if self._over:
            return
        deltas: list[Delta] = []
        death: EngineDead | None = None
        for each in arrived:
            if isinstance(each, EngineDead):
                death = each
                break
            deltas.append(each)
        self._over = death is not None or deltas[-1].record is not None
        for delta in joined(deltas):
            if self._error is not None:  # what `at_once` raised leaves a gap before all others
                return
            if self.at_once is None or not self._take_at_once(delta):
                self._arrived.append(delta)
                self._hold(self.unsent + _size(delta))
                self._wake()
        if death is not None:
            self._error = self._error or death
            self._wake()
        while self.mailbox.unsent > _MOST_UNSENT_TOTAL:
            next(iter(self.mailbox.paused), self)._end_unread()

    def _take_at_once(self, delta: Delta) -> bool:
        """Offer a delta to `at_once`, if none before it is still to be consumed; return whether it
        was taken.
        """
        waits = self._wakeup is not None and not self._wakeup.done()
        if not waits or delta.record is not None:
            return False
        assert self.at_once is not None
        try:
            return self.at_once(delta)
        except Exception as error:  # of this stream only: others are in the same delivery
            self.at_once = None
            self._error = error
            self._wake()
            return True

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


Delivery = tuple[Stream, Delta | EngineDead]


class Mailbox:
    """Hands the engine's deliveries to the streams of one event loop.

    A loop that is late is woken once, however many steps have ended, and gets their deltas joined,
    so that it can catch up. It takes a millisecond's worth at a time, and does its other work in
    between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._posted: list[Delivery] = []
        self._called = False  # the loop will take what is posted
        # Used on the loop only: what is to be pushed, what has waited longest first
        self._due: dict[Stream, list[Delta | EngineDead]] = {}
        self.unsent = 0  # bytes, about, that its streams' consumers have not taken
        self.paused: dict[Stream, None] = {}  # those paused for the longest time first

    def post(self, deliveries: Iterable[Delivery]) -> None:
        """Deliver, from any thread. Raise `RuntimeError` when the loop is closed."""
        with self._lock:
            if self.loop.is_closed():
                raise RuntimeError("the event loop is closed")
            self._posted += deliveries
            called, self._called = self._called, True
        if not called:
            self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for stream, what in posted:
            self._due.setdefault(stream, []).append(what)
        end = time.perf_counter() + _SLICE
        try:
            while self._due and time.perf_counter() < end:
                stream = next(iter(self._due))
                stream.push(self._due.pop(stream))
        finally:
            with self._lock:
                self._called = bool(self._due or self._posted)
            if self._called:
                self.loop.call_soon(self._take)


def _size(delta: Delta) -> int:
    """Return about how many bytes a delta takes in memory."""
    size = 500 + len(delta.text) + 40 * len(delta.token_ids)
    for entries in (delta.logprobs, delta.prompt_logprobs):
        if entries:
            size += len(entries) * (100 + 130 * len(entries[-1].top if entries[-1] else ()))
    return size


def joined(deltas: list[Delta]) -> list[Delta]:
    """Join consecutive deltas of one request into one per choice, the one with the record last."""
    if len(deltas) == 1:
        return deltas
    choices: dict[int, list[Delta]] = {}
    for delta in deltas:
        choices.setdefault(delta.choice, []).append(delta)
    merged = [_join(parts) if len(parts) > 1 else parts[0] for parts in choices.values()]
    merged.sort(key=lambda delta: delta.record is not None)
    for index, delta in enumerate(merged):
        if index and delta.prompt_logprobs is not None:  # they come with the request's first delta
            merged[index] = delta._replace(prompt_logprobs=None)
            merged[0] = merged[0]._replace(prompt_logprobs=delta.prompt_logprobs)
    return merged


def _join(parts: list[Delta]) -> Delta:
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return parts[-1]._replace(
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs,
        prompt_logprobs=parts[0].prompt_logprobs,
        at=max(part.at for part in parts),  # the last may have no token, and so no time
    )
