"""The threads that work on bodies, and what the work on bodies that are refused costs.

A body that costs much to read and is refused is answered late, so that its sender cannot send the
next one at once: all that a key's refused bodies take is about a tenth of one core's time. A sender
of such a body now and then is answered at once, and so is every client that is not at fault. No
answer is later than half a minute, since all clients without a key, or with the same one, are one
sender here. Used on the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeVar

from starlette.types import Receive

from octavo.server.errors import ClientGone, too_many

if TYPE_CHECKING:
    from octavo.server.context import RequestContext

T = TypeVar("T")

Kind = Literal["text", "chat"]

_THREADS = 4  # so that one long prompt does not keep the short ones waiting
# A thread that waits for a chat template's process uses no core, so chats may have more threads.
_CHAT_THREADS = 4  # for each thread of texts
SMALL = 64 << 10  # bytes; what is longer is read by other threads, so that nobody waits for it
_MOST = 1024  # bodies at a time
_LARGE = 256 << 10  # bytes
_PAUSE = 1.0  # seconds after a large body: by then its answer is often gone, and the next have come
_SHARE = 0.1  # of the time, for bodies that are refused
_PER_BYTE_S = 4e-9  # to receive a byte
_AHEAD_S = 2.0  # how long before it is paid for an answer may come
_LATEST_S = 30.0  # how long an answer waits at most


class Workers:
    """Runs the work on bodies in threads. Texts and chats, small bodies and large ones have threads
    of their own, so that no body waits for a kind that takes longer.

    A few large bodies may take hundreds of megabytes for a moment. The C library would keep them
    for its threads' later use, and is told to give them back.
    """

    def __init__(self, threads: int = _THREADS) -> None:
        sizes = {"text": threads, "chat": threads * _CHAT_THREADS}
        self._threads = {
            (kind, large): ThreadPoolExecutor(
                1 if large else size, thread_name_prefix=f"octavo-{kind}"
            )
            for kind, size in sizes.items()
            for large in (False, True)
        }
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        self._planned = False
        self.pending = 0  # bodies being worked on, or waiting for a thread

    def run(
        self, work: Callable[[bytes], T], body: bytes, kind: Kind = "text"
    ) -> asyncio.Future[T]:
        """Do ``work`` on ``body`` in a thread. It counts as pending at once, and is never begun if
        it is cancelled before. Raises a 429 when too many others wait for a thread.
        """
        if self.pending >= _MOST:
            raise too_many(f"{self.pending} requests are being read", None, "capacity")
        held = [body]  # not in the threads' queue, which keeps what is cancelled until its turn
        large = len(body) >= _LARGE
        self.pending += 1
        threads = self._threads[kind, len(body) > SMALL]
        future = asyncio.wrap_future(threads.submit(lambda: work(held.pop())))

        def ended(_: object) -> None:
            held.clear()
            self.pending -= 1
            if large and not self._planned:
                self._planned = True
                future.get_loop().call_later(_PAUSE, threads.submit, self._give_back)

        future.add_done_callback(ended)
        return future

    def _give_back(self) -> None:
        self._planned = False
        if self._trim is not None:
            self._trim(0)


async def unless_gone(receive: Receive, work: asyncio.Future[T]) -> T:
    """Return what comes of ``work``. Cancels it and raises `ClientGone` if the client leaves."""
    watch = DisconnectWatch(receive, work.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if watch.gone:
            raise ClientGone from None
        raise
    finally:
        await watch.close()
        del work, watch  # whose exception holds this frame


class DisconnectWatch:
    """Notices that the client leaves, in every state of its request."""

    def __init__(self, receive: Receive, on_gone: Callable[[], object]) -> None:
        self.gone = False
        self._receive = receive
        self._on_gone = on_gone
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # An exception that is kept would keep all that the request is made of, in a circle.
        with suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.gone = True
            self._on_gone()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])  # which, if its own task is cancelled, is cancelled too


async def work_on(
    body: bytes,
    work: Callable[[bytes], T],
    kind: Kind,
    workers: Workers,
    context: RequestContext,
    receive: Receive,
) -> T:
    """Return what ``work`` makes of ``body`` in a thread, and note in ``context`` what it costs.

    Raises `ClientGone` if the client leaves meanwhile.
    """
    context.body_bytes = len(body)

    def timed(body: bytes) -> T:
        began = time.perf_counter()
        try:
            return work(body)
        finally:
            context.work_s += time.perf_counter() - began

    return await unless_gone(receive, workers.run(timed, body, kind))


class Refusals:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._paid: dict[str, float] = {}  # by client: when all that it cost is paid for
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Let nobody wait any more: the server stops."""
        self._draining.set()

    def delay_s(self, client: str, body_bytes: int, work_s: float) -> float:
        """Return the seconds until ``client``, the name of a key, is to be told of a refusal."""
        now = self._now()
        paid = max(now, self._paid.get(client, now)) + (work_s + body_bytes * _PER_BYTE_S) / _SHARE
        self._paid[client] = min(paid, now + _AHEAD_S + _LATEST_S)
        return max(0.0, self._paid[client] - now - _AHEAD_S)

    async def pay(self, context: RequestContext, receive: Receive) -> None:
        """Wait for as long as the refusal of a request costs. Raises `ClientGone`."""
        if not context.body_bytes:  # nothing was read
            return
        wait = self.delay_s(context.client, context.body_bytes, context.work_s)
        if wait > 0:
            stopped = asyncio.wait_for(self._draining.wait(), wait)
            with suppress(TimeoutError):
                await unless_gone(receive, asyncio.ensure_future(stopped))
