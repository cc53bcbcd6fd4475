"""Work on bodies, and make the reading of bodies that are refused a small share of the time.

A body that costs much to read and is refused is answered late, so that its sender cannot send the
next one at once: all that a key's refused bodies take is about a tenth of one core's time. A sender
of such a body now and then is answered at once, and so is every client that is not at fault. No
answer is later than half a minute, since all clients without a key, or with the same one, are one
sender here. Used on the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

from octavo.server.body import unless_gone
from octavo.server.context import RequestContext
from octavo.server.workers import Kind, Workers

T = TypeVar("T")

_SHARE = 0.1  # of the time
_PER_BYTE_S = 4e-9  # to receive a byte
_AHEAD_S = 2.0  # how long before it is paid for an answer may come
_LATEST_S = 30.0  # how long an answer waits at most


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
