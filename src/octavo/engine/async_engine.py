"""Run the engine in a thread of its own, for asyncio callers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeVar

from octavo.engine import collector
from octavo.engine.engine import Engine, Observer
from octavo.engine.outputs import Delta
from octavo.engine.stats import EngineStats
from octavo.engine.stream import Delivery, EngineDead, Mailbox, Stream
from octavo.engine.wait_time import WaitTimePredictor
from octavo.scheduler.admission import Forecast
from octavo.scheduler.request import AdmissionError, Outcome, Request, RequestRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STOPPED = "the engine was stopped"
_REST = 0.05  # seconds without work, after which there is time for the garbage collector


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps when there is no work.

    Coroutines are called on an event loop, the other methods from any thread. Deliveries wake each
    event loop once a step.
    """

    def __init__(
        self, engine: Engine, *, hang_timeout: float = 60.0, admit_within_target: bool = False
    ) -> None:
        """``hang_timeout``: seconds a single step may take before the engine counts as dead.
        ``admit_within_target``: refuse for now requests that would miss their latency target, or
        make running ones miss theirs, by prediction.
        """
        self.engine = engine
        self.hang_timeout = hang_timeout
        self.admission = engine.scheduler.admission
        self.admission.within_target = admit_within_target
        self.admission.forecaster = self.forecaster = WaitTimePredictor(engine)
        engine.observers.append(self.forecaster)
        self._condition = threading.Condition()
        # Guarded by the condition:
        self._inbox: deque[tuple[Request, RequestRecord]] = deque()
        self._inbox_tokens = 0
        self._calls: list[Callable[[Engine], object]] = []  # to be made between two steps
        self._pauses: dict[str, bool] = {}  # likewise: whether to pause; the last word counts
        self._streams: dict[str, Stream] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._inspections: set[Future[Any]] = set()  # those that are awaited
        self._draining = False
        self._stopping = False
        self._error: EngineDead | None = None
        self._busy_since: float | None = None  # start of the current step; None while asleep
        self.thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._watchdog: asyncio.TimerHandle | None = None
        self._watchdog_loop: asyncio.AbstractEventLoop | None = None
        # Used by the thread only: taken from the inbox and not yet admitted
        self._taken: deque[tuple[Request, RequestRecord]] = deque()
        self._holds_back = False  # the garbage collector

    async def start(self) -> None:
        """Start the thread. Until `stop` the garbage collector makes fewer full passes."""
        collector.hold_back()
        self._holds_back = True
        self.thread.start()

    def check(self, request: Request) -> Request:
        """Return the request as `submit_all` takes it. A long prompt takes a while: any thread may
        call this. Raise `AdmissionError` or `InvalidParameter` if it can never run; call `reject`
        then.
        """
        return self.engine.check(request)

    def reject(self, requests: Sequence[Request], error: ValueError) -> None:
        """Count requests that are refused."""
        for request in requests:
            self.engine.refuse(self.engine.new_record(request), error)

    def submit(self, request: Request) -> Stream:
        """Do `check` and `submit_all` for one request."""
        try:
            checked = self.check(request)
        except ValueError as error:
            self.reject([request], error)
            raise
        return self.submit_all([checked])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Stream]:
        """Queue requests that have passed `check`: all of them or, when one is refused, none.
        Raise `AdmissionError` (retryable when the queue is full or the engine drains; it says when
        to come back) or `EngineDead` at once.
        """
        records = [self.engine.new_record(request) for request in requests]
        try:
            self._check_alive()
            self.admission.check_forecast(records, len(self._inbox), self._inbox_tokens)
            with self._condition:
                self._check_alive()
                if self._draining or self._stopping:
                    raise AdmissionError("the server is shutting down", retryable=True)
                for index, request in enumerate(requests):
                    name = request.request_id
                    if name in self._streams or name in (r.request_id for r in requests[:index]):
                        raise AdmissionError(f"request id {name!r} is in use", "request_id")
                replaced = self.admission.check_queue(records, len(self._inbox), self._inbox_tokens)
                self._calls += [partial(Engine.replace, request_id=r.request_id) for r in replaced]
                mailbox = self._mailbox(asyncio.get_running_loop())
                streams = [Stream(record, mailbox, self.abort, self.pause) for record in records]
                for request, stream in zip(requests, streams, strict=True):
                    self._streams[request.request_id] = stream
                    self._inbox.append((request, stream.record))
                    self._inbox_tokens += stream.record.prompt_tokens
                self.admission.enter(records, replaced)
                self._condition.notify()
        except (ValueError, EngineDead) as error:
            for record in records:
                self.engine.refuse(record, error)
            raise
        self._arm_watchdog()
        return streams

    def check_room(self, pending: int = 0, asks: RequestRecord | None = None) -> None:
        """Raise as `submit_all` would now for a request, of which ``asks`` has what is known so far
        (None: nothing, and it may come before all others), behind ``pending`` other requests on
        their way to the queue. Does not wait.
        """
        self._check_alive()
        asking = [] if asks is None else [asks]
        queued, tokens = len(self._inbox) + pending, self._inbox_tokens
        try:
            self.admission.check_queue(asking, queued, tokens)
        except AdmissionError as error:
            if not (pending and error.retryable and self.admission.would_replace(asks)):
                raise
        self.admission.check_forecast(asking, queued, tokens)

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._dead()
        if self._hangs:
            raise self._hung()

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        if loop not in self._mailboxes:
            for other in [other for other in self._mailboxes if other.is_closed()]:
                del self._mailboxes[other]
            self._mailboxes[loop] = Mailbox(loop)
        return self._mailboxes[loop]

    @property
    def fair_queue(self) -> int | None:
        """How many requests may wait, if clients have fair shares; else None."""
        scheduler = self.engine.scheduler
        return scheduler.config.max_num_queued_reqs if scheduler.policy.by_client else None

    def forecast(self, asks: RequestRecord | None = None, pending: int = 0) -> Forecast:
        """Predict how a request that comes now would fare (engine/wait_time.py), with ``pending``
        others on their way to the queue; None: one that is behind all others.
        """
        queued = len(self._inbox) + pending
        return self.forecaster.forecast(asks, queued, self._inbox_tokens)

    def abort(self, request_id: str) -> None:
        """Ask the engine to end a request; return at once. Ignore unknown and ended ones."""
        with self._condition:
            if request_id in self._streams:
                self._calls.append(partial(Engine.abort, request_id=request_id))
                self._condition.notify()

    def pause(self, request_id: str, paused: bool) -> None:
        """Ask the engine to generate nothing for a request, or to go on; return at once."""
        with self._condition:
            if request_id in self._streams:
                self._pauses[request_id] = paused
                self._condition.notify()

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` about every step and outcome from now on; see `Observer`."""
        self.engine.observers.append(observer)

    async def inspect(self, at: Callable[[Engine], T]) -> T:
        """Return what ``at`` returns, called with the engine between two steps on the engine's
        thread. It must be quick and change nothing. Raise `EngineDead`, and what ``at`` raises.
        """
        result: Future[T] = Future()

        def call(engine: Engine) -> None:
            if not result.done():
                with suppress(InvalidStateError):  # cancelled meanwhile
                    try:
                        result.set_result(at(engine))
                    except Exception as error:
                        result.set_exception(error)

        with self._condition:
            if self._error is not None or self._stopping:
                raise self._dead()
            self._inspections.add(result)
            self._calls.append(call)
            self._condition.notify()
        try:
            return await asyncio.wrap_future(result)
        finally:  # the caller may have gone, and the engine may hang
            with self._condition:
                self._inspections.discard(result)
                with suppress(ValueError):  # it has been made
                    self._calls.remove(call)

    def stats(self) -> EngineStats:
        stats = self.engine.stats()
        stats.waiting += len(self._inbox)
        stats.waiting_tokens += self._inbox_tokens
        return stats

    @property
    def unsent(self) -> int:
        """About how many bytes of output have not been taken yet."""
        return sum(mailbox.unsent for mailbox in list(self._mailboxes.values()))

    @property
    def alive(self) -> bool:
        """Whether the thread runs and its current step started less than ``hang_timeout`` ago."""
        return self._error is None and self.thread.is_alive() and not self._hangs

    @property
    def _hangs(self) -> bool:
        return time.monotonic() - self.last_tick >= self.hang_timeout

    def _dead(self) -> EngineDead:
        """Return a new error for each caller: one for all would keep the frames of all of them."""
        return EngineDead(_STOPPED) if self._error is None else EngineDead(*self._error.args)

    def _hung(self) -> EngineDead:
        return EngineDead(f"the engine has not moved for {self.hang_timeout:g} seconds")

    @property
    def last_tick(self) -> float:
        """`time.monotonic` of the loop's last sign of life; now, while it sleeps idle."""
        busy_since = self._busy_since
        return time.monotonic() if busy_since is None else busy_since

    @property
    def draining(self) -> bool:
        return self._draining

    async def drain(self, timeout: float | None = None) -> bool:
        """Admit nothing more, and wait until everything running has ended; at the timeout, abort
        the rest (their streams end with finish_reason ABORT). Return whether all ended by
        themselves; False if the engine died.
        """
        with self._condition:
            self._draining = True
        await self._emptied(inf if timeout is None else timeout)
        if self._streams and self.alive:
            for request_id in list(self._streams):
                self.abort(request_id)
            await self._emptied(5.0)
            return False
        return self._error is None and not self._streams

    async def stop(self) -> None:
        """Abort what runs and end the thread."""
        with self._condition:
            self._stopping = True
            self._calls += [partial(Engine.abort, request_id=each) for each in self._streams]
            self._condition.notify()
        if self.thread.is_alive():
            await self._emptied(self.hang_timeout)
            await asyncio.to_thread(self.thread.join, self.hang_timeout)
        self._fail_streams(EngineDead(_STOPPED))
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._holds_back:
            self._holds_back = False
            collector.release()

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
            self.engine.fail_all(str(self._error))
            with self._condition:
                never, self._inbox, self._inbox_tokens = self._inbox, deque(), 0
            for _, record in (*self._taken, *never):
                if record.outcome is None:
                    self.engine.refuse(record, EngineDead(str(error)))

    def _turn(self) -> bool:
        """Sleep until there is work, take what has arrived, run one step. Return False to end."""
        with self._condition:
            if not (self._called_for or self.engine.has_work()):
                self._busy_since = None
                self._check_idle()
                # Other threads still send the last tokens, and a pass would hold them up.
                if not self._condition.wait_for(self._woken, _REST):
                    collector.catch_up()
                self._condition.wait_for(self._woken)
            self._busy_since = time.monotonic()
            if self._error is not None:  # the last step took so long that all streams have failed
                raise self._error
            if self._stopping and not (self._called_for or self.engine.has_work()):
                self._busy_since = None
                return False
            self._taken, self._inbox, self._inbox_tokens = self._inbox, deque(), 0
            calls, self._calls = self._calls, []
            pauses, self._pauses = self._pauses, {}
        while self._taken:
            request, record = self._taken[0]
            try:
                self.engine.admit(request, record)
            except Exception as error:
                logger.exception("request %r could not be queued", request.request_id)
                # Whatever the error is, the request had been accepted.
                self._deliver([self.engine.refuse(record, error, Outcome.FAILED)])
            self._taken.popleft()
        for request_id, paused in pauses.items():
            (self.engine.pause if paused else self.engine.resume)(request_id)
        for call in calls:
            call(self.engine)
        self._deliver(self.engine.step())
        return True

    @property
    def _called_for(self) -> bool:
        return bool(self._inbox or self._calls or self._pauses)

    def _woken(self) -> bool:
        return self._called_for or self._stopping

    def _check_idle(self) -> None:
        """Log blocks that are held by no request: a leak makes the cache smaller but no answer
        wrong. With paused requests the check takes time, for which others would wait.
        """
        if self.engine.requests:
            return
        try:
            self.engine.check_integrity()
        except RuntimeError:
            logger.critical("the idle engine holds blocks", exc_info=True)

    def _deliver(self, deltas: list[Delta]) -> None:
        deliveries: list[Delivery] = []
        with self._condition:
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is None:  # it has failed, when the engine seemed dead
                    continue
                deliveries.append((stream, delta))
                if delta.record is not None:
                    del self._streams[delta.request_id]
        self._post(deliveries)

    def _post(self, deliveries: list[Delivery]) -> None:
        mailboxes: dict[Mailbox, list[Delivery]] = {}
        for delivery in deliveries:
            mailboxes.setdefault(delivery[0].mailbox, []).append(delivery)
        for mailbox, its_own in mailboxes.items():
            try:
                mailbox.post(its_own)
            except RuntimeError:  # the loop is closed: no one listens any more
                for stream, _ in its_own:
                    self.abort(stream.request_id)

    def _fail_streams(self, error: EngineDead) -> None:
        with self._condition:
            self._error = self._error or error
            streams, self._streams = list(self._streams.values()), {}
            inspections, self._inspections = self._inspections, set()
        for inspection in inspections:
            with suppress(InvalidStateError):
                inspection.set_exception(error)
        self._post([(stream, error) for stream in streams])

    # Watchdog: it runs while a stream is open

    def _arm_watchdog(self) -> None:
        loop = self._watchdog_loop
        if self._watchdog is None or loop is None or loop.is_closed():
            loop = self._watchdog_loop = asyncio.get_running_loop()
            self._watchdog = loop.call_later(self.hang_timeout / 4, self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        if not self.alive and self._error is None:
            self._fail_streams(self._hung())
        elif self._streams:
            self._arm_watchdog()
