"""The engine in its own thread, for asyncio callers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from octavo.engine.engine import Engine, EngineStats
from octavo.engine.outputs import Delta
from octavo.schedule.request import Request, RequestRecord


class EngineDead(RuntimeError):
    """The engine thread has stopped or hangs; nothing will be generated any more."""


class Stream(AsyncIterator[Delta]):
    """A request's deltas. Deltas that pile up while the consumer is away are joined into one per
    choice, so a slow consumer holds its output once and never slows the engine.

    Ends after the delta that carries ``record``. Raises `EngineDead` if the engine dies first.
    Leaving the iteration early does not abort: call `abort`.
    """

    request_id: str
    record: RequestRecord  # the live record; complete when record.outcome is set

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        raise NotImplementedError

    def abort(self) -> None:
        """Ask the engine to end the request; returns at once. No-op when it has ended."""
        raise NotImplementedError


class AsyncEngine:
    """Runs an `Engine` in a thread that sleeps when there is no work.

    Methods are called from asyncio (any loop, any thread unless they are coroutines); deliveries
    wake each event loop once a step.
    """

    def __init__(self, engine: Engine, *, hang_timeout: float = 60.0) -> None:
        """``hang_timeout``: seconds a single step may take before the engine counts as dead."""
        raise NotImplementedError

    async def start(self) -> None: ...

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises `AdmissionError` (retryable when the queue is full or the
        engine drains), `InvalidParameter` or `EngineDead` at once.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """The thread runs, and its current step started less than ``hang_timeout`` ago."""
        raise NotImplementedError

    @property
    def last_tick(self) -> float:
        """`time.monotonic` of the loop's last sign of life (now, while it sleeps idle)."""
        raise NotImplementedError

    @property
    def draining(self) -> bool:
        raise NotImplementedError

    async def drain(self, timeout: float | None = None) -> bool:
        """Admit nothing more, wait until everything running has ended; at the timeout abort the
        rest (their streams end with finish_reason ABORT). True if all ended by themselves.
        """
        raise NotImplementedError

    async def stop(self) -> None:
        """Abort what runs and end the thread."""
