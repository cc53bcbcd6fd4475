"""The engine in its own thread, for asyncio callers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from octavo.engine.engine import Engine, EngineStats, Observer
from octavo.engine.outputs import Delta
from octavo.engine.waiting import Forecast, Waiting
from octavo.schedule.request import AdmissionError, Request, RequestRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineDead(RuntimeError):
    """The engine thread has stopped or hangs; nothing will be generated any more."""


class Stream(AsyncIterator[Delta]):
    """A request's deltas. Deltas that pile up while the consumer is away are joined into one per
    choice, so a slow consumer holds its output once and never slows the engine.

    Ends after the delta that carries ``record``. Raises `EngineDead` if the engine dies first.
    Leaving the iteration early does not abort: call `abort`.

    A consumer that waits need not be woken for every token: ``at_once`` is offered each delta but
    the last as it comes, on the stream's loop, and says whether it took it. What it raises comes
    out of the iteration.
    """

    at_once: Callable[[Delta], bool] | None = None

    def __init__(self, engine: AsyncEngine, record: RequestRecord) -> None:
        self.request_id = record.request_id
        self.record = record  # the live record; complete when record.outcome is set
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._arrived: list[Delta] = []
        self._ready: deque[Delta] = deque()
        self._wakeup: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._over = False  # nothing more will arrive

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while not self._ready:
            if self._arrived:
                self._ready.extend(joined(self._arrived))
                self._arrived = []
            elif self._error is not None:
                raise self._error
            elif self._over:
                raise StopAsyncIteration
            else:
                self._wakeup = self._loop.create_future()
                try:
                    await self._wakeup
                finally:
                    self._wakeup = None
        return self._ready.popleft()

    def abort(self) -> None:
        """Ask the engine to end the request; returns at once. No-op when it has ended."""
        if not self._over:
            self._engine.abort(self.request_id)

    # On the stream's own loop

    def _push(self, delta: Delta) -> None:
        if self._over or (self.at_once is not None and self._take_at_once(delta)):
            return
        self._arrived.append(delta)
        self._over = delta.record is not None
        self._wake()

    def _take_at_once(self, delta: Delta) -> bool:
        """Only where nothing before it is still to be consumed, so that order is kept."""
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

    def _fail(self, error: EngineDead) -> None:
        if not self._over:
            self._over = True
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def joined(deltas: list[Delta]) -> list[Delta]:
    """Consecutive deltas of one request as one for each choice, the one with the record last."""
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
    )


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps when there is no work.

    Methods are called from asyncio (any loop, any thread unless they are coroutines); deliveries
    wake each event loop once a step.
    """

    def __init__(
        self, engine: Engine, *, hang_timeout: float = 60.0, admit_within_target: bool = False
    ) -> None:
        """``hang_timeout``: seconds a single step may take before the engine counts as dead.
        ``admit_within_target``: refuse for now what would miss its latency target, or have those
        miss theirs who run, by prediction.
        """
        self.engine = engine
        self.hang_timeout = hang_timeout
        self.admit_within_target = admit_within_target
        self.waiting = Waiting(engine)
        engine.observers.append(self.waiting)
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._inbox: list[tuple[Request, RequestRecord]] = []
        self._inbox_tokens = 0
        self._aborts: list[str] = []
        self._streams: dict[str, Stream] = {}
        self._looks: list[_Look] = []
        self._draining = False
        self._stopping = False
        self._error: EngineDead | None = None
        self._busy_since: float | None = None  # start of the current step; None while asleep
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watch: asyncio.TimerHandle | None = None
        self._watching: asyncio.AbstractEventLoop | None = None  # the loop of the watch

    async def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises `AdmissionError` (retryable when the queue is full or the
        engine drains; it says when to come back), `InvalidParameter` or `EngineDead` at once.
        """
        record = self.engine.new_record(request)
        try:
            request = self.engine.check(request)
            with self._condition:
                if self._error is not None:
                    raise self._error
                if self._draining or self._stopping:
                    raise AdmissionError("the server is shutting down", retryable=True)
                if request.request_id in self._streams:
                    raise AdmissionError(
                        f"request id {request.request_id!r} is in use", "request_id"
                    )
                self._check_room(0, record)
                stream = self._streams[request.request_id] = Stream(self, record)
                self._inbox.append((request, record))
                self._inbox_tokens += record.prompt_tokens
                self._condition.notify()
        except ValueError as error:
            self.engine.reject(record, error)
            raise
        self._arm_watch()
        return stream

    def check_room(self, pending: int = 0, asks: RequestRecord | None = None) -> None:
        """Refuse for now what `submit` would not take, with ``pending`` requests on their way to
        the queue, of which not all is known. ``asks`` is it, as far as it is known; None: nothing.
        """
        with self._condition:
            self._check_room(pending, asks)

    def _check_room(self, pending: int, asks: RequestRecord | None) -> None:
        scheduler = self.engine.scheduler
        queued = len(self._inbox) + pending
        # Who finds a free seat at the next step does not wait in a queue.
        seats = 0 if scheduler.num_waiting else scheduler.kv.num_free_slots
        tokens = 0 if asks is None else asks.prompt_tokens
        try:
            scheduler.check_queue(tokens, max(0, queued - seats), self._inbox_tokens)
        except AdmissionError as error:
            error.retry_after = self.forecast(pending=pending).wait
            raise
        # An idle engine takes anybody: waiting makes nothing better, and what steps take is only
        # learned from steps.
        busy = queued or scheduler.num_waiting or scheduler.decoding or scheduler.prefilling
        if asks is not None and busy:
            forecast = self.forecast(asks, pending)
            self.waiting.check(asks, forecast, target=self.admit_within_target)

    @property
    def fair_queue(self) -> int | None:
        """How many requests may wait, where clients have fair shares; else None."""
        config = self.engine.scheduler.config
        fair = config.policy.scheduling_policy == "fair"
        return config.max_num_queued_reqs if fair else None

    def forecast(self, asks: RequestRecord | None = None, pending: int = 0) -> Forecast:
        """How a request that came now would fare (engine/waiting.py), with ``pending`` others on
        their way to the queue; None: one that is behind all others.
        """
        queued = len(self._inbox) + pending
        return self.waiting.forecast(asks, queued, self._inbox_tokens)

    def abort(self, request_id: str) -> None:
        """Ask for a request's end; returns at once. Unknown and ended ones are ignored."""
        with self._condition:
            if request_id in self._streams:
                self._aborts.append(request_id)
                self._condition.notify()

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of every step and outcome from now on; see `Observer`."""
        self.engine.observers.append(observer)

    async def look(self, at: Callable[[Engine], T]) -> T:
        """What ``at`` makes of the engine between two steps, on the engine's thread, which waits
        for it: it must be quick and leave all as it is. Raises `EngineDead`, and what it raises.
        """
        loop = asyncio.get_running_loop()
        seen: asyncio.Future[T] = loop.create_future()
        with self._condition:
            if self._error is not None or self._stopping:
                raise self._error or EngineDead("the engine was stopped")
            self._looks.append(_Look(at, loop, seen))
            self._condition.notify()
        return await seen

    def stats(self) -> EngineStats:
        stats = self.engine.stats()
        stats.waiting += len(self._inbox)
        stats.waiting_tokens += self._inbox_tokens
        return stats

    @property
    def alive(self) -> bool:
        """The thread runs, and its current step started less than ``hang_timeout`` ago."""
        return (
            self._error is None
            and self._thread.is_alive()
            and time.monotonic() - self.last_tick < self.hang_timeout
        )

    @property
    def last_tick(self) -> float:
        """`time.monotonic` of the loop's last sign of life (now, while it sleeps idle)."""
        busy_since = self._busy_since
        return time.monotonic() if busy_since is None else busy_since

    @property
    def draining(self) -> bool:
        return self._draining

    async def drain(self, timeout: float | None = None) -> bool:
        """Admit nothing more, wait until everything running has ended; at the timeout abort the
        rest (their streams end with finish_reason ABORT). True if all ended by themselves; False
        too if the engine died.
        """
        with self._condition:
            self._draining = True
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._streams and self.alive:
            if deadline is not None and time.monotonic() >= deadline:
                for request_id in list(self._streams):
                    self.abort(request_id)
                await self._emptied(5.0)
                return False
            await asyncio.sleep(0.01)
        return self._error is None and not self._streams

    async def stop(self) -> None:
        """Abort what runs and end the thread."""
        with self._condition:
            self._stopping = True
            self._aborts += self._streams
            self._condition.notify()
        if self._thread.is_alive():
            await self._emptied(self.hang_timeout)
            await asyncio.to_thread(self._thread.join, self.hang_timeout)
        self._fail_streams(EngineDead("the engine was stopped"))
        if self._watch is not None:
            self._watch.cancel()

    async def _emptied(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._streams and self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    # The thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self.engine.flush()
        except BaseException as error:
            logger.critical("the engine thread died", exc_info=True)
            self._fail_streams(EngineDead(f"the engine died: {error!r}"))
            with self._condition:
                never, self._inbox, self._inbox_tokens = self._inbox, [], 0
            for _, record in never:
                self.engine.refuse(record, EngineDead(str(error)))
            self.engine.give_up(str(self._error))

    def _turn(self) -> bool:
        """Sleep until there is work, take what has arrived, run one step."""
        with self._condition:
            if not (self._inbox or self._aborts or self._looks or self.engine.has_work()):
                self._busy_since = None
                self._check_idle()
                while not (self._inbox or self._aborts or self._looks or self._stopping):
                    self._condition.wait()
            self._busy_since = time.monotonic()
            if self._error is not None:  # given up on in the last step, which took too long
                raise self._error
            if self._stopping and not (self._inbox or self._aborts or self.engine.has_work()):
                self._busy_since = None
                return False
            arrived, self._inbox, self._inbox_tokens = self._inbox, [], 0
            aborts, self._aborts = self._aborts, []
            looks, self._looks = self._looks, []
        for request, record in arrived:
            try:
                self.engine.admit(request, record)
            except Exception as error:
                logger.exception("request %r was not taken", request.request_id)
                self._deliver([self.engine.refuse(record, error)])
        for request_id in aborts:
            self.engine.abort(request_id)
        for look in looks:
            look.take(self.engine)
        self._deliver(self.engine.step())
        return True

    def _check_idle(self) -> None:
        """A leak makes the cache smaller but no answer wrong: say so, and serve on."""
        try:
            self.engine.check_integrity()
        except RuntimeError:
            logger.critical("the idle engine holds blocks", exc_info=True)

    def _deliver(self, deltas: list[Delta]) -> None:
        """One wake-up for each event loop that has a stream in this step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}
        with self._condition:
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is None:  # given up on when the engine seemed dead
                    continue
                by_loop.setdefault(stream._loop, []).append((stream, delta))
                if delta.record is not None:
                    del self._streams[delta.request_id]
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_push_all, deliveries)
            except RuntimeError:  # the loop is closed: nobody listens any more
                for stream, _ in deliveries:
                    self.abort(stream.request_id)

    def _fail_streams(self, error: EngineDead) -> None:
        with self._condition:
            self._error = self._error or error
            streams, self._streams = list(self._streams.values()), {}
            looks, self._looks = self._looks, []
        for look in looks:
            look.end(look.seen.set_exception, error)
        for stream in streams:
            try:
                stream._loop.call_soon_threadsafe(stream._fail, error)
            except RuntimeError:
                continue

    # Liveness: armed while a stream is open

    def _arm_watch(self) -> None:
        if self._watch is None or self._watching is None or self._watching.is_closed():
            self._watching = asyncio.get_running_loop()
            self._watch = self._watching.call_later(self.hang_timeout / 4, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self.alive and self._error is None:
            self._fail_streams(
                EngineDead(f"the engine has not moved for {self.hang_timeout:g} seconds")
            )
        elif self._streams:
            self._arm_watch()


class _Look(NamedTuple):
    at: Callable[[Engine], Any]
    loop: asyncio.AbstractEventLoop
    seen: asyncio.Future[Any]

    def take(self, engine: Engine) -> None:
        try:
            self.end(self.seen.set_result, self.at(engine))
        except Exception as error:
            self.end(self.seen.set_exception, error)

    def end(self, settle: Callable[[Any], None], value: object) -> None:
        def told() -> None:
            if not self.seen.done():  # whoever asked may have gone
                settle(value)

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(told)


def _push_all(deliveries: list[tuple[Stream, Delta]]) -> None:
    for stream, delta in deliveries:
        stream._push(delta)
